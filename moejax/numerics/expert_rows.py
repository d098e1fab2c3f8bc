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
