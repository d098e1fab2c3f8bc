"""The split-K packed-AWQ expert GEMM, first of two steps: one program a piece.

A piece is a run of K-tiles of one output tile (`work_list.py`). Its program
dequantizes the rows of one K-stream at a time and feeds them to the tensor
core, each stream to its own accumulator, and stores the merged streams:

  for each K-tile t of the piece, ascending:
    for each stream v:                              32 rows, two k16 steps
      w   = R_16((code - zero) * scale)             [32, column]
      c_v = mma16(mma16(c_v, w, x), w, x)           [column, row], from +0
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
from moejax.numerics.packed import gemm
from pallas_kernels import half_words
from pallas_kernels import launch
from pallas_kernels import packed_weight
from pallas_kernels import steps
from pallas_kernels import work_list

_INT = jnp.int32
_BASES = {"float16": 0x6400, "bfloat16": 0x4300}  # The bits of 1024, of 128.


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
    codes_ref,  # [expert, k / 64, 32, n]
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
  num_bytes = contract.thread_k // packed_weight.TILE_ROWS
  # A K-tile starts at a group, or lies in one.
  group_rows = min(contract.group_size, contract.thread_k)

  def fetch(number):
    """What a K-tile needs: codes, (zeros, scales), activations."""
    k_tile = k_start + number
    codes = [
        codes_ref[expert, k_tile * num_bytes + j, :, columns]
        for j in range(num_bytes)
    ]
    groups = [
        (k_tile * contract.thread_k + offset) // contract.group_size
        for offset in range(0, contract.thread_k, group_rows)
    ]
    pairs = [
        (zeros_ref[expert, g, columns], scales_ref[expert, g, columns])
        for g in groups
    ]
    xs = [
        _stream_of_x(x_ref, rows, k_tile * contract.thread_k + offset)
        for offset in range(0, contract.thread_k, packed_gemm.STREAM_ROWS)
    ]
    return codes, pairs, xs

  def tile(number, carried):
    streams, (codes, pairs, xs) = carried
    # One tile ahead, so that loads run beside dots; behind the last, the last.
    ahead = fetch(jnp.minimum(number + 1, k_len - 1))
    streams = list(streams)
    for v in range(contract.num_streams):
      code = codes[v // 2] & 15 if v % 2 == 0 else codes[v // 2] >> 4
      pair = pairs[v * packed_gemm.STREAM_ROWS // group_rows]
      w = _dequantize(code, *pair, contract.dtype)
      x = half_words.from_words(xs[v], contract.dtype)
      streams[v] = take.mma(streams[v], w, x, contract.mma)
    return tuple(streams), ahead

  zero = jnp.zeros((tile_n, rows.shape[0]), jnp.float32)
  streams, _ = lax.fori_loop(
      _INT(0), k_len, tile, ((zero,) * contract.num_streams, fetch(_INT(0)))
  )
  partial = gemm.merge_streams(streams, contract.stream_merge)
  partials_ref[piece, :, pl.ds(within, tile_n)] = partial.T


def _dequantize(codes, zeros, scales, dtype):
  """R_16((code - zero) * scale): [32, column], in 16-bit arithmetic.

  An integer of 0..15 written into the last bits of a power of two is the sum of
  both, so the difference of two such floats is exact, and the product is the
  only rounding.
  """
  base = jnp.uint16(_BASES[dtype])

  def above_base(integers):
    return half_words.from_words(integers.astype(jnp.uint16) | base, dtype)

  difference = above_base(codes) - above_base(zeros)[None, :]
  return difference * half_words.from_words(scales, dtype)[None, :]


def _stream_of_x(x_ref, rows, k):
  """The words of x for 32 rows of the weight: [32, row]."""
  shape = (packed_gemm.STREAM_ROWS, rows.shape[0])
  ks = lax.broadcasted_iota(_INT, shape, 0) + k
  return x_ref[lax.broadcast_in_dim(rows, shape, (1,)), ks]
