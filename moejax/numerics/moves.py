"""Values moved about by their bits.

A gather, a selection or a maximum computes nothing, yet XLA on a CPU may carry
16-bit floats through float32 and flush subnormals on the way. Here floats move
as integers, so that a moved value has the bits it had.

Integers have no gradient, and JAX would take it for zero without a word. So
each move brings its own: the cotangent goes back to where the value came from.
Where several values came from one place their cotangents are added in float32
(or in the dtype of x, if that is wider) and rounded once to the dtype of x; no
atomic addition has a part in it, so a gradient has the same bits in every run.

Layer: numerics. No arithmetic but that sum.
"""

import functools

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
  return _gather_rows(x.shape[1], x, jnp.clip(index, 0, x.shape[1] - 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_rows(num_rows, x, index):
  del num_rows
  at = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
  moved = jnp.take_along_axis(to_bits(x), at, axis=1)
  return lax.bitcast_convert_type(moved, x.dtype)


def _gather_rows_forward(num_rows, x, index):
  return _gather_rows(num_rows, x, index), index


def _gather_rows_backward(num_rows, index, cotangent):
  rows = jnp.arange(num_rows, dtype=index.dtype)
  taken = index[..., None] == rows  # [batch, wanted, row]
  if cotangent.ndim == 2:  # Too thin for a matrix product.
    wide = cotangent.astype(_sum_dtype(cotangent))[..., None]
    back = jnp.where(taken, wide, 0).sum(1)
    return back.astype(cotangent.dtype), None
  flat = cotangent.reshape(*index.shape, -1)
  back = _add_rows(taken, flat, (((1,), (1,)), ((0,), (0,))))
  return back.reshape(back.shape[:2] + cotangent.shape[2:]), None


_gather_rows.defvjp(_gather_rows_forward, _gather_rows_backward)


@jax.custom_vjp
def take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
  """x[index] along the first axis, moved as integers; for any index shape.

  The index must lie inside.
  """
  moved = jnp.take(to_bits(x), index, axis=0, mode="clip")
  return lax.bitcast_convert_type(moved, x.dtype)


def _take_rows_forward(x, index):
  # The shape of x alone is used; a compiler drops its values.
  return take_rows(x, index), (x, index)


def _take_rows_backward(kept, cotangent):
  x, index = kept
  rows = jnp.arange(x.shape[0], dtype=index.dtype)
  taken = index.reshape(-1)[:, None] == rows  # [wanted, row]
  flat = cotangent.reshape(index.size, -1)
  return _add_rows(taken, flat, (((0,), (0,)), ((), ()))).reshape(x.shape), None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)


def _sum_dtype(x):
  return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def _add_rows(taken, rows, contracted):
  """Adds each row to where it came from: products with one and zero."""
  out = lax.dot_general(
      taken.astype(rows.dtype),
      rows,
      contracted,
      precision=lax.Precision.HIGHEST,
      preferred_element_type=_sum_dtype(rows),
  )
  return out.astype(rows.dtype)


def where_rows(mask: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
  """x where mask [batch, row] holds, else y; both [batch, row, ...]."""
  mask = mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))
  return where(mask, x, y)


def where(mask: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
  """x where the mask holds, else y; one dtype, broadcast to mask and x."""
  y = jnp.asarray(y, x.dtype)
  shape = jnp.broadcast_shapes(mask.shape, x.shape, y.shape)
  return _where(*(jnp.broadcast_to(v, shape) for v in (mask, x, y)))


@jax.custom_vjp
def _where(mask, x, y):
  chosen = jnp.where(mask, to_bits(x), to_bits(y))
  return lax.bitcast_convert_type(chosen, x.dtype)


def _where_backward(mask, cotangent):
  zero = jnp.zeros_like(cotangent)
  return None, _where(mask, cotangent, zero), _where(mask, zero, cotangent)


_where.defvjp(lambda mask, x, y: (_where(mask, x, y), mask), _where_backward)


def concatenate(parts: list[jax.Array], axis: int) -> jax.Array:
  """The parts side by side.

  Raises:
    ValueError: they are not of one dtype.
  """
  if len({part.dtype for part in parts}) > 1:
    raise ValueError(f"parts of dtypes {[p.dtype.name for p in parts]}.")
  ends, end = [], 0
  for part in parts[:-1]:
    end += part.shape[axis]
    ends.append(end)
  return _concatenate(axis, tuple(ends), list(parts))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _concatenate(axis, ends, parts):
  del ends
  joined = jnp.concatenate([to_bits(part) for part in parts], axis=axis)
  return lax.bitcast_convert_type(joined, parts[0].dtype)


_concatenate.defvjp(
    lambda axis, ends, parts: (_concatenate(axis, ends, parts), None),
    lambda axis, ends, _, cotangent: (jnp.split(cotangent, ends, axis),),
)


@jax.custom_vjp
def largest(x: jax.Array) -> jax.Array:
  """The largest of the last axis, which is kept; NaN has no place here.

  Its cotangent goes to the first of them.
  """
  top = jnp.max(_keys(x), axis=-1, keepdims=True)
  return lax.bitcast_convert_type(_unkey(top), x.dtype)


def _largest_backward(x, cotangent):
  first = jnp.argmax(_keys(x), axis=-1, keepdims=True)
  place = lax.broadcasted_iota(first.dtype, x.shape, x.ndim - 1)
  return (jnp.where(place == first, cotangent, jnp.zeros_like(cotangent)),)


largest.defvjp(lambda x: (largest(x), x), _largest_backward)


def _keys(x):
  """Floats as integers of the same order."""
  bits = lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
  return _unkey(bits)


def _unkey(bits):
  """Turns negative numbers round; its own inverse."""
  magnitude = jnp.array((1 << (8 * bits.dtype.itemsize - 1)) - 1, bits.dtype)
  return jnp.where(bits < 0, bits ^ magnitude, bits)


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
