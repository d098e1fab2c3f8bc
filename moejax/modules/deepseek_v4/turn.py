"""Rotation of the trailing channels of a head, pair by pair.

Channels 2i and 2i + 1 of the trailing rotary_dim turn by position *
frequency_i. Keys are values at once, so the output of attention is turned back
by the query's own position.

Layer: modules.
"""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import deepseek_v4 as contract_lib
from moejax.contracts import ops as ops_lib
from moejax.modules import rotary
from moejax.modules import tap as tap_lib
from moejax.numerics import moves


def table_dtype(
    graph: contract_lib.DeepseekV4Graph, dtype: np.dtype
) -> str:
  """The dtype of cos and sin in a model of a dtype."""
  return dtype.name if graph.rotary_tables == "model" else "float32"


def tables(
    frequencies: jax.Array,
    positions: jax.Array,
    factor: float,
    dtype: str,
    ops: ops_lib.Operations,
    tap: tap_lib.Tap,
) -> tuple[jax.Array, jax.Array]:
  """Returns cos and sin, each [*positions, half_dim] in dtype.

  angle = R(position * frequency); cos = R_dtype(R(R(cos(angle)) * factor)).
  """
  angle = ops.multiply(positions[..., None].astype(jnp.float32), frequencies)
  angle = tap("angle", angle)
  return rotary.cos_and_sin(angle, factor, dtype, ops, tap)


def turn(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    ops: ops_lib.Operations,
    tap: tap_lib.Tap,
) -> jax.Array:
  """Turns the trailing channels of [..., head_dim] by [..., half_dim] tables.

  R_dtype(R(x * cos) + R(partner(x) * sin)) in float32 until the last rounding;
  partner(x) is (-x[2i + 1], x[2i]). The other channels pass through.
  """
  dim = 2 * cos.shape[-1]
  still, moving = x[..., :-dim], x[..., -dim:]
  wide = ops.cast(moving, "float32")
  partner = jnp.stack([-wide[..., 1::2], wide[..., 0::2]], axis=-1)
  partner = partner.reshape(wide.shape)
  cos, sin = (
      jnp.repeat(ops.cast(t, "float32"), 2, axis=-1) for t in (cos, sin)
  )
  along = tap("times_cos", ops.multiply(wide, cos))
  across = tap("times_sin", ops.multiply(partner, sin))
  turned = tap("sum", ops.add(along, across))
  if x.dtype != wide.dtype:
    turned = tap("rounded", ops.cast(turned, x.dtype.name))
  return moves.concatenate([still, turned], -1)
