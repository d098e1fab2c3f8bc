"""Which clauses of two contracts of experts differ, and which decide a tap.

A contract of packed experts and that of a decoder whose experts are wide have
different fields. `clauses` puts both under the same heads, so that they can be
held against each other; nothing is said that is not a field, or counted from
one. A reduction without a declared order says so.

Layer: protocols. Contracts: contracts/packed_moe.py, contracts/decoder.py.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools

import numpy as np

from moejax.contracts import decoder as decoder_contract
from moejax.contracts import document
from moejax.contracts import packed_gemm
from moejax.contracts import packed_moe
from moejax.numerics import formats
from moejax.numerics.packed import activation
from moejax.numerics.packed import alignment
from moejax.numerics.packed import planner
from moejax.numerics.portable import portable_oracle
from moejax.protocols import capture as capture_lib
from moejax.protocols import taps as taps_lib

Contract = packed_moe.PackedDecoderContract | decoder_contract.DecoderContract
_UNDECLARED = "undeclared"
# Beginning of a tap's name -> heads of the clauses that decide its bits.
_HEADS = {
    "moe.router": ("router",),
    "moe.experts.gate_up": ("w13",),
    "moe.experts.silu": ("activation",),
    "moe.experts.activation": ("activation",),
    "moe.experts.down": ("w2",),
    "moe.experts.terms": ("w2", "gate"),
    "moe.experts.combine": ("combine",),
}
_SHORT = 12  # Digits of a digest.
_GATE_FIELDS = ("gate_site", "gate_dtype", "operand")


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
  """The GEMMs of a run, as far as a planner must know them.

  Attributes:
    sizes: {"w13" or "w2": (n, k)}.
    num_blocks: Every number of route blocks that a layer had in a step.
  """

  sizes: Mapping[str, tuple[int, int]]
  num_blocks: tuple[int, ...]

  def pieces(
      self, site: str, contract: packed_gemm.PackedGemmContract
  ) -> tuple[int, int, int]:
    """(output tiles, how many are cut, most pieces of one), over all blocks."""
    tiles = [
        len(pieces)
        for count in self.num_blocks
        for pieces in planner.plan(count, *self.sizes[site], contract).tiles
    ]
    return len(tiles), sum(n > 1 for n in tiles), max(tiles, default=1)


def work(captures: Sequence[capture_lib.Capture], config) -> Work:
  """Returns the work of a run, from the routes of all its sequences."""
  counts = set()
  for step in zip(*(one.steps for one in captures), strict=True):
    for name in step[0].taps:
      if taps_lib.split(name)[1] != taps_lib.ROUTE_IDS:
        continue
      ids = np.concatenate([one.taps[name] for one in step])
      rows = alignment.block_rows_for(ids.size, config.num_experts)
      plan = alignment.route_blocks(ids, config.num_experts, rows)
      counts.add(plan.num_blocks)
  embed, hidden = config.embed, config.expert_hidden
  return Work(
      {"w13": (2 * hidden, embed), "w2": (embed, hidden)},
      tuple(sorted(counts)),
  )


def clauses(contract: Contract, ran: Work) -> dict[str, str]:
  """Returns {clause: its value} of a contract, under heads that all share.

  Args:
    contract: Of a decoder; its experts are packed, dequantised or wide.
    ran: What was run; a planned GEMM has as many slices as its plan cuts.
  """
  packed = isinstance(contract, packed_moe.PackedDecoderContract)
  plain = contract.decoder if packed else contract
  experts = contract.experts if packed else None
  out = {
      f"{head}.{field}": str(value)
      for head, part in (("router", plain.router), ("combine", plain.combine))
      for field, value in document.to_dict(part).items()
      if field != "name"
  }
  for field in _GATE_FIELDS:
    out[f"gate.{field}"] = out.pop(f"combine.{field}")
  marlin = isinstance(experts, packed_moe.PackedMoeContract)
  for site in ran.sizes:
    if marlin:
      gemm = getattr(experts, site)
      found = _planned(gemm, *ran.pieces(site, gemm))
    else:
      found = _unplanned(plain.reductions.expert_gemm.chain)
    out |= {f"{site}.{field}": value for field, value in found.items()}
  if marlin:
    table, zero = experts.silu_table[:_SHORT], experts.up_zero
  else:
    dtype = plain.combine.output
    table, zero = _silu_table(plain.elementwise, dtype), "as_is"
  return out | {"activation.silu_table": table, "activation.up_zero": zero}


def differing(
    ours: Contract, reference: Contract, ran: Work
) -> dict[str, tuple[str, str]]:
  """Returns {clause: (ours, the reference's)} of those that differ."""
  left, right = (clauses(contract, ran) for contract in (ours, reference))
  return {
      name: (left[name], right[name])
      for name in left
      if left[name] != right[name]
  }


def clause(tap: str, differing_clauses: Mapping[str, Sequence[str]]) -> str:
  """Names the differing clauses that decide a tap, or nothing.

  Args:
    tap: Name without the layer.
    differing_clauses: From `differing`.
  """
  heads = next((h for t, h in _HEADS.items() if tap.startswith(t)), ())
  return "; ".join(
      f"{name}: ours {ours}, reference {reference}"
      for name, (ours, reference) in differing_clauses.items()
      if name.split(".")[0] in heads
  )


def _planned(gemm: packed_gemm.PackedGemmContract, tiles, cut, most) -> dict:
  step = document.to_dict(gemm.mma)
  del step["name"]
  slices = "1"
  if cut:
    slices = f"up to {most} ({cut} of {tiles} tiles cut), {gemm.slice_merge}"
  return {
      "k_streams": f"{gemm.num_streams}, added {_nest(gemm.stream_merge)}",
      "k_slices": slices,
      "k_step": "mma16 " + ", ".join(f"{k} {v}" for k, v in step.items()),
  }


def _unplanned(chain: str) -> dict:
  parts = _UNDECLARED if chain == "native" else "1"
  return {"k_streams": parts, "k_slices": parts, "k_step": chain}


def _nest(merge) -> str:
  if not isinstance(merge, tuple):
    return f"c{merge}"
  return "(" + " + ".join(map(_nest, merge)) + ")"


@functools.cache
def _silu_table(elementwise: str, dtype: str) -> str:
  """Digest of the silu of an arithmetic, if it has a definition."""
  if elementwise != "portable" or formats.of(dtype).bits != 16:
    return _UNDECLARED
  oracle = portable_oracle.PortableOracle()
  table = activation.table_of(lambda x: oracle.unary("silu", x, dtype), dtype)
  return activation.table_digest(table)[:_SHORT]
