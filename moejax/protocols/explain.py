"""Which combine contract produced these results?

Given the operands of every combine of a run and what a backend returned, each
candidate contract is executed and its bits are compared, row by row (a row is
one token in one layer). Candidates are the named contracts and the four schemes
in slot and in expert order; where none of them reproduces every row and the
number of slots allows it, every explicit order of each scheme is tried too.
Where several survive, data are sought that would tell them apart.

Layer: protocols.
"""

from collections.abc import Sequence
import dataclasses
import itertools

import numpy as np

from moejax.contracts import combine
from moejax.contracts import document
from moejax.contracts import named_combines
from moejax.numerics import ordered_combine
from moejax.numerics.portable import portable_oracle
from moejax.protocols import capture
from moejax.protocols import taps as taps_lib

_MAX_PERMUTATIONS = 5040  # 7!
_PROBE_ROWS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
  """The operands and results of many combines, one row a token and layer.

  Attributes:
    expert_out: [row, slot, embed].
    gate: [row, slot].
    expert_ids: [row, slot].
    result: [row, embed], what the backend returned.
  """

  expert_out: np.ndarray
  gate: np.ndarray
  expert_ids: np.ndarray
  result: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
  """A contract and the number of rows whose every bit it reproduces."""

  contract: combine.CombineContract
  rows: int


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
  """The outcome.

  Attributes:
    rows: Rows that were tried.
    name: Name of the explaining contract, or None.
    survivors: Contracts that reproduce every row.
    candidates: All that were tried by name, best first.
    apart: For each further survivor with other fields: its name, the fields in
      which it differs from the first, and random data that would tell them
      apart (seed, rows that differ of how many), or a statement that none was
      found.
  """

  rows: int
  name: str | None
  survivors: tuple[combine.CombineContract, ...]
  candidates: tuple[Candidate, ...]
  apart: tuple[dict, ...]


def operands_of(captures: Sequence[capture.Capture]) -> Operands | None:
  """Collects the combines of a run; None if it has none or lacks taps."""
  parts: dict[str, list] = {"out": [], "gate": [], "ids": [], "result": []}
  for one in captures:
    for step in one.steps:
      for name in step.taps:
        layer, tap = taps_lib.split(name)
        if tap != "moe.experts.combine":
          continue
        at = f"layers.{layer}.moe"
        gates = next(
            (
                step.taps[f"{at}.router.{leaf}"]
                for leaf in ("gates", "normalized")
                if f"{at}.router.{leaf}" in step.taps
            ),
            None,
        )
        needed = (f"{at}.experts.down", f"{at}.router.ids")
        if gates is None or any(n not in step.taps for n in needed):
          return None
        parts["out"].append(step.taps[needed[0]])
        parts["gate"].append(gates)
        parts["ids"].append(step.taps[needed[1]])
        parts["result"].append(step.taps[name])
  if not parts["out"]:
    return None
  return Operands(*(np.concatenate(parts[key]) for key in parts))


def explain(
    operands: Operands, arithmetic: str, prefer: str = ""
) -> Explanation:
  """Finds the contracts that reproduce every bit of every row.

  Args:
    operands: From `operands_of`.
    arithmetic: "portable" (see `portable_oracle.is_one_sum`) or "contract"
      (the accumulator rounds after every addition).
    prefer: A name that wins among contracts with equal bits.
  """
  dtype = operands.result.dtype.name
  tried = [
      Candidate(c, int(_matches(operands, c, arithmetic).sum()))
      for c in _candidates(dtype, prefer)
  ]
  tried.sort(key=lambda c: -c.rows)
  rows = len(operands.result)
  survivors = [c.contract for c in tried if c.rows == rows]
  if not survivors:
    survivors = _explicit_orders(operands, arithmetic, dtype)
  first = survivors[0] if survivors else None
  apart = tuple(
      _apart(first, other, operands, arithmetic)
      for other in survivors[1:]
      if document.digest(other) != document.digest(first)
  )
  return Explanation(
      rows=rows,
      name=None if first is None else first.name,
      survivors=tuple(survivors),
      candidates=tuple(tried),
      apart=apart,
  )


def _candidates(dtype: str, prefer: str) -> list[combine.CombineContract]:
  named = [
      named_combines.at_dtype(named_combines.named(name), dtype)
      for name in named_combines.NAMES
  ]
  backends = [c for c in named if c.name not in ("P32", "C", "A", "B")]
  schemes = [c for c in named if c not in backends]
  by_expert = [
      dataclasses.replace(c, name=f"{c.name}, expert order", order="expert")
      for c in schemes
  ]
  out = [*backends, *schemes, *by_expert]
  out = [
      c for c in out if c.gate_site == "after_down" and c.output == dtype
  ]
  return sorted(out, key=lambda c: c.name != prefer)


def _result(operands: Operands, contract, arithmetic: str) -> np.ndarray:
  order = ordered_combine.term_order(contract, operands.expert_ids, xp=np)
  terms = ordered_combine.gate_terms_oracle(
      operands.expert_out, operands.gate, contract
  )
  if arithmetic == "portable":
    return portable_oracle.PortableOracle().combine(terms, order, contract)
  return ordered_combine.add_terms_oracle(terms, order, contract)


def _matches(operands: Operands, contract, arithmetic: str) -> np.ndarray:
  """[row] bool: whether every bit of the row is reproduced."""
  result = _result(operands, contract, arithmetic)
  if result.dtype != operands.result.dtype:
    return np.zeros(len(result), bool)
  uint = f"u{result.dtype.itemsize}"
  same = result.view(uint) == operands.result.view(uint)
  return same.all(-1)


def _explicit_orders(operands, arithmetic, dtype) -> list:
  """Every order of every scheme that survives a few rows, tried on all."""
  top_k = operands.gate.shape[1]
  orders = itertools.permutations(range(top_k))
  if np.prod(range(1, top_k + 1)) > _MAX_PERMUTATIONS:
    return []
  probe = Operands(*(
      getattr(operands, f.name)[:_PROBE_ROWS]
      for f in dataclasses.fields(Operands)
  ))
  found = []
  for order in orders:
    for name in ("P32", "C", "A", "B"):
      contract = dataclasses.replace(
          named_combines.at_dtype(named_combines.named(name), dtype),
          name=f"{name}, slots {order}",
          order="explicit",
          permutations=(order,),
      )
      if _matches(probe, contract, arithmetic).all() and _matches(
          operands, contract, arithmetic
      ).all():
        found.append(contract)
  return found


def _apart(first, other, like: Operands, arithmetic: str) -> dict:
  """Looks for random data on which two surviving contracts differ."""
  rows, seed = 1000, 0
  rng = np.random.default_rng(seed)
  top_k = like.gate.shape[1]
  data = Operands(
      rng.standard_normal((rows, top_k, 8)).astype(like.expert_out.dtype),
      rng.random((rows, top_k), np.float32),
      np.argsort(rng.random((rows, max(top_k, 16))), -1)[:, :top_k],
      np.zeros((rows, 8), like.result.dtype),
  )
  a, b = (_result(data, c, arithmetic) for c in (first, other))
  uint = f"u{a.dtype.itemsize}"
  differing = int((a.view(uint) != b.view(uint)).any(-1).sum())
  return {
      "name": other.name,
      "fields": {
          name: list(pair)
          for name, pair in combine.differing_fields(first, other).items()
      },
      "told_apart_by": {
          "data": "standard normal outputs, uniform float32 gates",
          "seed": seed,
          "rows": rows,
          "differing_rows": differing,
      } if differing else None,
  }
