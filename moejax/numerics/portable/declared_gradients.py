"""Moves whose gradients add in the order of a backward contract.

Layer: numerics.
"""

import jax.numpy as jnp
import numpy as np

from moejax.contracts.gradients import backward as backward_contract
from moejax.numerics import declared_moves
from moejax.numerics.portable import gradient_ops
from moejax.numerics.portable import with_gradients


class DeclaredMoves(declared_moves.Moves):
  """Implements `declared_moves.Moves` with gradients; see there for shapes."""

  def __init__(
      self,
      plain: gradient_ops.PortableGradientOps,
      contract: backward_contract.BackwardContract,
      padding_token: int | None,
  ):
    self.plain = plain
    self.contract = contract
    self.padding_token = padding_token

  def share(self, x, uses):
    return with_gradients.run(
        lambda x: (x,) * uses, self.share_back, (x,)
    )

  def share_back(self, g, operands, result, needed):
    """From the last use to the first, one rounding an addition."""
    *rest, total = g
    for other in reversed(rest):
      total = self.plain.add(total, other)
    return (total,)

  def lookup(self, table, tokens):
    return with_gradients.run(
        lambda t: super(DeclaredMoves, self).lookup(t, tokens),
        lambda g, operands, *_: (self.lookup_back(g, operands[0], tokens),),
        (table,),
    )

  def lookup_back(self, g, table, tokens):
    index = np.asarray(tokens).reshape(-1)
    rows = np.asarray(g).reshape(index.size, -1)
    kept = index != (-1 if self.padding_token is None else self.padding_token)
    start = jnp.zeros(table.shape, table.dtype)
    return self.plain.add_rows(start, index[kept], rows[kept])

  def dispatch(self, x, ids, num_experts):
    ids = np.asarray(ids)
    return with_gradients.run(
        lambda x: super(DeclaredMoves, self).dispatch(x, ids, num_experts),
        lambda g, operands, *_: (
            self.dispatch_back(g, operands[0], ids, num_experts),
        ),
        (x,),
    )

  def dispatch_back(self, g, x, ids, num_experts):
    order, plain = self.contract.dispatch, self.plain
    if order == "one_sum":
      rows = g.reshape(*ids.shape, -1)
      return plain.sum_to(rows, (len(x), 1, x.shape[1])).reshape(x.shape)
    flat, rows = ids.reshape(-1), np.asarray(g)
    token = np.arange(flat.size) // ids.shape[1]
    if order == "rising_experts":
      by_expert = np.argsort(flat, kind="stable")
      start = jnp.zeros(x.shape, x.dtype)
      return plain.add_rows(start, token[by_expert], rows[by_expert])
    total = None
    for expert in np.unique(flat[flat < num_experts])[::-1].tolist():
      part = np.zeros(x.shape, x.dtype)
      members = np.flatnonzero(flat == expert)
      part[token[members]] = rows[members]
      part = plain.add_scalar(jnp.asarray(part), 0.0)
      total = part if total is None else plain.add(total, part)
    return jnp.zeros(x.shape, x.dtype) if total is None else total

  def pick(self, x, ids):
    ids = np.asarray(ids)
    return with_gradients.run(
        lambda x: super(DeclaredMoves, self).pick(x, ids),
        lambda g, operands, *_: (self.pick_back(g, operands[0], ids),),
        (x,),
    )

  def pick_back(self, g, x, ids):
    out = np.zeros(x.shape, x.dtype)
    np.put_along_axis(out, ids, np.asarray(g), axis=-1)
    return jnp.asarray(out)

  def halves(self, x):
    return with_gradients.run(super().halves, self.halves_back, (x,))

  def halves_back(self, g, operands, result, needed):
    return (jnp.asarray(np.concatenate(g, axis=-1)),)

  def half_turn(self, x):
    return with_gradients.run(super().half_turn, self.half_turn_back, (x,))

  def half_turn_back(self, g, operands, result, needed):
    """Each half passes an addition to zero, so -0 becomes +0."""
    first, second = np.split(np.asarray(g), 2, axis=-1)
    turned = np.concatenate([second, -first], axis=-1)
    return (self.plain.add_scalar(jnp.asarray(turned), 0.0),)
