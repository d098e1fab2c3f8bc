"""The operations of a backward pass in JAX: the twin of `gradient_oracle.py`.

They run op by op like those of `portable_ops.py`, on concrete arrays. Rows are
moved on the host, by their bits.

Layer: numerics.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from moejax.numerics.portable import error_bounds
from moejax.numerics.portable import exact
from moejax.numerics.portable import gradient_oracle
from moejax.numerics.portable import portable_ops


def _positive_zero(y):
  return jnp.where(y == 0, jnp.float64(0), y)


def _silu_backward(g, x):
  s, rest = 1.0 / (1.0 + jnp.exp(-x)), 1.0 / (1.0 + jnp.exp(x))
  y = g * s * (1.0 + x * rest)
  return y, error_bounds.silu_backward(g, x, s, jnp)


def _softmax_backward(g, y):
  value = y * (g - jnp.sum(g * y, axis=-1, keepdims=True))
  return _positive_zero(value), error_bounds.softmax_backward(g, y, jnp)


def _log_softmax(x):
  shifted = x - jnp.max(x, axis=-1, keepdims=True)
  total = jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True)
  y = shifted - jnp.log(total)
  return y, jnp.abs(y) + jnp.abs(shifted) + 1.4 * x.shape[-1] + 30.0


def _log_softmax_backward(g, y):
  value = g - jnp.exp(y) * jnp.sum(g, axis=-1, keepdims=True)
  return _positive_zero(value), error_bounds.log_softmax_backward(g, y, jnp)


def _flat_sum(x):
  y = jnp.sum(x, axis=-1)
  return _positive_zero(y), error_bounds.total(x, jnp)[..., 0]


def _cube(x):
  y = x * x * x
  return y, error_bounds.relative("power", y, jnp)


def _product(x, factor, y, z):
  change = factor * y * z
  return _positive_zero(x + change), error_bounds.fused(x, change, jnp)


def _quotient(x, factor, y, z):
  change = factor * y / z
  return _positive_zero(x + change), error_bounds.fused(x, change, jnp)


def _padded(size: int) -> int:
  return max(_SHORTEST, 1 << max(size - 1, 0).bit_length())


def _flat(x, shape, size, padded):
  """One axis of `padded` elements; a scalar stays one."""
  if not x.ndim:
    return x
  out = np.ones(padded, x.dtype)
  out[:size] = np.broadcast_to(np.asarray(x), shape).reshape(-1)
  return jnp.asarray(out)


def _lerp(x, y, weight):
  value = x + weight * (y - x)
  return _positive_zero(value), error_bounds.lerp(x, y, weight, jnp)


# Each element of the result depends on one element of each operand.
_ELEMENTWISE = frozenset(
    "add multiply divide rsqrt silu sqrt cube silu_backward fused lerp".split()
)
_SHORTEST = 1024


class PortableGradientOps(portable_ops.PortableOperations):
  """Portable operations, and those that only gradients and optimisers need.

  A step has many shapes and every one compiles anew. So elementwise operations
  run on one axis, padded with ones to a power of two.
  """

  def _run(self, name, operands, dtype, element=None, value=None):
    shape = ()
    if name in _ELEMENTWISE:
      shape = np.broadcast_shapes(*(x.shape for x in operands))
    if not shape or any(isinstance(x, jax.core.Tracer) for x in operands):
      return super()._run(name, operands, dtype, element, value)
    size = math.prod(shape)
    padded = _padded(size)
    out = super()._run(
        name,
        tuple(_flat(x, shape, size, padded) for x in operands),
        dtype,
        element,
        value,
    )
    self.certificate.note(name, size - padded)  # Padding is no result.
    return jnp.asarray(np.asarray(out)[:size].reshape(shape))

  def cast(self, x, dtype):
    x = jnp.asarray(x)
    if x.dtype == dtype or not x.ndim or isinstance(x, jax.core.Tracer):
      return super().cast(x, dtype)
    out = super().cast(_flat(x, x.shape, x.size, _padded(x.size)), dtype)
    return jnp.asarray(np.asarray(out)[: x.size].reshape(x.shape))

  def negate(self, x):
    """-x, which rounds nothing."""
    return self.scale(x, -1.0)

  def cube(self, x):
    """x^3."""
    return self._run(
        "cube", (x,), x.dtype, lambda v, i: exact.power(v[0][i], 3.0), _cube
    )

  def sum_to(self, x, shape):
    """Sums x to a shape that broadcasts to x's: one sum, one rounding."""
    if x.shape == tuple(shape):
      return x
    wanted = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = [i for i, n in enumerate(wanted) if n != x.shape[i]]
    if not axes:
      return x.reshape(shape)
    kept = [i for i in range(x.ndim) if i not in axes]
    moved = x.transpose(*kept, *axes)
    flat = moved.reshape(*moved.shape[: len(kept)], -1)
    out = self._run(
        "sum", (flat,), x.dtype,
        lambda v, i: exact.total(v[0][i].tolist()), _flat_sum,
    )
    return out.reshape(shape)

  def silu_backward(self, g, x):
    """g s (1 + x (1 - s)), s = 1 / (1 + exp(-x))."""
    return self._run(
        "silu_backward", (g, x), x.dtype,
        lambda v, i: exact.silu_backward(v[0][i], v[1][i]), _silu_backward,
    )

  def softmax_backward(self, g, y):
    """y (g - sum(g y)) over the last axis."""
    return self._run(
        "softmax_backward", (g, y), y.dtype,
        lambda v, i: exact.softmax_backward(v[0][i[:-1]], v[1][i[:-1]], i[-1]),
        _softmax_backward,
    )

  def log_softmax(self, x):
    """x - log(sum(exp(x))) over the last axis."""
    return self._run(
        "log_softmax", (x,), x.dtype,
        lambda v, i: exact.log_softmax(v[0][i[:-1]], i[-1]), _log_softmax,
    )

  def log_softmax_backward(self, g, y):
    """g - exp(y) sum(g) over the last axis."""
    return self._run(
        "log_softmax_backward", (g, y), y.dtype,
        lambda v, i: exact.log_softmax_backward(
            v[0][i[:-1]], v[1][i[:-1]], i[-1]
        ),
        _log_softmax_backward,
    )

  def nll_loss(self, x, targets):
    """Minus the mean of x [row, class] at the targets [row]; see the oracle."""
    rows = np.flatnonzero(np.asarray(targets) >= 0)
    picked = np.asarray(x)[rows, np.asarray(targets)[rows]]
    mean = self.mean(self.negate(jnp.asarray(picked)), "loss")
    return mean.reshape(())

  def nll_loss_backward(self, g, shape, targets):
    """-g / n at the targets, +0 elsewhere."""
    rows = np.flatnonzero(np.asarray(targets) >= 0)
    share = self.divide(self.negate(g), jnp.float64(len(rows)))
    out = np.zeros(shape, g.dtype)
    out[rows, np.asarray(targets)[rows]] = np.asarray(share)
    return jnp.asarray(out)

  def add_rows(self, target, index, rows):
    """target[index] += rows, one addition a row, in the order of the rows.

    Each addition runs on the whole target, so that it is compiled once.
    """
    target = np.asarray(target)
    index, rows = np.asarray(index), np.asarray(rows)
    for members in gradient_oracle.in_turn(index):
      out, added = np.array(target), np.zeros_like(target)
      added[index[members]] = rows[members]
      total = self.add(jnp.asarray(target), jnp.asarray(added))
      out[index[members]] = np.asarray(total)[index[members]]
      target = out
    return jnp.asarray(target)

  def fused(self, x, factor: float, y, z, divides: bool):
    """x + factor y z, or x + factor y / z, as one operation."""
    shape = jnp.broadcast_shapes(x.shape, jnp.shape(y), jnp.shape(z))
    y, z = (jnp.broadcast_to(jnp.asarray(v), shape) for v in (y, z))
    return self._run(
        "fused", (x, jnp.float64(factor), y, z), x.dtype,
        lambda v, i: exact.fused(v[0][i], factor, v[2][i], v[3][i], divides),
        _quotient if divides else _product,
    )

  def lerp(self, x, y, weight: float):
    """x + weight (y - x), as one operation."""
    return self._run(
        "lerp", (x, y, jnp.float64(weight)), x.dtype,
        lambda v, i: exact.lerp(v[0][i], v[1][i], weight), _lerp,
    )

