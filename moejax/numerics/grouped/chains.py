"""How the chains of a grouped GEMM add their products, in JAX.

An accumulator is stepped through blocks of products: one product a step, or
sixteen where a tensor core's step is the contract. All but float64's own chain
need `jax_enable_x64`, and travel as `sequential_ops` and `mma16_twin` say.

Layer: numerics. Contract: contracts/grouped_mlp.py, the field `chain`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from moejax.contracts import grouped_mlp
from moejax.numerics import rounding
from moejax.numerics import sequential_ops
from moejax.numerics.packed import mma16_twin


class Chain(NamedTuple):
  """One way to add products in ascending order.

  Attributes:
    width: Products a step takes.
    start: Shape to the accumulator, +0.
    step: (acc [m, n], a [width, m], b [width, n]) to acc.
    finish: (acc, dtype name) to the result, one rounding (two for 16 bits from
      float64).
  """

  width: int
  start: Callable
  step: Callable
  finish: Callable


def of_contract(
    contract: grouped_mlp.GroupGemmContract, dtype: jnp.dtype
) -> Chain:
  """Returns the chain of a contract for operands of a dtype.

  Raises:
    ValueError: float64 is not enabled, or a tensor core takes no such operand.
    NotImplementedError: the chain is native, which is no chain.
  """
  if contract.chain == "native":
    raise NotImplementedError("the native chain has no declared order.")
  if not jax.config.jax_enable_x64:
    raise ValueError(
        f"chain={contract.chain!r} computes in float64; jax_enable_x64 is off."
    )
  if contract.chain == "mma16":
    if dtype.itemsize != 2:
      raise ValueError(f"no tensor-core step takes {dtype} operands.")
    return Chain(
        16,
        lambda shape: jnp.zeros(shape, jnp.float32),
        lambda acc, a, b: mma16_twin.step(acc, a, b, contract.mma),
        lambda acc, name: rounding.round_pack(rounding.widen(acc), name),
    )
  add = (
      sequential_ops.add_term
      if contract.chain == "sequential" and dtype != jnp.float64
      else jnp.add
  )

  def step(acc, a, b):
    term = rounding.widen(a[0])[:, None] * rounding.widen(b[0])[None, :]
    return add(acc, term)

  return Chain(
      1, lambda shape: jnp.zeros(shape, jnp.float64), step, rounding.round_pack
  )


def matmul(a: jax.Array, b: jax.Array, chain: Chain, dtype: str) -> jax.Array:
  """[tile, m, k] times [tile, k, n] along ascending k: [tile, m, n]."""
  pad = -a.shape[2] % chain.width
  a = jnp.pad(a, ((0, 0), (0, 0), (0, pad)))
  b = jnp.pad(b, ((0, 0), (0, pad), (0, 0)))

  def step(k, acc):
    at = k * chain.width
    left = lax.dynamic_slice_in_dim(a, at, chain.width, 2)
    right = lax.dynamic_slice_in_dim(b, at, chain.width, 1)
    return jax.vmap(chain.step)(acc, jnp.swapaxes(left, 1, 2), right)

  acc = chain.start((a.shape[0], a.shape[1], b.shape[2]))
  acc = lax.fori_loop(0, a.shape[2] // chain.width, step, acc)
  return chain.finish(acc, dtype)
