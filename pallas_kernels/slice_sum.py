"""The split-K packed-AWQ expert GEMM, second step: partials to outputs.

Each output element has a chain of its own, over the pieces of its tile in the
contract's order, so no order is left to chance:

  highest_k_first: acc = P_last; for p = last - 1 .. 0: acc = R_FP32(P_p + acc)
  lowest_k_first:  acc = P_0; for p = 1 .. last: acc = R_FP32(P_p + acc)
  y = R_16(acc), and for gate_site "after_rounding": R_16(y * R_16(gate))

Routes fetch their tile's pieces; nothing is scattered, so every row of the
output is written once, those of routes in no block with +0.

Layer: pallas_kernels. Contract: contracts/packed_gemm.py.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from moejax.contracts import packed_gemm
from pallas_kernels import half_words
from pallas_kernels import launch
from pallas_kernels import work_list

_COLUMNS = 64  # Of a program; divides every thread_n.


def add_slices(
    partials: jax.Array,
    work: work_list.WorkList,
    gates: jax.Array | None,
    contract: packed_gemm.PackedGemmContract,
    config: launch.LaunchConfig,
) -> jax.Array:
  """Adds the pieces of every output tile and lists the result by route.

  Args:
    partials: [piece, row, thread_n] float32 from `packed_gemm`.
    work: The planned pieces.
    gates: [route] float32, for gate_site "after_rounding" alone.
    contract: dtype, thread_n, slice_merge, gate_site.
    config: interpret alone matters.

  Returns:
    [route, n] uint16 words of contract.dtype, padding routes included.
  """
  num_tiles, num_blocks = len(work.tiles), len(work.block_experts)
  num_n_tiles = num_tiles // num_blocks
  shape = (len(work.places), num_n_tiles * contract.thread_n)
  body = functools.partial(
      _kernel, contract=contract, num_n_tiles=num_n_tiles
  )
  operands = (work.tiles, work.places, partials)
  return launch.call(
      body, *operands, *(() if gates is None else (gates,)),
      grid=(shape[0], shape[1] // _COLUMNS),
      out=jax.ShapeDtypeStruct(shape, jnp.uint16),
      config=launch.LaunchConfig(num_warps=1, interpret=config.interpret),
  )


def _kernel(
    tiles_ref,  # [tile, 2]
    places_ref,  # [route]
    partials_ref,  # [piece, row, thread_n]
    *refs,  # gates [route] if any, out [route, n]
    contract: packed_gemm.PackedGemmContract,
    num_n_tiles: int,
):
  route, part = pl.program_id(0), pl.program_id(1)
  num_rows = partials_ref.shape[1]
  per_tile = contract.thread_n // _COLUMNS
  place = places_ref[route]
  known = jnp.maximum(place, 0)
  tile = known // num_rows * num_n_tiles + part // per_tile
  row = known % num_rows
  columns = pl.ds(part % per_tile * _COLUMNS, _COLUMNS)
  first, count = tiles_ref[tile, 0], tiles_ref[tile, 1]

  def slice_of(turn):
    if contract.slice_merge == "highest_k_first":
      turn = count - 1 - turn
    return partials_ref[jnp.maximum(first + turn, 0), row, columns]

  acc = lax.fori_loop(
      jnp.int32(1), count, lambda turn, acc: slice_of(turn) + acc,
      slice_of(jnp.int32(0)),
  )
  words = half_words.round_half(acc, contract.dtype)
  if contract.gate_site == "after_rounding":
    gate = jnp.full((_COLUMNS,), refs[0][route], jnp.float32)
    gate = half_words.round_half(gate, contract.dtype)
    product = half_words.widen(words, contract.dtype) * half_words.widen(
        gate, contract.dtype
    )
    words = half_words.round_half(product, contract.dtype)
  words = jnp.where(place < 0, jnp.uint16(0), words)
  refs[-1][route, pl.ds(part * _COLUMNS, _COLUMNS)] = words
