"""Values moved about by their bits.

A gather, a selection or a maximum computes nothing, yet XLA on a CPU may carry
16-bit floats through float32 and flush subnormals on the way. Here floats move
as integers, so that a moved value has the bits it had.

Layer: numerics. No arithmetic.
"""

import jax
from jax import lax
import jax.numpy as jnp


def to_bits(x: jax.Array) -> jax.Array:
  """Views floats as unsigned integers of the same width."""
  return lax.bitcast_convert_type(
      x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")
  )


def gather_rows(x: jax.Array, index: jax.Array) -> jax.Array:
  """x[b, index[b, i]] over [batch, row, ...]; the index is clipped.

  Args:
    x: [batch, row, ...].
    index: [batch, wanted] ints.

  Returns:
    [batch, wanted, ...].
  """
  at = jnp.clip(index, 0, x.shape[1] - 1)
  at = at.reshape(*at.shape, *(1,) * (x.ndim - 2))
  moved = jnp.take_along_axis(to_bits(x), at, axis=1)
  return lax.bitcast_convert_type(moved, x.dtype)


def where_rows(mask: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
  """x where mask [batch, row] holds, else y; both [batch, row, ...]."""
  mask = mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))
  return where(mask, x, y)


def where(mask: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
  """x where the mask holds, else y; one dtype, broadcast to mask and x."""
  y = jnp.asarray(y, x.dtype)
  chosen = jnp.where(mask, to_bits(x), to_bits(y))
  return lax.bitcast_convert_type(chosen, x.dtype)


def concatenate(parts: list[jax.Array], axis: int) -> jax.Array:
  """The parts side by side.

  Raises:
    ValueError: they are not of one dtype.
  """
  if len({part.dtype for part in parts}) > 1:
    raise ValueError(f"parts of dtypes {[p.dtype.name for p in parts]}.")
  joined = jnp.concatenate([to_bits(part) for part in parts], axis=axis)
  return lax.bitcast_convert_type(joined, parts[0].dtype)


def largest(x: jax.Array) -> jax.Array:
  """The largest of the last axis, which is kept; NaN has no place here."""
  width = 8 * x.dtype.itemsize
  signed = jnp.dtype(f"int{width}")
  magnitude = jnp.array((1 << (width - 1)) - 1, signed)
  bits = lax.bitcast_convert_type(x, signed)
  keys = jnp.where(bits < 0, bits ^ magnitude, bits)
  top = jnp.max(keys, axis=-1, keepdims=True)
  return lax.bitcast_convert_type(
      jnp.where(top < 0, top ^ magnitude, top), x.dtype
  )


def clamp(
    x: jax.Array, low: float | None, high: float | None
) -> jax.Array:
  """x held between two bounds that its dtype represents; NaN stays NaN."""
  if high is not None:
    x = _replace(x, x > high, high)
  if low is not None:
    x = _replace(x, x < low, low)
  return x


def _replace(x, mask, value):
  return where(~mask, x, jnp.full(x.shape, value, x.dtype))
