"""What does a stale launch bound do when a token has one expert twice?

  python -m experiments.duplicate_routes --out=DIR

All slots of all tokens go to one expert, so it has tokens * top_k rows. Split
and merged fc1 and the eager loop, each with its gradient, are compared with
float64; so is a backward pass whose launch bound is still the token count,
under memory that held NaN, zeros and 1e4. Prints which rows such a bound leaves
unwritten in several routings, and writes `duplicate_routes.tsv`: one line for
each arm and tensor. The last line is one JSON record. Exit codes: 0 the three
forms are right and the stale bound is not, 1 otherwise, 2 usage or harness
error.
"""

import dataclasses
import functools
import pathlib

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments.support import binary
from experiments.support import environment
from moejax.contracts import document
from moejax.contracts import grouped_mlp
from moejax.numerics.grouped import composed
from moejax.numerics.grouped import mlp
from moejax.numerics.grouped import mlp_oracle
from moejax.numerics.grouped import row_plan
from moejax.numerics.grouped import tiles

_OUT = flags.DEFINE_string(
    "out", None, "Folder for the table; made if absent.", required=True
)
_TOKENS = flags.DEFINE_integer("tokens", 128, "Tokens.", lower_bound=1)
_TOP_K = flags.DEFINE_integer("top_k", 2, "Slots of a token.", lower_bound=1)
_BLOCK_M = flags.DEFINE_integer(
    "block_m", 128, "Rows of a tile.", lower_bound=1
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", ("bfloat16", "float32", "float64"), "Of all operands."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the operands.")

_EXPERTS, _EMBED, _HIDDEN, _GATE = 4, 64, 32, 0.75
_TENSORS = ("y", "dx", "d_gates", "d_gate_up", "d_down")
# Relative Frobenius error, and largest error over largest value.
_RULES = {
    "bfloat16": (1e-2, 2e-2), "float32": (1e-5, 1e-5),
    "float64": (1e-12, 1e-12),
}
_COLUMNS = (
    "arm", "tensor", "elements", "not_finite", "relative_frobenius",
    "largest_over_largest", "right",
)


def _routings():
  """(tokens, slots, which, ids) of the table."""
  def same(tokens, top_k):
    return np.zeros((tokens, top_k), np.int32)

  balanced = np.tile(np.int32([0, 1]), (128, 1))
  one, half = balanced.copy(), balanced.copy()
  one[5], half[:64] = 0, 0
  yield "all (0,0)", same(128, 2), 128
  yield "all (0,1)", balanced, 128
  yield "(0,1), token 5 (0,0)", one, 128
  yield "64 (0,0), 64 (0,1)", half, 128
  for tokens, top_k, block in (
      (100, 2, 128), (129, 2, 128), (128, 3, 128), (64, 2, 128),
      (128, 2, 64), (128, 2, 256),
  ):
    yield "all 0", same(tokens, top_k), block


def _stale(limit, block, fill="nan"):
  return grouped_mlp.GroupGemmContract(
      name="stale", chain="portable", bound="limit", limit=limit,
      block_rows=block, unwritten=fill,
  )


def _unwritten(ids, gemm) -> tuple[list[int], list[int]]:
  """Rows of each expert, and rows that no tile of the launch covers."""
  plan = row_plan.row_plan(jnp.asarray(ids), int(ids.max()) + 1)
  count = tiles.coverage(
      tiles.of_contract(plan, gemm), ids.size, gemm.block_rows
  )
  return np.asarray(plan.counts).tolist(), np.flatnonzero(
      np.asarray(count) == 0
  ).tolist()


def _span(rows: list[int]) -> list[int]:
  return [rows[0], rows[-1]] if rows else []


def _table() -> list[dict]:
  out = []
  for which, ids, block in _routings():
    counts, rows = _unwritten(ids, _stale(len(ids), block))
    out.append({
        "tokens": len(ids), "top_k": ids.shape[1], "routing": which,
        "block_m": block, "max_m": len(ids), "counts": counts,
        "unwritten": len(rows), "span": _span(rows),
    })
  return out


def _problem(dtype: str):
  rng = np.random.default_rng(_SEED.value)
  ids = np.zeros((_TOKENS.value, _TOP_K.value), np.int32)
  x, dy = (rng.standard_normal((len(ids), _EMBED)) for _ in range(2))
  gate_up = rng.standard_normal((_EXPERTS, 2 * _HIDDEN, _EMBED)) / 8
  down = rng.standard_normal((_EXPERTS, _EMBED, _HIDDEN)) / 6
  gates = np.full(ids.shape, _GATE)
  return tuple(
      v.astype(jnp.dtype(dtype)) for v in (x, gates, gate_up, down)
  ), ids, dy.astype(jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnames=("function", "contract"))
def _gradients(operands, ids, dy, function, contract):
  y, vjp = jax.vjp(lambda *a: function(*a, ids, contract), *operands)
  return (y, *vjp(dy))


