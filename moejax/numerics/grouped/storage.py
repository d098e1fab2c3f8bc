"""Between the dtype that arrays are stored in and the one that computes.

float64 computes in float64, everything else in float32. A rounding to 16 bits
works on the bits, because XLA on a GPU removes a pair of casts.

Layer: numerics.
"""

import jax
from jax import lax
import jax.numpy as jnp

from moejax.numerics import rounding


def wide(x: jax.Array) -> jax.Array:
  """Returns x in the dtype that computes; exact."""
  return x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def rounded(x: jax.Array, dtype) -> jax.Array:
  """R_d: float32 or float64 to the dtype, one rounding, nearest even.

  float64 on its way to 16 bits passes through float32, as everywhere here.
  """
  dtype = jnp.dtype(dtype)
  if x.dtype == dtype:
    return x
  if dtype.itemsize > 2:
    return x.astype(dtype)
  x = x.astype(jnp.float32)
  if dtype == jnp.bfloat16:
    return lax.bitcast_convert_type(rounding.bf16_bits(x, "ieee"), dtype)
  return lax.bitcast_convert_type(rounding.f16_bits(x), dtype)


def run_time_zero(ends: jax.Array) -> jax.Array:
  """A uint32 zero that no compiler knows: the sign of a count of rows."""
  return lax.bitcast_convert_type(ends[-1], jnp.uint32) >> 31


def product(a: jax.Array, b: jax.Array, zero: jax.Array) -> jax.Array:
  """R_FP32(a * b) that no addition behind it swallows; float64 as it is."""
  out = a * b
  return out if out.dtype == jnp.float64 else rounding.fence(out, zero)
