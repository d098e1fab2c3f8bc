"""The same expert MLP from smaller parts, and one expert at a time.

`composed` puts together the operations that have a gradient of their own; what
lies between them is differentiated by JAX. `eager` is the plain loop over
experts, without rows, plans or a gradient of ours. Both round by casts where
the contract rounds, so in float64 they are the same function as `mlp.moe_mlp`,
found in two other ways.

Layer: numerics. Contract: contracts/grouped_mlp.py.
"""

import jax
from jax import lax
import jax.numpy as jnp

from moejax.contracts import grouped_mlp
from moejax.numerics.grouped import activation
from moejax.numerics.grouped import group_gemm
from moejax.numerics.grouped import row_moves
from moejax.numerics.grouped import row_plan
from moejax.numerics.grouped import storage


def composed(
    x: jax.Array,
    gates: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    ids: jax.Array,
    contract: grouped_mlp.GroupedMlpContract,
) -> jax.Array:
  """`mlp.moe_mlp` as scatter, grouped matmuls and gather.

  `residuals` has no meaning: JAX keeps what it needs. The sum over hidden that
  makes the gradient of a gate has no declared order.
  """
  plan = row_plan.row_plan(ids, down.shape[0])
  rows = row_moves.moe_scatter(x, plan)

  def linear(v, weight):
    return group_gemm.grouped_matmul(
        v, weight, plan, contract.forward, contract.dgrad, contract.wgrad,
        transpose_b=True,
    )

  if contract.fc1_layout == "split":
    gate, up = (linear(rows, w) for w in jnp.split(gate_up, 2, axis=1))
  else:
    gate, up = jnp.split(linear(rows, gate_up), 2, axis=1)
  g = row_moves.moe_gate_rows(gates, plan)[:, None]
  out = _act(gate, up, contract)
  if contract.weight_placement == "before_fc2":
    return row_moves.moe_gather(linear(_weighted(out, g), down), plan)
  return row_moves.moe_gather(_weighted(linear(out, down), g), plan)


def eager(
    x: jax.Array,
    gates: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    ids: jax.Array,
    contract: grouped_mlp.GroupedMlpContract,
) -> jax.Array:
  """Expert by expert over all tokens, in ascending id.

  The sum over the slots of a token runs in x's dtype, experts ascending and
  then slots, with one rounding an addition. GEMMs are the framework's;
  the GEMMs' contracts and `residuals` have no meaning.
  """
  def one(y, parameters):
    expert, gate_up, down = parameters
    gate, up = jnp.split(_dot(x, gate_up.astype(x.dtype)), 2, axis=1)
    out = _act(gate, up, contract)
    for slot in range(ids.shape[1]):
      here = (ids[:, slot] == expert)[:, None]
      g = jnp.where(here, gates[:, slot, None], jnp.zeros((), gates.dtype))
      term = (
          _dot(_weighted(out, g), down.astype(x.dtype))
          if contract.weight_placement == "before_fc2"
          else _weighted(_dot(out, down.astype(x.dtype)), g)
      )
      y = jnp.where(here, y + term, y)
    return y, None

  experts = jnp.arange(down.shape[0], dtype=ids.dtype)
  return lax.scan(one, jnp.zeros_like(x), (experts, gate_up, down))[0]


def _act(gate, up, contract):
  if contract.clamp_limit is not None:
    limit = jnp.array(contract.clamp_limit, gate.dtype)
    gate = jnp.where(gate <= limit, gate, limit)
    up = jnp.where(up <= limit, jnp.where(up >= -limit, up, -limit), limit)
  wide = storage.wide(gate)
  silu = (wide * activation.sigmoid(wide, contract.functions)).astype(
      gate.dtype
  )
  return (storage.wide(silu) * storage.wide(up)).astype(gate.dtype)


def _weighted(rows, g):
  wide = storage.wide(rows)
  return (wide * g.astype(wide.dtype)).astype(rows.dtype)


def _dot(rows, weight):
  """rows [row, k] times weight [n, k], accumulated wide, one rounding."""
  return jnp.einsum(
      "rk,nk->rn", rows, weight,
      preferred_element_type=storage.wide(rows[:0]).dtype,
  ).astype(rows.dtype)
