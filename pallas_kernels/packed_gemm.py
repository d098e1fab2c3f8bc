"""The split-K packed-AWQ expert GEMM, first of two steps: one program a piece.

A piece is a run of K-tiles of one output tile (`work_list.py`). Its program
dequantizes sixteen rows of the weight at a time and feeds them to the tensor
core, each K-stream to its own accumulator, and stores the merged streams:

  for each K-tile t of the piece, ascending:
    for each k16 step s of the tile, ascending:       stream v = s div 2
      w   = R_16((code - zero) * scale)               [16, column]
      c_v = mma16(c_v, w, x)                          [column, row], from +0
  partials[piece] = the streams as `stream_merge` nests them, in float32

No program waits for another and none adds to what another wrote. The second
step, `slice_sum.py`, adds the partials in the contract's order.

Layer: pallas_kernels. Contract: contracts/packed_gemm.py.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from moejax.contracts import packed_gemm
from moejax.numerics import formats
from moejax.numerics.packed import gemm
from pallas_kernels import half_words
from pallas_kernels import launch
from pallas_kernels import packed_weight
from pallas_kernels import steps
from pallas_kernels import work_list

_INT = jnp.int32


def piece_partials(
    x: jax.Array,
    weight: packed_weight.PackedWeight,
    work: work_list.WorkList,
    contract: packed_gemm.PackedGemmContract,
    config: launch.LaunchConfig,
) -> jax.Array:
  """Returns the float32 partial sums of every piece.

  Args:
    x: [row, k] uint16 words of contract.dtype.
    weight: Of all experts.
    work: The planned pieces.
    contract: dtype, thread_k, thread_n, group_size, stream_merge, mma.
    config: No field changes a bit.

  Returns:
    [piece, row of the block, thread_n] float32. Rows without a route hold
    something; a padding piece holds +0.
  """
  rows = work.block_rows.shape[1]
  shape = (len(work.pieces), rows, contract.thread_n)
  body = functools.partial(
      _kernel,
      contract=contract,
      tile_n=config.tile_n,
      take=steps.of(config.interpret),
  )
  return launch.call(
      body, work.pieces, work.block_experts, work.block_rows, x, *weight,
      grid=(shape[0], contract.thread_n // config.tile_n),
      out=jax.ShapeDtypeStruct(shape, jnp.float32),
      config=config,
  )


def _kernel(
    pieces_ref,  # [piece, 4]
    experts_ref,  # [block]
    rows_ref,  # [block, row]
    x_ref,  # [x row, k]
    words_ref,  # [expert, k / 64, 16, n]
    zeros_ref,  # [expert, group, n]
    scales_ref,  # [expert, group, n]
    partials_ref,  # [piece, row, thread_n]
    *,
    contract: packed_gemm.PackedGemmContract,
    tile_n: int,
    take: steps.Steps,
):
  piece, part = pl.program_id(0), pl.program_id(1)
  block, n_tile, k_start, k_len = (pieces_ref[piece, i] for i in range(4))
  expert = experts_ref[block]
  within = part * tile_n
  columns = pl.ds(n_tile * contract.thread_n + within, tile_n)
  rows = rows_ref[block, :]
  num_words = contract.thread_k // packed_weight.TILE_ROWS

  def tile(number, streams):
    streams = list(streams)
    for j in range(num_words):
      tile64 = (k_start + number) * num_words + j
      words = words_ref[expert, tile64, :, columns].astype(_INT)
      for i in range(packed_weight.STEPS):
        k = tile64 * packed_weight.TILE_ROWS + i * packed_weight.STEP_ROWS
        group = k // contract.group_size
        w = _dequantize(
            (words >> (4 * i)) & 15,
            zeros_ref[expert, group, columns],
            scales_ref[expert, group, columns],
            contract.dtype,
        )
        stream = (j * packed_weight.STEPS + i) // 2
        streams[stream] = take.mma(
            streams[stream], w, _x_step(x_ref, rows, k, contract.dtype),
            contract.mma,
        )
    return tuple(streams)

  zero = jnp.zeros((tile_n, rows.shape[0]), jnp.float32)
  streams = lax.fori_loop(
      _INT(0), k_len, tile, (zero,) * contract.num_streams
  )
  partial = gemm.merge_streams(streams, contract.stream_merge)
  partials_ref[piece, :, pl.ds(within, tile_n)] = partial.T


def _dequantize(codes, zeros, scales, dtype):
  """R_16((code - zero) * scale): [16, column]; exact before the rounding."""
  difference = codes - zeros.astype(_INT)[None, :]
  scales = half_words.widen(scales, dtype)[None, :]
  product = difference.astype(jnp.float32) * scales
  return product.astype(formats.of(dtype).numpy)


def _x_step(x_ref, rows, k, dtype):
  """The sixteen activations of a step: [16, row]."""
  shape = (packed_weight.STEP_ROWS, rows.shape[0])
  steps_k = lax.broadcasted_iota(_INT, shape, 0) + k
  rows = lax.broadcast_in_dim(rows, shape, (1,))
  return half_words.from_words(x_ref[rows, steps_k], dtype)
