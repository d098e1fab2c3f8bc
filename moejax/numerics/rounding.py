"""Every rounding this project makes, by name; and the fence.

A value passes through float64 and is rounded to float32 first and from there
to a 16-bit format, nearest even each time. The oracles round with NumPy's own
casts on the main thread, which keep subnormals. The twins work on the bits
with integers: XLA on a CPU flushes subnormals in arithmetic, and XLA on a GPU
removes a float32-bfloat16-float32 pair of casts. Integers are left alone by
both, so a twin returns the same bits on every backend, subnormals included.

The rule of the R_BF16 step on a float32 value has two forms, which differ in
what is not finite (see `bf16_bits_oracle`).

Layer: numerics.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import document
from moejax.numerics import formats


def bf16_bits_oracle(x: np.ndarray, rule: str) -> np.ndarray:
  """Rounds float32 to bfloat16 and returns its bits.

  Finite: (bits + 0x7fff + (bits >> 16 & 1)) >> 16, that is nearest, ties to
  even; the largest values become infinity. Infinity and NaN: rule "paper"
  drops the low 16 bits, which turns a NaN whose payload lies there into
  infinity; rule "ieee" keeps every NaN a NaN, as 0x7fc0 with its sign.

  Args:
    x: float32, any shape.
    rule: "ieee" or "paper".

  Returns:
    uint16, x's shape. One rounding.

  Raises:
    ValueError: the rule is neither.

  Source: the rule "paper" follows the study of expert-reduction order, section
  2.2.3; "ieee" is ml_dtypes' cast.
  """
  document.check_choice("bf16_bits", "rule", rule, ("ieee", "paper"))
  bits = np.array(x, np.float32, order="C").view(np.uint32)
  rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
  special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
  kept = bits >> 16
  if rule == "ieee":
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    kept = np.where(nan, (kept & np.uint32(0x8000)) | np.uint32(0x7FC0), kept)
  return np.where(special, kept, rounded).astype(np.uint16)


def bf16_bits(x: jax.Array, rule: str) -> jax.Array:
  """The twin of `bf16_bits_oracle`: float32 in, uint16 out, same bits."""
  document.check_choice("bf16_bits", "rule", rule, ("ieee", "paper"))
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  rounded = (bits + jnp.uint32(0x7FFF) + ((bits >> 16) & jnp.uint32(1))) >> 16
  special = (bits & jnp.uint32(0x7F800000)) == jnp.uint32(0x7F800000)
  kept = bits >> 16
  if rule == "ieee":
    nan = (bits & jnp.uint32(0x7FFFFFFF)) > jnp.uint32(0x7F800000)
    kept = jnp.where(
        nan, (kept & jnp.uint32(0x8000)) | jnp.uint32(0x7FC0), kept
    )
  return jnp.where(special, kept, rounded).astype(jnp.uint16)


def f16_bits(x: jax.Array) -> jax.Array:
  """Rounds float32 to float16, nearest even, and returns its bits, uint16.

  NaN becomes 0x7e00 with its sign. Integers alone, so subnormals are kept.
  """
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  magnitude = bits & jnp.uint32(0x7FFFFFFF)
  rebias = jnp.uint32(112 << 23)
  # Below 2**-14 the spacing is constant: shift the significand into place.
  exponent = magnitude >> 23
  shift = jnp.clip(jnp.uint32(126) - exponent, 14, 25)
  whole = (magnitude & jnp.uint32(0x7FFFFF)) | jnp.uint32(0x800000)
  half = (jnp.uint32(1) << (shift - 1)) - 1
  small = (whole + half + ((whole >> shift) & 1)) >> shift
  normal = magnitude - rebias
  normal = (normal + jnp.uint32(0xFFF) + ((normal >> 13) & 1)) >> 13
  normal = jnp.minimum(normal, jnp.uint32(0x7C00))
  out = jnp.where(exponent < 113, small, normal)
  out = jnp.where(magnitude > jnp.uint32(0x7F800000), jnp.uint32(0x7E00), out)
  return (out | (bits >> 16 & jnp.uint32(0x8000))).astype(jnp.uint16)


def round_oracle(y: np.ndarray, dtype: str) -> np.ndarray:
  """Rounds float64 to float32 and then, for a 16-bit dtype, once more.

  NaN becomes the quiet NaN without payload and without sign.

  Args:
    y: float64, any shape.
    dtype: "float32", "bfloat16", "float16"; "float64" returns y.

  Returns:
    An array of that dtype. One rounding for float32, two for the others.
  """
  fmt = formats.of(dtype)
  if fmt is formats.FLOAT64:
    return y
  with np.errstate(over="ignore", under="ignore", invalid="ignore"):
    single = y.astype(np.float32)
    if fmt is formats.BFLOAT16:
      out = bf16_bits_oracle(single, "ieee").view(fmt.numpy)
    else:
      out = single.astype(fmt.numpy)
  return np.where(np.isnan(y), np.array(np.nan, fmt.numpy), out)


def round_value(y: jax.Array, dtype: str) -> jax.Array:
  """Rounds float64 to a format and returns the value, still in float64.

  Normal results are rounded on the bits; below the smallest normal number the
  significand is rounded as an integer, so no subnormal ever exists in a
  register that might flush it.

  Args:
    y: float64, any shape. Values under 2**-1022 are taken for zero.
    dtype: "float32", "bfloat16" or "float16". The step through float32 is not
      part of this function.

  Returns:
    float64 values that the format represents exactly. One rounding.
  """
  fmt = formats.of(dtype)
  bits = lax.bitcast_convert_type(y, jnp.uint64)
  sign = bits & jnp.uint64(1 << 63)
  magnitude = bits & jnp.uint64((1 << 63) - 1)
  drop = 53 - fmt.precision
  lsb = (magnitude >> drop) & jnp.uint64(1)
  kept = (magnitude + jnp.uint64((1 << (drop - 1)) - 1) + lsb) & jnp.uint64(
      ((1 << 63) - 1) ^ ((1 << drop) - 1)
  )
  infinity = jnp.uint64(0x7FF << 52)
  overflow = jnp.uint64((fmt.max_exponent + 1 + 1023) << 52)
  kept = jnp.where(kept >= overflow, infinity, kept)
  # Below the normal range the spacing is constant: round the multiple of it.
  quantum = fmt.min_exponent - (fmt.precision - 1)
  multiple = lax.round(
      lax.bitcast_convert_type(magnitude, jnp.float64)
      * jnp.float64(2.0**-quantum),
      lax.RoundingMethod.TO_NEAREST_EVEN,
  )
  small = lax.bitcast_convert_type(
      multiple * jnp.float64(2.0**quantum), jnp.uint64
  )
  is_small = magnitude < jnp.uint64((fmt.min_exponent + 1023) << 52)
  kept = jnp.where(is_small, small, kept)
  # A NaN loses payload and sign here, so that none depends on the machine.
  nan = magnitude > infinity
  out = jnp.where(nan, jnp.uint64(0x7FF8 << 48), sign | kept)
  return lax.bitcast_convert_type(out, jnp.float64)


def pack(y: jax.Array, dtype: str) -> jax.Array:
  """Turns float64 values that a format represents into that format's arrays.

  Exact, and made of integer operations. NaN becomes the quiet NaN without
  payload.
  """
  fmt = formats.of(dtype)
  width = 32 if fmt.bits == 16 and fmt is formats.BFLOAT16 else fmt.bits
  layout = formats.FLOAT32 if width == 32 else fmt
  bits = lax.bitcast_convert_type(y, jnp.uint64)
  sign = (bits >> 63) << (layout.bits - 1)
  magnitude = bits & jnp.uint64((1 << 63) - 1)
  shift = 53 - layout.precision
  rebias = (1023 + layout.min_exponent - 1) << 52
  normal = (magnitude - jnp.uint64(rebias)) >> shift
  quantum = layout.min_exponent - (layout.precision - 1)
  small = (
      lax.bitcast_convert_type(magnitude, jnp.float64)
      * jnp.float64(2.0**-quantum)
  ).astype(jnp.uint64)
  exponent_mask = ((1 << (layout.bits - layout.precision)) - 1) << (
      layout.precision - 1
  )
  infinity = jnp.uint64(0x7FF << 52)
  body = jnp.where(
      magnitude < jnp.uint64((layout.min_exponent + 1023) << 52), small, normal
  )
  body = jnp.where(magnitude == infinity, jnp.uint64(exponent_mask), body)
  quiet = exponent_mask | (1 << (layout.precision - 2))
  body = jnp.where(magnitude > infinity, jnp.uint64(quiet), body)
  word = sign | body
  if fmt is formats.BFLOAT16:
    return lax.bitcast_convert_type(
        (word >> 16).astype(jnp.uint16), jnp.bfloat16
    )
  uint = {32: jnp.uint32, 16: jnp.uint16}[fmt.bits]
  return lax.bitcast_convert_type(word.astype(uint), jnp.dtype(fmt.numpy))


def widen(x: jax.Array) -> jax.Array:
  """Turns float32, bfloat16 or float16 into float64, exactly.

  A conversion instruction would read a subnormal as zero on a CPU under XLA;
  this one works on the bits. NaN keeps being NaN.
  """
  if x.dtype == jnp.float64:
    return x
  fmt = formats.of(x.dtype)
  layout = formats.FLOAT32 if fmt is formats.BFLOAT16 else fmt
  uint = {32: jnp.uint32, 16: jnp.uint16}[fmt.bits]
  word = lax.bitcast_convert_type(x, uint).astype(jnp.uint64)
  if fmt is formats.BFLOAT16:
    word = word << 16
  sign = (word >> (layout.bits - 1)) << 63
  body = word & jnp.uint64((1 << (layout.bits - 1)) - 1)
  shift = 53 - layout.precision
  rebias = (1023 + layout.min_exponent - 1) << 52
  normal = (body << shift) + jnp.uint64(rebias)
  quantum = layout.min_exponent - (layout.precision - 1)
  small = lax.bitcast_convert_type(
      body.astype(jnp.float64) * jnp.float64(2.0**quantum), jnp.uint64
  )
  first_normal = 1 << (layout.precision - 1)
  first_special = (
      (1 << (layout.bits - layout.precision)) - 1
  ) << (layout.precision - 1)
  out = jnp.where(body < jnp.uint64(first_normal), small, normal)
  out = jnp.where(
      body >= jnp.uint64(first_special),
      jnp.uint64(0x7FF << 52) | ((body - jnp.uint64(first_special)) << shift),
      out,
  )
  return lax.bitcast_convert_type(sign | out, jnp.float64)


def round_pack(y: jax.Array, dtype: str) -> jax.Array:
  """The twin of `round_oracle`: through float32, then to dtype, same bits."""
  if dtype == "float64":
    return y
  single = round_value(y, "float32")
  return pack(round_value(single, dtype) if dtype != "float32" else single,
              dtype)


def fence(x: jax.Array, zero: jax.Array) -> jax.Array:
  """Returns x, and keeps a compiler from contracting across it.

  XLA on a CPU turns a * b + c into one fused multiply-add, even across an
  optimization barrier (JAX 0.10.2). It cannot see through an exclusive or with
  an integer that is known only at run time, so fence(a * b, zero) + c rounds
  the product.

  Args:
    x: float32.
    zero: uint32 scalar, zero, an *argument* of the compiled function. A
      literal would be folded away.
  """
  bits = lax.bitcast_convert_type(x, jnp.uint32) ^ zero
  return lax.bitcast_convert_type(bits, jnp.float32)
