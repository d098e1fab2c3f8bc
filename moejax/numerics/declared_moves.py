"""Moves of a decoder whose gradient adds, by name.

A value that is used twice, a row that is looked up twice or a token that goes
to several experts computes nothing on the way forward. On the way back it adds
cotangents, and the order of those additions decides bits. So a decoder makes
such moves through the set that its operations bring, `operations.moves`, which
may declare an order; without one it makes them here, and JAX adds.

Layer: numerics.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.numerics import moves


class Moves:
  """The moves as they run forward."""

  def share(self, x: Any, uses: int) -> tuple:
    """x once for each of its uses, in the order in which they are made."""
    return (x,) * uses

  def lookup(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """table[tokens]."""
    return moves.take_rows(table, tokens)

  def dispatch(
      self, x: jax.Array, ids: jax.Array, num_experts: int
  ) -> jax.Array:
    """One row a route of x [token, embed]: [token * slot, embed].

    Args:
      x: The tokens.
      ids: [token, slot] int32 expert ids; num_experts is no expert.
      num_experts: Of the layer.
    """
    del num_experts
    tokens, top_k = ids.shape
    return moves.take_rows(x, np.arange(tokens).repeat(top_k))

  def pick(self, x: jax.Array, ids: jax.Array) -> jax.Array:
    """x[..., ids] along the last axis, ids without repetition."""
    return jnp.take_along_axis(x, ids, axis=-1, mode="clip")

  def halves(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both halves of the last axis."""
    first, second = jnp.split(x, 2, axis=-1)
    return first, second

  def half_turn(self, x: jax.Array) -> jax.Array:
    """(-second half, first half) of the last axis."""
    half = x.shape[-1] // 2
    return jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)


_PLAIN = Moves()


def of(operations: Any) -> Moves:
  """Returns the moves that a set of operations declares."""
  return getattr(operations, "moves", _PLAIN)