def _arms():
  """(name, function, contract); the first three must be right."""
  right = {
      layout: grouped_mlp.GroupedMlpContract(fc1_layout=layout)
      for layout in ("split", "merged")
  }
  for layout, contract in right.items():
    yield layout, mlp.moe_mlp, contract
  yield "eager", composed.eager, right["merged"]
  portable = grouped_mlp.of_chain("portable", fc1_layout="split")
  for fill in grouped_mlp.FILLS:
    gemm = _stale(_TOKENS.value, _BLOCK_M.value, fill)
    yield (
        f"stale_{fill}", mlp.moe_mlp,
        dataclasses.replace(portable, dgrad=gemm),
    )


def _compare(arm, found, wanted, dtype) -> list[dict]:
  frobenius, largest = _RULES[dtype]
  out = []
  for name in _TENSORS:
    got, value = (np.asarray(v[name], np.float64) for v in (found, wanted))
    bad = int(np.count_nonzero(~np.isfinite(got)))
    relative = worst = None
    if not bad:
      error = np.abs(got - value)
      relative = float(np.linalg.norm(error) / np.linalg.norm(value))
      worst = float(error.max() / np.abs(value).max())
    out.append(dict(zip(_COLUMNS, (
        arm, name, got.size, bad, relative, worst,
        not bad and relative <= frobenius and worst <= largest,
    ), strict=True)))
  return out


def _fingerprint(found) -> dict:
  """Where NaN shows up: tokens of dx, slots of dg, experts of weights."""
  def where(name, *axes):
    bad = np.isnan(np.asarray(found[name], np.float64))
    return np.flatnonzero(bad.any(axis=axes)).tolist()

  return {
      "dx_tokens": len(where("dx", 1)),
      "d_gates_slots": int(np.isnan(
          np.asarray(found["d_gates"], np.float64)
      ).sum()),
      "d_gate_up_experts": where("d_gate_up", 1, 2),
      "d_down_experts": where("d_down", 1, 2),
  }


def _print(table, entries, fingerprint):
  print(f"{'T':>4} {'k':>2}  {'routing':22} {'BM':>4} {'max_M':>5}"
        "  rows of each expert  unwritten in each dgrad")
  for row in table:
    span = "..".join(map(str, sorted(set(row["span"])))) or "none"
    print(f"{row['tokens']:4} {row['top_k']:2}  {row['routing']:22}"
          f" {row['block_m']:4} {row['max_m']:5}  {str(row['counts']):19}"
          f"  {row['unwritten']:3} {span}")
  print()
  for entry in entries:
    error = entry["relative_frobenius"]
    state = (
        f"{entry['not_finite']} not finite" if entry["not_finite"]
        else f"relative error {error:.2e}"
    )
    print(f"{entry['arm']:10} {entry['tensor']:10} {state:24}"
          f" {'right' if entry['right'] else 'WRONG'}")
  print(f"\nstale bound over NaN: {fingerprint}")


def _write(folder: pathlib.Path, entries) -> pathlib.Path:
  folder.mkdir(parents=True, exist_ok=True)
  lines = ["\t".join(_COLUMNS)]
  for entry in entries:
    lines.append("\t".join(
        "" if entry[c] is None else str(entry[c]) for c in _COLUMNS
    ))
  path = folder / "duplicate_routes.tsv"
  path.write_text("\n".join(lines) + "\n", "utf-8")
  return path


def main() -> int:
  """Runs the arms, prints and writes the tables."""
  dtype = _DTYPE.value
  operands, ids, dy = _problem(dtype)
  wide = [np.asarray(v, np.float64) for v in (*operands, dy)]
  wanted = mlp_oracle.moe_mlp_oracle(
      *wide[:4], ids, wide[4], grouped_mlp.of_chain("portable")
  )
  entries, stale = [], None
  for arm, function, contract in _arms():
    found = dict(zip(_TENSORS, _gradients(
        operands, ids, dy, function, contract
    ), strict=True))
    entries += _compare(arm, found, wanted, dtype)
    stale = found if arm == "stale_nan" else stale
  ours = [e for e in entries if not e["arm"].startswith("stale")]
  rows = _unwritten(ids, _stale(_TOKENS.value, _BLOCK_M.value))[1]
  seen = {
      fill: not all(e["right"] for e in entries if e["arm"] == f"stale_{fill}")
      for fill in grouped_mlp.FILLS
  }
  table, fingerprint = _table(), _fingerprint(stale)
  _print(table, entries, fingerprint)
  path = _write(pathlib.Path(_OUT.value), entries)
  record = {
      "schema": "duplicate_routes/1",
      "finite": not any(e["not_finite"] for e in ours),
      "right": all(e["right"] for e in ours),
      "stale_rows": _span(rows),
      "stale_wrong": seen,
      "stale_fingerprint": fingerprint,
      "request": {
          "tokens": _TOKENS.value, "top_k": _TOP_K.value,
          "block_m": _BLOCK_M.value, "dtype": dtype, "seed": _SEED.value,
          "contracts": {
              arm: document.digest(contract) for arm, _, contract in _arms()
          },
      },
      "table": table,
      "rule": dict(zip(("frobenius", "largest"), _RULES[dtype], strict=True)),
      "file": path.name,
      "environment": environment.describe(),
  }
  binary.last_line(record)
  # Where the bound leaves no row, a stale backward pass is right.
  told = all(wrong == bool(rows) for wrong in seen.values())
  return 0 if record["finite"] and record["right"] and told else 1


if __name__ == "__main__":
  binary.run(main)
