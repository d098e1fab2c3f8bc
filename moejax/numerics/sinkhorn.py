"""Sinkhorn normalisation of small positive matrices, round by round.

  columns:  s = R(sum over rows),    t = R(s + epsilon),  x = R(x / t)
  rows:     s = R(sum over columns), t = R(s + epsilon),  x = R(x / t)

Columns first, then (rows, columns) until there are `iterations` of columns. A
round divides by what the round before it left, so a rounding is carried on:
every round is a value that can be compared, and the result has no useful error
bound of its own.

Layer: numerics.
"""

import functools
import math

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax.numerics import rounding


def portable_oracle(
    x: np.ndarray, iterations: int, epsilon: float
) -> np.ndarray:
  """Every operation in float64 from its operands, rounded once to float32.

  Args:
    x: [..., n, n] float32.
    iterations: Normalisations of columns.
    epsilon: Added to every sum; not rounded first.

  Returns:
    [..., 2 * iterations - 1, n, n] float32: x after every round.
  """
  rounds = []
  for index in range(2 * iterations - 1):
    axis = -2 if index % 2 == 0 else -1
    sums = np.apply_along_axis(math.fsum, axis, x.astype(np.float64))
    sums = np.expand_dims(sums.astype(np.float32), axis)
    shifted = (sums.astype(np.float64) + epsilon).astype(np.float32)
    x = (x.astype(np.float64) / shifted.astype(np.float64)).astype(np.float32)
    rounds.append(x)
  return np.stack(rounds, -3)


def _exact_sum(x: jax.Array, axis: int) -> jax.Array:
  """The float64 nearest to the sum of float32 values along a short axis.

  Each addition leaves its error, an exact float64; the errors of operands that
  span less than 2**80 add up exactly.
  """
  terms = jnp.moveaxis(x, axis, 0)
  total, lost = terms[0], jnp.zeros_like(terms[0])
  for term in terms[1:]:
    moved = total + term
    back = moved - total
    lost = lost + ((total - (moved - back)) + (term - back))
    total = moved
  return jnp.expand_dims(total + lost, axis)


@functools.partial(jax.jit, static_argnames=("iterations", "epsilon"))
def portable(x: jax.Array, iterations: int, epsilon: float) -> jax.Array:
  """The twin of `portable_oracle`; needs `jax_enable_x64`."""

  def normalise(wide, axis):
    sums = rounding.round_value(_exact_sum(wide, axis), "float32")
    shifted = rounding.round_value(sums + jnp.float64(epsilon), "float32")
    return rounding.round_value(wide / shifted, "float32")

  def pair(wide, _):
    rows = normalise(wide, -1)
    columns = normalise(rows, -2)
    return columns, jnp.stack([rows, columns])

  first = normalise(rounding.widen(x), -2)
  _, pairs = lax.scan(pair, first, length=iterations - 1)
  rounds = jnp.concatenate([first[None], pairs.reshape(-1, *first.shape)])
  return rounding.round_pack(jnp.moveaxis(rounds, 0, -3), "float32")


def by_operations(
    ops, x: jax.Array, iterations: int, epsilon: float, site: str
) -> jax.Array:
  """The rounds by an operation set's own sum, add_scalar and divide."""
  rounds = []
  for index in range(2 * iterations - 1):
    columns = index % 2 == 0
    terms = jnp.swapaxes(x, -1, -2) if columns else x
    sums = ops.add_scalar(ops.sum(terms, site), epsilon)
    x = ops.divide(x, jnp.swapaxes(sums, -1, -2) if columns else sums)
    rounds.append(x)
  return jnp.stack(rounds, -3)
