"""Rows of a routed batch, expert by expert.

A routed linear layer multiplies each row by the weight of its own expert. This
file does the bookkeeping for arithmetics that run op by op: gather the rows of
one expert, apply a dense operation, put the results back. It does so on the
host, where the changing row counts cost no compilation. No arithmetic.

Layer: numerics.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def per_expert(
    linear: Callable[[jax.Array, jax.Array], jax.Array],
    rows: jax.Array,
    weight: jax.Array,
    expert_of_row: jax.Array,
) -> jax.Array:
  """Applies `linear(rows of e, weight[e])` for every expert e that has rows.

  The row count is padded with row 0 up to a power of two, so that a run
  compiles a handful of shapes; the results of the padding are dropped.

  Args:
    linear: (x [r, k], w [n, k]) -> [r, n]; each row depends on its own only.
    rows: [route, k].
    weight: [expert, n, k].
    expert_of_row: [route] ints; the value num_experts marks a row without one.

  Returns:
    [route, n]; rows without an expert are zero.
  """
  ids, source = np.asarray(expert_of_row), np.asarray(rows)
  out = np.zeros((len(ids), weight.shape[1]), source.dtype)
  for expert in np.unique(ids[ids < weight.shape[0]]).tolist():
    members = np.flatnonzero(ids == expert)
    padded = np.zeros(1 << (len(members) - 1).bit_length(), np.intp)
    padded[: len(members)] = members
    result = linear(jnp.asarray(source[padded]), weight[expert])
    out[members] = np.asarray(result)[: len(members)]
  return jnp.asarray(out)


def weight_per_expert(
    product: Callable[[jax.Array, jax.Array], jax.Array],
    out: jax.Array,
    rows: jax.Array,
    expert_of_row: np.ndarray,
    num_experts: int,
) -> jax.Array:
  """Applies `product(out of e, rows of e)` for every expert that has rows.

  The row count is padded with zeros up to a power of two, as above.

  Args:
    product: (a [r, n], b [r, k]) -> [n, k], a sum over r that zeros leave be.
    out: [route, n].
    rows: [route, k].
    expert_of_row: [route] ints; num_experts marks a row without an expert.
    num_experts: Of the result.

  Returns:
    [expert, n, k]; +0 for an expert without rows.
  """
  a, b = np.asarray(out), np.asarray(rows)
  result = np.zeros((num_experts, a.shape[1], b.shape[1]), b.dtype)
  for expert in np.unique(expert_of_row[expert_of_row < num_experts]).tolist():
    members = np.flatnonzero(expert_of_row == expert)
    size = 1 << (len(members) - 1).bit_length()
    padded = [np.zeros((size, v.shape[1]), v.dtype) for v in (a, b)]
    for target, source in zip(padded, (a, b), strict=True):
      target[: len(members)] = source[members]
    result[expert] = np.asarray(product(*map(jnp.asarray, padded)))
  return jnp.asarray(result)
