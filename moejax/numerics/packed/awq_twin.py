"""AWQ tensors of many experts made wide in JAX: the twin of `dequantize`.

Layer: numerics. Oracle: awq_format.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moejax.numerics import rounding
from moejax.numerics.packed import awq_format

# Shift of column j of a word: 4 times the nibble that holds it.
_SHIFTS = 4 * np.argsort(awq_format.ORDER).astype(np.uint32)


def unpack(words: jax.Array) -> jax.Array:
  """Returns the nibbles of each word by column: [..., 8 * words] uint8.

  Raises:
    ValueError: the words are not int32.
  """
  if words.dtype != jnp.int32:
    raise ValueError(f"packed words are {words.dtype}, not int32.")
  unsigned = jax.lax.bitcast_convert_type(words, jnp.uint32)[..., None]
  nibbles = (unsigned >> jnp.asarray(_SHIFTS)) & jnp.uint32(15)
  return nibbles.astype(jnp.uint8).reshape(*words.shape[:-1], -1)


@functools.partial(jax.jit, static_argnames="dtype")
def dequantize(
    qweight: jax.Array, qzeros: jax.Array, scales: jax.Array, dtype: str
) -> jax.Array:
  """Returns R((code - zero) * R(scale)) of every expert, output-major.

  Difference and product are exact in float64, so each weight has one rounding
  (and one of its scale, if that has another dtype). One expert at a time, as
  float64 takes sixteen times the room of the codes.

  Args:
    qweight: [expert, k, n / 8] int32.
    qzeros: [expert, group, n / 8] int32.
    scales: [expert, group, n] float16 or bfloat16.
    dtype: "float16" or "bfloat16".

  Returns:
    [expert, n, k] in dtype, as `ops.expert_linear` takes it.
  """

  def one(expert):
    words, zero_words, scale = expert
    codes = unpack(words).astype(jnp.int32)
    zeros = unpack(zero_words).astype(jnp.int32)
    groups, n = zeros.shape
    difference = codes.reshape(groups, -1, n) - zeros[:, None]
    narrow = rounding.round_pack(rounding.widen(scale), dtype)
    exact = difference.astype(jnp.float64) * rounding.widen(narrow)[:, None]
    return rounding.round_pack(exact, dtype).reshape(-1, n).T

  return jax.lax.map(one, (qweight, qzeros, scales))
