"""16-bit floats as their bits, inside and between kernels.

A compiler may carry a 16-bit float through float32 and lose a subnormal or the
bits of a NaN on the way. So arrays of them travel as uint16 words, and become
numbers only where a kernel computes.

Layer: pallas_kernels.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax.numerics import formats

NAN = 0x7FFF  # What CUDA's conversions make of every NaN.


def to_words(x) -> jax.Array:
  """Returns the uint16 words of a 16-bit float array on the host or device."""
  if isinstance(x, np.ndarray):
    return jnp.asarray(np.ascontiguousarray(x).view(np.uint16))
  return lax.bitcast_convert_type(x, jnp.uint16)


def from_words(words: jax.Array, dtype: str) -> jax.Array:
  """Returns words as the 16-bit floats that they are."""
  return lax.bitcast_convert_type(words, formats.of(dtype).numpy)


def widen(words: jax.Array, dtype: str) -> jax.Array:
  """Returns the float32 values of words; exact."""
  if dtype == "bfloat16":  # By bits: XLA on a CPU flushes a subnormal.
    wide = words.astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(wide, jnp.float32)
  return from_words(words, dtype).astype(jnp.float32)


def round_half(x: jax.Array, dtype: str) -> jax.Array:
  """Rounds float32 to words of float16 or bfloat16, nearest even.

  NaN becomes 0x7fff. The twin of `numerics.packed.gemm.round_half`.
  """
  words = to_words(x.astype(formats.of(dtype).numpy))
  return jnp.where(jnp.isnan(x), jnp.uint16(NAN), words)
