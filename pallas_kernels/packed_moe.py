"""A packed expert layer on a GPU: the four surfaces, by route id.

  W13 pieces, W13 slice sum        S1
  activation                       S2
  W2 pieces, W2 slice sum, gates   S3
  ordered combine                  S4

Six kernels in one program. Between them there are arrays and no atomics, so the
bits are a function of the arguments; nothing falls back to anything else.

Layer: pallas_kernels. Contract: contracts/packed_moe.py.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import packed_gemm as gemm_contract
from moejax.contracts import packed_moe
from moejax.numerics.packed import alignment
from moejax.numerics.packed import oracle
from pallas_kernels import half_words
from pallas_kernels import launch
from pallas_kernels import ordered_combine
from pallas_kernels import packed_gemm
from pallas_kernels import packed_weight
from pallas_kernels import silu_and_mul
from pallas_kernels import slice_sum
from pallas_kernels import steps
from pallas_kernels import work_list

_CAPABILITIES = ("9.0",)  # Where the step packed_gemm.HOPPER was measured.


def run(
    x: np.ndarray,
    gates: np.ndarray,
    w13: packed_weight.PackedWeight,
    w2: packed_weight.PackedWeight,
    blocks: alignment.RouteBlocks,
    contract: packed_moe.PackedMoeContract,
    config: launch.LaunchConfig = launch.LaunchConfig(),
) -> oracle.Surfaces:
  """Computes a packed-AWQ expert layer in the exact order of its contract.

  The arguments and bits of `numerics.packed.oracle.packed_moe_oracle`, with
  the weights packed by `packed_weight`.

  Args:
    x: [token, H] in the contract's dtype, on the host.
    gates: [token, slot] float32, on the host.
    w13: [H, 2 I] of each expert, gate columns first.
    w2: [I, H] of each expert.
    blocks: The alignment plan of the routes. Any number of rows a block.
    contract: Every field matters.
    config: No field changes a bit.

  Returns:
    The surfaces on the device, each in the contract's dtype. Routes in no
    block are +0.

  Raises:
    ValueError: shapes, dtypes, the plan or the launch contradict the contract.
    UnsupportedError: no device here takes the contract's steps, its activation
      is not known, or an array is too large.
  """
  placed = place(x, gates, w13, w2, blocks, contract, config)
  words = surface_words(placed, w13, w2, contract=contract, config=config)
  rows = (gates.size, gates.size, gates.size, len(x))
  return oracle.Surfaces(*(
      half_words.from_words(surface[:count], contract.dtype)
      for surface, count in zip(words, rows, strict=True)
  ))


class Placed(NamedTuple):
  """A request as the kernels read it, on the device.

  Attributes:
    x: [padded token, H] uint16 words.
    gates: [padded token, slot] float32.
    work13: The planned work of W13.
    work2: That of W2.
    table: The words of the activation.
  """

  x: jax.Array
  gates: jax.Array
  work13: work_list.WorkList
  work2: work_list.WorkList
  table: jax.Array


def place(
    x: np.ndarray,
    gates: np.ndarray,
    w13: packed_weight.PackedWeight,
    w2: packed_weight.PackedWeight,
    blocks: alignment.RouteBlocks,
    contract: packed_moe.PackedMoeContract,
    config: launch.LaunchConfig,
) -> Placed:
  """Checks the arguments of `run` and makes what its kernels read of them.

  Raises:
    ValueError, UnsupportedError: as `run` does.
  """
  tokens, top_k = gates.shape
  _check(x, gates, w13, w2, blocks, contract, config)
  launch.check_device(config, _CAPABILITIES)
  padded = launch.padded(tokens, 16)
  work13, work2 = (
      work_list.work_list(
          blocks, weight.n, weight.k, per_row, part, padded * top_k
      )
      for weight, per_row, part in (
          (w13, top_k, contract.w13), (w2, 1, contract.w2)
      )
  )
  for work, part in ((work13, contract.w13), (work2, contract.w2)):
    rows = work.block_rows.shape[1]
    launch.check_size("partials", (len(work.pieces), rows, part.thread_n))
  return jax.tree.map(jnp.asarray, Placed(
      half_words.to_words(_pad(x, padded)), _pad(gates, padded), work13, work2,
      silu_and_mul.silu_words(contract),
  ))


def gemm_words(x, weight, work, gates, contract, config) -> jax.Array:
  """One GEMM over bits: pieces, then their sum. [route, n] uint16 words."""
  partials = packed_gemm.piece_partials(x, weight, work, contract, config)
  return slice_sum.add_slices(partials, work, gates, contract, config)


@functools.partial(jax.jit, static_argnames=("contract", "config"))
def surface_words(
    placed: Placed,
    w13: packed_weight.PackedWeight,
    w2: packed_weight.PackedWeight,
    *,
    contract: packed_moe.PackedMoeContract,
    config: launch.LaunchConfig,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """The kernels over padded words; returns the words of the surfaces."""
  x, gates, work13, work2, table = placed
  tokens, top_k = gates.shape
  s1 = gemm_words(x, w13, work13, None, contract.w13, config)
  s2 = silu_and_mul.silu_and_mul(s1, table, contract, config)
  s3 = gemm_words(s2, w2, work2, gates.reshape(-1), contract.w2, config)
  slots = jnp.broadcast_to(jnp.arange(top_k, dtype=jnp.int32), gates.shape)
  s4 = ordered_combine.combine_words(
      s3.reshape(tokens, top_k, -1), None, None, slots, contract.combine,
      (contract.dtype, None, None), config,
  )
  return s1, s2, s3, s4


def _pad(array: np.ndarray, length: int) -> np.ndarray:
  rest = np.zeros((length - len(array), *array.shape[1:]), array.dtype)
  return np.concatenate([array, rest])


def _check(x, gates, w13, w2, blocks, contract, config) -> None:
  """Raises ValueError or UnsupportedError with the values."""
  if x.ndim != 2 or x.dtype.name != contract.dtype:
    raise ValueError(
        f"x must be [token, H] {contract.dtype}, got {x.dtype}{x.shape}."
    )
  if (gates.dtype, gates.shape[:1], gates.size) != (
      np.float32, x.shape[:1], blocks.num_routes
  ):
    raise ValueError(
        f"x {x.shape}, gates {gates.dtype}{gates.shape} and a plan of"
        f" {blocks.num_routes} routes do not belong together."
    )
  sizes = (w13.k, w13.n, w2.k, w2.n)
  if sizes != (x.shape[1], 2 * w2.k, w2.k, x.shape[1]):
    raise ValueError(
        f"x {x.shape} does not fit W13 {sizes[:2]} and W2 {sizes[2:]}."
    )
  experts = {len(weight.codes) for weight in (w13, w2)}
  if len(experts) != 1 or (
      blocks.num_blocks and blocks.block_experts.max() >= min(experts)
  ):
    raise ValueError(
        f"weights of {sorted(experts)} experts, the plan names experts up to"
        f" {blocks.block_experts.max(initial=-1)}."
    )
  for weight, part in ((w13, contract.w13), (w2, contract.w2)):
    check_gemm(weight, part, config)


def check_gemm(
    weight: packed_weight.PackedWeight,
    contract: gemm_contract.PackedGemmContract,
    config: launch.LaunchConfig,
) -> None:
  """Checks a weight and a launch against a GEMM's contract.

  Raises:
    ValueError: they contradict each other.
    UnsupportedError: no device takes the contract's step.
  """
  if weight.group_size != contract.group_size:
    raise ValueError(
        f"weights have groups of {weight.group_size}, the contract has"
        f" group_size={contract.group_size}."
    )
  if contract.thread_n % config.tile_n:
    raise ValueError(
        f"tile_n={config.tile_n} does not divide"
        f" thread_n={contract.thread_n}."
    )
  steps.check_mma(contract.mma, config.interpret)
