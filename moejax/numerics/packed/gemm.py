"""The packed-AWQ expert GEMM, one output element at a time in its exact order.

Layer: numerics. Contract: contracts/packed_gemm.py.
"""

from collections.abc import Sequence

import numpy as np

from moejax.contracts import packed_gemm
from moejax.numerics import formats
from moejax.numerics.packed import alignment
from moejax.numerics.packed import awq_format
from moejax.numerics.packed import mma16
from moejax.numerics.packed import planner

_CHUNK = 1 << 16  # Products in flight, so that they stay in a cache.


def round_half(x: np.ndarray, dtype: str) -> np.ndarray:
  """Rounds float32 to float16 or bfloat16, nearest even; NaN is 0x7fff."""
  half = formats.of(dtype).numpy
  with np.errstate(over="ignore", invalid="ignore"):
    out = x.astype(half)
  nan = np.uint16(0x7FFF).view(half)
  return np.where(np.isnan(x), nan, out)


def packed_gemm_oracle(
    x: np.ndarray,
    operands: Sequence[awq_format.PackedOperand],
    blocks: alignment.RouteBlocks,
    contract: packed_gemm.PackedGemmContract,
    gates: np.ndarray | None = None,
) -> np.ndarray:
  """Multiplies each route's activations with its expert's packed weight.

  The arithmetic is that of contracts/packed_gemm.py: dequantized weights with
  one rounding, K-streams of `mma16`, streams merged, pieces merged, one
  rounding, and for gate_site "after_rounding" R_16(y * R_16(gate)).

  Args:
    x: [row, k] in the contract's dtype. Route r reads row
      r // (num_routes / rows): rows are tokens (W13) or routes (W2).
    operands: One [k, n] weight for each local expert.
    blocks: The alignment plan. Which block a route is in decides its pieces.
    contract: Every field matters.
    gates: [route] float32, for gate_site "after_rounding" alone.

  Returns:
    [route, n] in the contract's dtype. Rows of routes that are in no block
    (experts without a local id) are +0.

  Raises:
    ValueError: shapes, dtypes, the group size or the plan do not fit.
  """
  k, n = _checked(x, operands, blocks, contract, gates)
  work = planner.plan(blocks.num_blocks, n, k, contract)
  out = np.zeros((blocks.num_routes, n), formats.of(contract.dtype).numpy)
  per_row = blocks.num_routes // max(len(x), 1)
  expert, weight = None, None
  for block in range(blocks.num_blocks):
    if blocks.block_experts[block] != expert:
      expert = blocks.block_experts[block]
      values = awq_format.dequantize(operands[expert], contract.dtype)
      weight = _streams(values, contract)
    routes = blocks.routes(block)
    rows = _streams(x[routes // per_row].T, contract)
    acc = _block(rows, weight, work.block(block), contract)
    y = round_half(acc, contract.dtype)
    if gates is not None:
      y = gate_half(y, gates[routes, None], contract.dtype)
    out[routes] = y
  return out


def gate_half(y: np.ndarray, gates: np.ndarray, dtype: str) -> np.ndarray:
  """Returns R_16(y * R_16(gate)); the product is exact in float32."""
  gate = round_half(gates, dtype).astype(np.float32)
  with np.errstate(over="ignore", invalid="ignore"):
    return round_half(y.astype(np.float32) * gate, dtype)


def _streams(values: np.ndarray, contract) -> mma16.Terms:
  """[k, column] as [k_tile, stream, step, 16, column]."""
  shape = (-1, contract.num_streams, 2, 16, values.shape[1])
  found = mma16.terms(np.ascontiguousarray(values), contract.mma)
  return mma16.Terms(*(part.reshape(shape) for part in found))


def _block(rows, weight, pieces_of_tiles, contract) -> np.ndarray:
  """float32 [route, n] of one block: its n tiles, those of equal cuts at once.
  """
  tiles_of = {}
  for tile, pieces in enumerate(pieces_of_tiles):
    tiles_of.setdefault(planner.cuts(pieces), []).append(tile)
  num_routes, n = rows.value.shape[-1], weight.value.shape[-1]
  out = np.empty((num_routes, n), np.float32)
  width = max(_CHUNK // (16 * contract.num_streams * num_routes), 16)
  within = np.arange(contract.thread_n)
  for cuts, tiles in tiles_of.items():
    columns = (
        np.array(tiles)[:, None] * contract.thread_n + within
    ).reshape(-1)
    for start in range(0, len(columns), width):
      chosen = columns[start : start + width]
      part = mma16.Terms(*(np.take(x, chosen, axis=-1) for x in weight))
      partials = [_piece(rows, part, *cut, contract) for cut in cuts]
      out[:, chosen] = _merge_slices(partials, contract)
  return out


def _piece(rows, weight, k_start: int, k_len: int, contract) -> np.ndarray:
  """float32 [route, column] of a run of K-tiles: its streams, merged."""
  num_routes = rows.value.shape[-1]
  shape = (contract.num_streams, num_routes, weight.value.shape[-1])
  acc = np.zeros(shape, np.float32)
  for tile in range(k_start, k_start + k_len):
    for half in (0, 1):
      # a: [stream, route, 16, 1]; b: [stream, 1, 16, column].
      a = mma16.Terms(*(
          np.swapaxes(x[tile, :, half], 1, 2)[..., None] for x in rows
      ))
      b = mma16.Terms(*(x[tile, :, half][:, None] for x in weight))
      acc = mma16.step(acc, a, b, contract.mma)
  return merge_streams(acc, contract.stream_merge)


def merge_streams(acc: np.ndarray, nest) -> np.ndarray:
  """Adds float32 streams [stream, ...] as a nest of pairs says."""
  if not isinstance(nest, tuple):
    return acc[nest]
  left, right = (merge_streams(acc, side) for side in nest)
  with np.errstate(over="ignore", invalid="ignore"):
    return left + right


def _merge_slices(partials, contract) -> np.ndarray:
  highest_first = contract.slice_merge == "highest_k_first"
  ordered = partials[::-1] if highest_first else partials
  acc = ordered[0]
  with np.errstate(over="ignore", invalid="ignore"):
    for partial in ordered[1:]:
      acc = partial + acc
  return acc


def _checked(x, operands, blocks, contract, gates) -> tuple[int, int]:
  """Returns (k, n), or raises ValueError with the values."""
  if x.ndim != 2 or x.dtype.name != contract.dtype:
    raise ValueError(
        f"x must be [row, k] {contract.dtype}, got {x.dtype}{x.shape}."
    )
  shapes = {operand.codes.shape for operand in operands}
  if len(shapes) != 1:
    raise ValueError(f"experts have shapes {sorted(shapes)}, not one.")
  k, n = shapes.pop()
  if k != x.shape[1]:
    raise ValueError(f"x {x.shape} does not fit weights of k={k}, n={n}.")
  groups = {operand.group_size for operand in operands}
  if groups != {contract.group_size}:
    raise ValueError(
        f"weights have groups of {sorted(groups)}, the contract has"
        f" group_size={contract.group_size}."
    )
  if len(x) and blocks.num_routes % len(x):
    raise ValueError(
        f"{blocks.num_routes} routes are no multiple of {len(x)} rows."
    )
  if blocks.num_blocks and blocks.block_experts.max() >= len(operands):
    raise ValueError(
        f"a block names expert {blocks.block_experts.max()} of"
        f" {len(operands)}."
    )
  gated = contract.gate_site == "after_rounding"
  if gated != (gates is not None) or (
      gated
      and (gates.shape, gates.dtype) != ((blocks.num_routes,), np.float32)
  ):
    found = None if gates is None else f"{gates.dtype}{gates.shape}"
    raise ValueError(
        f"gate_site={contract.gate_site!r} with gates {found};"
        f" {blocks.num_routes} float32 belong to 'after_rounding'."
    )
  return k, n
