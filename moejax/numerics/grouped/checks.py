"""Checked mode: what a routed batch must satisfy, tested instead of assumed.

Where values are known a failed check raises ValueError at once. In traced code
it goes through `jax.experimental.checkify`: wrap the function in
`checkify.checkify` and throw what it returns.

Layer: numerics.
"""

import jax
from jax.experimental import checkify
import jax.numpy as jnp

from moejax.contracts import grouped_mlp
from moejax.numerics.grouped import row_plan
from moejax.numerics.grouped import tiles


def check_ids(ids: jax.Array, num_experts: int) -> None:
  """Checks that ids lie in 0 .. num_experts; the last says "no expert".

  Raises:
    ValueError: one does not.
  """
  if ids.size:
    require(
        (jnp.min(ids) >= 0) & (jnp.max(ids) <= num_experts),
        f"expert ids must lie in 0..{num_experts} ({num_experts}: no expert),"
        " found {low} to {high}.",
        low=jnp.min(ids), high=jnp.max(ids),
    )


def check_plan(plan: row_plan.RowPlan) -> None:
  """Checks that a plan is a bijection, grouped, with the counts it claims.

  Raises:
    ValueError: the rows of the slots are no permutation; the counts do not end
      where `ends` does; or they are not the number of slots that have a row.
  """
  slots, rows = plan.pos.size, plan.slot_of_row.shape[0]
  flat = plan.pos.reshape(-1)
  hits = jnp.zeros((rows,), jnp.int32).at[flat].add(1, mode="drop")
  inside = (flat >= 0) & (flat < rows)
  require(
      jnp.all(inside) & jnp.all(hits <= 1),
      "the rows of {slots} slots are no bijection: row {row} is taken {times}"
      " times, {outside} slots lie outside.",
      slots=jnp.int32(slots), row=jnp.argmax(hits), times=jnp.max(hits),
      outside=jnp.sum(~inside),
  )
  total = jnp.sum(plan.counts)
  placed = jnp.sum(plan.slot_of_row < slots)
  require(
      jnp.all(jnp.cumsum(plan.counts) == plan.ends)
      & jnp.all(plan.counts >= 0) & (total == placed),
      "the counts of the experts sum to {total}, the plan has rows for"
      " {placed} slots.",
      total=total, placed=placed,
  )


def check_bound(
    plan: row_plan.RowPlan, contract: grouped_mlp.GroupGemmContract
) -> None:
  """Checks that a launch reaches every row of every expert.

  INV-M (INV-K for weight gradients):
  ceil(max_M / BM) BM >= max over e of n_e.

  Raises:
    ValueError: rows stay unwritten.
  """
  reached = tiles.written_rows(plan, contract)
  most = jnp.max(plan.counts)
  require(
      jnp.all(reached == plan.counts),
      f"bound {contract.bound!r} with blocks of {contract.block_rows} rows"
      " reaches {reached} rows of an expert that has {most}.",
      reached=jnp.max(reached), most=most,
  )


def require(holds: jax.Array, message: str, **values: jax.Array) -> None:
  """Raises ValueError, or in traced code a checkify error, unless it holds."""
  if isinstance(holds, jax.core.Tracer):
    checkify.check(holds, message, **values)
  elif not bool(holds):
    raise ValueError(message.format(**values))
