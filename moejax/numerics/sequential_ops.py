"""Contract arithmetic: reductions in float32, in ascending order.

  acc = +0;  for k ascending:  acc = R_FP32(acc + term_k)

The term of a GEMM is the exact product of its two operands, so there is
nothing for a compiler to contract. Values travel as float64 and are rounded on
their bits (see `rounding.round_value`), so the bits are the same on every
backend, compiled or not. What reduces nothing is portable.

The oracles in NumPy's own float32 stand beside the twins.

Layer: numerics. Protocol: contracts/ops.py (the reductions of it).
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax.numerics import rounding
from moejax.numerics import sinkhorn


def matmul_oracle(a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
  """[m, k] times [k, n] as a chain in float32 over ascending k.

  R_FP32(acc + a * b) with the exact product: for 16-bit operands the product
  fits float32 and NumPy's float32 addition is the definition. For float32
  operands the chain runs in float64 rounded to odd, then to float32.

  Args:
    a: [m, k], float32, bfloat16 or float16.
    b: [k, n], the same dtype.
    dtype: Of the result.

  Returns:
    [m, n]; one rounding an addition and one to dtype.
  """
  acc = np.zeros((a.shape[0], b.shape[1]), np.float32)
  for k in range(a.shape[1]):
    left, right = a[:, k, None], b[None, k]
    with np.errstate(all="ignore"):
      product = left.astype(np.float64) * right.astype(np.float64)
      total_, error = _two_sum(product, acc.astype(np.float64))
      acc = _to_odd(total_, error).astype(np.float32)
  return rounding.round_oracle(acc.astype(np.float64), dtype)


def sum_oracle(x: np.ndarray, dtype: str) -> np.ndarray:
  """The chain of sums along the last axis, in float32 from +0."""
  acc = np.zeros(x.shape[:-1], np.float32)
  for k in range(x.shape[-1]):
    acc = acc + x[..., k].astype(np.float32)
  return rounding.round_oracle(acc.astype(np.float64), dtype)[..., None]


def _two_sum(a, b):
  total = a + b
  back = total - a
  return total, (a - (total - back)) + (b - back)


def _to_odd(total, error):
  bits = total.view(np.int64)
  inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
  away = (error > 0) == (total > 0)
  moved = np.where(away, bits + 1, bits - 1)
  return np.where(inexact, moved, bits).view(np.float64)


def add_term(acc: jax.Array, term: jax.Array) -> jax.Array:
  """R_FP32(acc + term) on float64 values; the term may hold 48 bits."""
  total = acc + term
  back = total - acc
  error = (acc - (total - back)) + (term - back)
  bits = lax.bitcast_convert_type(total, jnp.int64)
  inexact = (error != 0) & jnp.isfinite(total) & (bits & 1 == 0)
  away = (error > 0) == (total > 0)
  bits = jnp.where(inexact, jnp.where(away, bits + 1, bits - 1), bits)
  odd = lax.bitcast_convert_type(bits, jnp.float64)
  return rounding.round_value(odd, "float32")


def _chain(terms, count, shape):
  """Adds terms(k) for k ascending, from +0.

  The first addition is written out: XLA drops an addition to a literal zero
  and keeps a -0.
  """
  first = jnp.broadcast_to(terms(0), shape)
  first = jnp.where(first == 0, jnp.float64(0), first)
  return lax.fori_loop(
      1,
      count,
      lambda k, acc: add_term(acc, terms(k)),
      rounding.round_value(first, "float32"),
  )


@functools.partial(jax.jit, static_argnames="dtype")
def matmul(a: jax.Array, b: jax.Array, dtype: str) -> jax.Array:
  """The twin of `matmul_oracle`, over [..., m, k] and [..., k, n]."""
  wide_a = jnp.moveaxis(rounding.widen(a), -1, 0)
  wide_b = jnp.moveaxis(rounding.widen(b), -2, 0)
  shape = jnp.broadcast_shapes(
      (*a.shape[:-1], 1), (*b.shape[:-2], 1, b.shape[-1])
  )

  def term(k):
    return wide_a[k][..., None] * wide_b[k][..., None, :]

  return rounding.round_pack(_chain(term, a.shape[-1], shape), dtype)


@functools.partial(jax.jit, static_argnames="dtype")
def total(x: jax.Array, dtype: str) -> jax.Array:
  """The twin of `sum_oracle`."""
  wide = jnp.moveaxis(rounding.widen(x), -1, 0)
  acc = _chain(lambda k: wide[k], x.shape[-1], x.shape[:-1])
  return rounding.round_pack(acc, dtype)[..., None]


class SequentialReductions:
  """The reducing methods of `ops.Operations`; `elementwise` does the rest."""

  name = "sequential"

  def __init__(self, elementwise):
    self._elementwise = elementwise

  def mean(self, x, site):
    total_ = self.sum(x, site)
    return self._elementwise.divide(total_, jnp.float64(x.shape[-1]))

  def sum(self, x, site):
    del site
    return total(x, x.dtype.name)

  def softmax(self, x, site):
    """R(x - max), R(exp), the chain of their sum, R(quotient)."""
    largest = jnp.max(x, axis=-1, keepdims=True)
    weights = self._elementwise.exp(self._elementwise.add(x, -largest))
    return self._elementwise.divide(weights, self.sum(weights, site))

  def sinkhorn(self, x, iterations, epsilon, site):
    return sinkhorn.by_operations(
        _WithSum(self._elementwise, self.sum), x, iterations, epsilon, site
    )

  def linear(self, x, weight, site):
    return self.matmul(x, jnp.swapaxes(weight, -1, -2), site)

  def matmul(self, a, b, site):
    del site
    return matmul(a, b, a.dtype.name)


class _WithSum:
  """What a Sinkhorn round needs: sums of this file, the rest elementwise."""

  def __init__(self, elementwise, sum_):
    self.sum = sum_
    self.add_scalar = elementwise.add_scalar
    self.divide = elementwise.divide
