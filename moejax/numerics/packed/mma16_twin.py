"""One k16 step of a tensor core in JAX: the twin of `mma16.py`.

A compiler may contract or reorder float64 arithmetic as it likes here: every
product, cut term and sum is exact, and what enters or leaves float64 does so by
its bits (`rounding.widen`, `rounding.pack`). So the twin has the oracle's bits
compiled or not, and a kernel that runs in an interpreter can take this step in
the place of the tensor core's. It needs float64 to be enabled.

Layer: numerics. Contract: contracts/packed_gemm.py, Mma16Contract.
"""

import jax
from jax import lax
import jax.numpy as jnp

from moejax.contracts import packed_gemm
from moejax.numerics import formats
from moejax.numerics import rounding

_NONE, _LEAST = -8192, -400  # As in `mma16.py`.


def step(
    c: jax.Array,
    a: jax.Array,
    b: jax.Array,
    contract: packed_gemm.Mma16Contract,
) -> jax.Array:
  """Adds the sixteen products of each element: c + a^T b.

  Args:
    c: [m, n] float32.
    a: [16, m] float16 or bfloat16.
    b: [16, n], the same dtype.
    contract: Every field matters.

  Returns:
    [m, n] float32, the bits of `mma16.step`.

  Raises:
    ValueError: float64 is not enabled, or the shapes do not fit.
  """
  if not jax.config.jax_enable_x64:
    raise ValueError("mma16_twin computes in float64; jax_enable_x64 is off.")
  if (a.shape[0], b.shape[0]) != (16, 16) or a.dtype != b.dtype:
    raise ValueError(f"no k16 step of {a.dtype}{a.shape}, {b.dtype}{b.shape}.")
  left, right = (rounding.widen(x) for x in (a, b))
  products = left[:, :, None] * right[:, None, :]
  if contract.exponents == "sum":
    least = formats.of(a.dtype).min_exponent
    exponents = (
        _exponent(left, least, contract)[:, :, None]
        + _exponent(right, least, contract)[:, None, :]
    )
  else:
    exponents = _exponent(products, _LEAST, contract)
  for start in range(0, 16, contract.group):
    part = slice(start, start + contract.group)
    c = _add(c, products[part], exponents[part], contract)
  return c


def _exponent(value, least: int, contract):
  """e(v) of float64 values as int32."""
  bits = lax.bitcast_convert_type(value, jnp.int64)
  exponent = ((bits >> 52) & 0x7FF).astype(jnp.int32) - 1023
  # frexp's exponent of infinities and NaN is 0; which one is used is no matter.
  exponent = jnp.where(exponent == 1024, -1, exponent)
  if contract.operand_exponents == "clamped":
    exponent = jnp.maximum(exponent, least)
  return jnp.where(value == 0, _NONE, exponent)


def _power_of_two(exponent):
  bits = (exponent.astype(jnp.int64) + 1023) << 52
  return lax.bitcast_convert_type(bits, jnp.float64)


def _add(c, products, exponents, contract):
  """One addition of [group, m, n] products to [m, n]."""
  wide = rounding.widen(c)
  e_max = jnp.maximum(_exponent(wide, -126, contract), exponents.max(axis=0))
  power = contract.fraction_bits - jnp.maximum(e_max, _LEAST)
  scale = _power_of_two(power)
  cut = jnp.trunc(products * scale).sum(axis=0) + jnp.trunc(wide * scale)
  total = cut * _power_of_two(-power)
  value = (
      rounding.round_value(total, "float32")
      if contract.final == "nearest_even"
      else _truncate(total)
  )
  word = lax.bitcast_convert_type(
      rounding.pack(jnp.where(value == 0, 0.0, value), "float32"), jnp.uint32
  )
  plain = products.sum(axis=0) + wide
  infinity = jnp.where(plain > 0, 0x7F800000, 0xFF800000).astype(jnp.uint32)
  special = ~jnp.isfinite(plain)
  word = jnp.where(special, infinity, word)
  nan = jnp.uint32(int(contract.nan, 16))
  word = jnp.where(jnp.isnan(plain), nan, word)
  return lax.bitcast_convert_type(word, jnp.float32)


def _truncate(x):
  """Cuts float64 to what float32 holds, toward zero; beyond is infinity."""
  bits = lax.bitcast_convert_type(x, jnp.int64) & ~((1 << 29) - 1)
  cut = lax.bitcast_convert_type(bits, jnp.float64)
  small = jnp.trunc(x * 2.0**149) * 2.0**-149
  cut = jnp.where(jnp.abs(x) < 2.0**-126, small, cut)
  infinity = jnp.where(x > 0, jnp.inf, -jnp.inf)
  return jnp.where(jnp.abs(x) >= 2.0**128, infinity, cut)
