"""Rotary position embedding: frequencies, tables, rotation.

Pair i of a head turns by position * theta^(-2i / head_dim). Scaled variants
("linear", "yarn") change the frequencies and multiply cos and sin by an
attention factor. All of it runs on the operations, so that the tables too have
a contract.

Layer: modules.
"""

import math

import jax
import jax.numpy as jnp

from moejax.contracts import ops as ops_lib
from moejax.modules import config as config_lib
from moejax.modules import tap as tap_lib
from moejax.numerics import declared_moves


def attention_factor(scaling: config_lib.RopeScaling) -> float:
  """The factor on cos and sin.

  With m(f, s) = 0.1 * s * ln(f) + 1 (1 for f <= 1): m(factor, mscale) /
  m(factor, mscale_all_dim) where both are set, else m(factor, 1).
  """
  if scaling.kind != "yarn":
    return 1.0
  if scaling.attention_factor is not None:
    return scaling.attention_factor
  if scaling.mscale and scaling.mscale_all_dim:
    return yarn_scale(scaling.factor, scaling.mscale) / yarn_scale(
        scaling.factor, scaling.mscale_all_dim
    )
  return yarn_scale(scaling.factor, 1.0)


def yarn_scale(factor: float, mscale: float) -> float:
  """0.1 * mscale * ln(factor) + 1, or 1 for a factor of at most 1."""
  return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(
    config: config_lib.DecoderConfig, ops: ops_lib.Operations
) -> jax.Array:
  """`frequencies_of` a Qwen3-MoE decoder."""
  return frequencies_of(
      config.head_dim,
      config.rope_theta,
      config.rope_scaling,
      config.max_positions,
      ops,
  )


def frequencies_of(
    dim: int,
    theta: float,
    scaling: config_lib.RopeScaling,
    max_positions: int,
    ops: ops_lib.Operations,
) -> jax.Array:
  """Returns [half_dim] float32 radians a position; one rounding a step."""
  even = jnp.arange(0, dim, 2, dtype=jnp.float32)
  exponent = ops.divide(even, jnp.full_like(even, dim))
  period = ops.power(theta, exponent)
  one = jnp.ones_like(period)
  plain = ops.divide(one, period)
  if scaling.kind == "default":
    return plain
  if scaling.kind == "linear":
    return ops.divide(plain, jnp.full_like(plain, scaling.factor))
  stretched = ops.divide(one, ops.scale(period, scaling.factor))
  low, high = _yarn_range(dim, theta, scaling, max_positions)
  pair = jnp.arange(dim // 2, dtype=jnp.float32)
  ramp = ops.divide(
      ops.add_scalar(pair, -low), jnp.full_like(pair, high - low)
  )
  ramp = jnp.clip(ramp, 0, 1)
  keep = ops.add_scalar(-ramp, 1.0)
  rest = ops.add_scalar(-keep, 1.0)
  return ops.add(ops.multiply(stretched, rest), ops.multiply(plain, keep))


def _yarn_range(dim, theta, scaling, max_positions) -> tuple[float, float]:
  """The pairs between which frequencies pass from kept to interpolated."""
  context = scaling.original_positions or max_positions

  def pair(rotations: float) -> float:
    return (dim * math.log(context / (rotations * 2 * math.pi))) / (
        2 * math.log(theta)
    )

  low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
  if scaling.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, dim - 1)
  return low, high + 0.001 if low == high else high


def tables(
    frequencies: jax.Array,
    positions: jax.Array,
    factor: float,
    dtype: str,
    ops: ops_lib.Operations,
    tap: tap_lib.Tap,
) -> tuple[jax.Array, jax.Array]:
  """Returns cos and sin, each [batch, token, head_dim] in dtype.

  angle = R(position * frequency); cos = R_dtype(R(R(cos(angle)) * factor)).

  Args:
    frequencies: [half_dim] float32.
    positions: [batch, token] ints.
    factor: From `attention_factor`.
    dtype: Of the activations.
    ops: The operations.
    tap: Sees every step.
  """
  angle = ops.multiply(
      positions[..., None].astype(jnp.float32),
      jnp.broadcast_to(frequencies, (*positions.shape, len(frequencies))),
  )
  angle = tap("angle", angle)
  angle = jnp.concatenate([angle, angle], axis=-1)
  return cos_and_sin(angle, factor, dtype, ops, tap)


def cos_and_sin(
    angle: jax.Array,
    factor: float,
    dtype: str,
    ops: ops_lib.Operations,
    tap: tap_lib.Tap,
) -> tuple[jax.Array, jax.Array]:
  """R_dtype(R(R(cos(angle)) * factor)), and the same of sin.

  Args:
    angle: Any shape, float32.
    factor: From `attention_factor`.
    dtype: Of the tables.
    ops: The operations.
    tap: Sees every step.
  """
  cos = tap("cosine", ops.cos(angle))
  cos = tap("cosine_scaled", ops.scale(cos, factor))
  sin = tap("sine", ops.sin(angle))
  sin = tap("sine_scaled", ops.scale(sin, factor))
  if dtype != "float32":
    cos = tap("cos", ops.cast(cos, dtype))
    sin = tap("sin", ops.cast(sin, dtype))
  return cos, sin


def rotate(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    ops: ops_lib.Operations,
    tap: tap_lib.Tap,
) -> jax.Array:
  """R(R(x * cos) + R(half_turn(x) * sin)) on [batch, token, head, head_dim]."""
  moves = declared_moves.of(ops)
  x, for_turn = moves.share(x, 2)
  turned = moves.half_turn(for_turn)
  along = tap("times_cos", ops.multiply(x, cos[:, :, None]))
  across = tap("times_sin", ops.multiply(turned, sin[:, :, None]))
  return tap("rotated", ops.add(along, across))


def positions(valid: jax.Array, before: jax.Array) -> jax.Array:
  """Positions of left-padded sequences: [batch, token] int32.

  A sequence's real tokens count on from those it had before; padding gets 0.

  Args:
    valid: [batch, token] bool.
    before: [batch, one] int32, real tokens of earlier steps.
  """
  counted = before + jnp.cumsum(valid, axis=-1, dtype=jnp.int32) - 1
  return jnp.where(valid, counted, 0).astype(jnp.int32)
