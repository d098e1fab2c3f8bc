"""Routed MLP by the framework's ragged dot.

Layer: training.
"""

import jax
from jax import lax
import jax.numpy as jnp


def moe_mlp(x, gates, gate_up, down, ids, limit):
  num_experts, top_k = gate_up.shape[0], ids.shape[1]
  flat = ids.reshape(-1)
  order = jnp.argsort(flat, stable=True)
  back = jnp.argsort(order, stable=True)
  sizes = (flat[:, None] == jnp.arange(num_experts, dtype=flat.dtype)).sum(
      0, dtype=jnp.int32
  )
  rows = jnp.repeat(x, top_k, axis=0)[order]

  def dot(a, w):
    return lax.ragged_dot(a, jnp.swapaxes(w, 1, 2), sizes).astype(a.dtype)

  gate, up = jnp.split(dot(rows, gate_up), 2, axis=-1)
  if limit is not None:
    zero = jnp.zeros((), gate.dtype)
    top = jnp.full_like(gate, limit)
    gate = jnp.where(gate <= limit, gate, top + zero)
    up = jnp.where(jnp.abs(up) <= limit, up, jnp.sign(up) * limit)
  out = dot(jax.nn.silu(gate) * up, down)[back]
  terms = out.reshape(*ids.shape, -1) * gates[..., None].astype(x.dtype)
  return terms.astype(jnp.float32).sum(1).astype(x.dtype)
