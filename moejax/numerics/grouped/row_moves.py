"""Rows of tokens to rows of experts, and back with a sum over slots.

  moe_scatter:  X[pos[t, j]] = x[t]                                  a copy
  moe_gather:   y[t] = R(sum over j ascending of V[pos[t, j]])

The sum runs in float32 (float64 for float64) from +0 and is rounded once. Each
is the transpose of the other, and is differentiated as such. Rows without a
slot are +0, whatever memory held; slots without a row add nothing.

Layer: numerics.
"""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.numerics import moves
from moejax.numerics import rounding
from moejax.numerics.grouped import once
from moejax.numerics.grouped import row_plan
from moejax.numerics.grouped import storage


def scatter_rows(x: jax.Array, plan: row_plan.RowPlan) -> jax.Array:
  """`moe_scatter` without a derivative: x [token, n] to [row, n]."""
  tokens, top_k = plan.pos.shape
  if not tokens:
    return jnp.zeros((plan.slot_of_row.shape[0], *x.shape[1:]), x.dtype)
  rows = moves.take_rows(x, plan.slot_of_row // top_k)
  has_slot = plan.slot_of_row < tokens * top_k
  return moves.where(has_slot[:, None], rows, jnp.zeros((), x.dtype))


def gather_rows(v: jax.Array, plan: row_plan.RowPlan) -> jax.Array:
  """`moe_gather` without a derivative: v [row, n] to [token, n]."""
  tokens, top_k = plan.pos.shape
  if not tokens:
    return jnp.zeros((0, *v.shape[1:]), v.dtype)
  has_row = slots_with_rows(plan)
  total = None
  for j in range(top_k):
    rows = moves.take_rows(v, plan.pos[:, j])
    term = storage.wide(
        moves.where(has_row[:, j, None], rows, jnp.zeros((), v.dtype))
    )
    # +0 + term, which a compiler drops and keeps a -0.
    total = (
        jnp.where(term == 0, jnp.zeros((), term.dtype), term)
        if total is None else total + term
    )
  return storage.rounded(total, v.dtype)


def slots_with_rows(plan: row_plan.RowPlan) -> jax.Array:
  """Which slots have a row: [token, slot] bool."""
  slots = jnp.arange(plan.pos.size, dtype=jnp.int32).reshape(plan.pos.shape)
  return jnp.take(plan.slot_of_row, plan.pos, mode="clip") == slots


def gate_rows(gates: jax.Array, plan: row_plan.RowPlan) -> jax.Array:
  """Gates [token, slot] by row: [row]; +0 where a row has no slot."""
  flat = gates.reshape(-1, 1)
  if not flat.size:
    return jnp.zeros(plan.slot_of_row.shape, gates.dtype)
  rows = moves.take_rows(flat, plan.slot_of_row)
  has_slot = plan.slot_of_row < flat.shape[0]
  return moves.where(has_slot[:, None], rows, jnp.zeros((), gates.dtype))[:, 0]


def gate_slots(by_row: jax.Array, plan: row_plan.RowPlan) -> jax.Array:
  """The transpose of `gate_rows`: [row] to [token, slot]; a copy."""
  if not plan.pos.size:
    return jnp.zeros(plan.pos.shape, by_row.dtype)
  slots = moves.take_rows(by_row[:, None], plan.pos.reshape(-1))
  slots = slots.reshape(plan.pos.shape)
  return moves.where(
      slots_with_rows(plan), slots, jnp.zeros((), by_row.dtype)
  )


moe_scatter = once.differentiated(
    lambda x, plan: (scatter_rows(x, plan), plan),
    lambda plan, dy: (gather_rows(dy, plan), None),
    "moe_scatter",
)
moe_gather = once.differentiated(
    lambda v, plan: (gather_rows(v, plan), plan),
    lambda plan, dy: (scatter_rows(dy, plan), None),
    "moe_gather",
)
moe_gate_rows = once.differentiated(
    lambda gates, plan: (gate_rows(gates, plan), plan),
    lambda plan, dy: (gate_slots(dy, plan), None),
    "moe_gate_rows",
)


def moe_scatter_oracle(x: np.ndarray, pos: np.ndarray, rows: int) -> np.ndarray:
  """The definition: x [token, n], pos [token, slot]; rows >= `rows` are +0."""
  out = np.zeros((pos.size, x.shape[1]), x.dtype)
  for token in range(pos.shape[0]):
    for row in pos[token].tolist():
      if row < rows:
        out[row] = x[token]
  return out


def moe_gather_oracle(v: np.ndarray, pos: np.ndarray, rows: int) -> np.ndarray:
  """The definition: v [row, n], pos [token, slot]; one rounding."""
  wide = np.float64 if v.dtype == np.float64 else np.float32
  out = np.zeros((pos.shape[0], v.shape[1]), wide)
  for j in range(pos.shape[1]):
    term = np.where(
        (pos[:, j] < rows)[:, None], v[pos[:, j]], np.zeros((), v.dtype)
    )
    with np.errstate(invalid="ignore"):
      out = out + term.astype(wide)
  return rounding.round_oracle(out.astype(np.float64), v.dtype.name)
