"""Quantised and made wide again: what eight or four bits leave of a value.

Along the last axis, block by block:

  amax  = max |x|
  scale = the smallest power of two s >= floor with amax <= largest * s
  q     = the number of the format nearest to x / scale, ties to even
  y     = R(q * scale)

  format  numbers                              largest  floor of the scale
  e4m3    FP8, three significand bits behind   448      2**-22: amax 1e-4
          the leading one
  e2m1    0, .5, 1, 1.5, 2, 3, 4, 6            6        2**-126

The scale is 2**ceil(log2(amax / largest)), taken exactly: no logarithm and no
division rounds. For 16-bit values the float32 quotient gives the same one. By
its choice |x / scale| <= largest, so nothing is clamped. x / scale is exact in
float64, so q has one rounding; q * scale is exact wherever the dtype reaches,
so R rounds only what overflows to infinity. A zero keeps its sign, a value that
vanishes leaves a zero of its sign. A block that holds a NaN or an infinity has
no scale and becomes NaN as a whole.

Source: the specification of DeepSeek-V4, section 2; formats as in
`block_scaled.py`.

Layer: numerics.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax.numerics import block_scaled
from moejax.numerics import rounding

# {format: (largest number, exponent of the smallest scale, significand bits,
# exponent of the smallest normal number)}.
_FORMATS = {"e4m3": (448.0, -22, 4, -6), "e2m1": (6.0, -126, 2, 0)}
FORMATS = tuple(_FORMATS)
_DTYPES = ("bfloat16", "float32")


def scale_exponents_oracle(amax: np.ndarray, code_format: str) -> np.ndarray:
  """The exponent of each block's scale: int, amax's shape; amax is finite."""
  largest, floor, _, _ = _FORMATS[code_format]
  # largest * 2**k >= amax = m * 2**e with m in [.5, 1).
  fraction, exponent = np.frexp(amax.astype(np.float64))
  top, top_exponent = np.frexp(largest)
  exponent = exponent - top_exponent + (fraction > top)
  return np.maximum(np.where(amax == 0, floor, exponent), floor)


def simulate_oracle(
    x: np.ndarray, code_format: str, block: int
) -> np.ndarray:
  """Quantises and makes wide again; see the top of this file.

  Args:
    x: [..., width], bfloat16 or float32.
    code_format: "e4m3" or "e2m1".
    block: Neighbours of the last axis that share a scale; divides width.

  Returns:
    The same shape and dtype. One rounding to the format, and R.

  Raises:
    ValueError: the format is unknown or the width is no multiple of block.
    NotImplementedError: another dtype: float16 does not reach as far as the
      products.
  """
  _check(x, code_format, block)
  with np.errstate(invalid="ignore"):  # Signalling NaNs are legal inputs.
    wide = x.astype(np.float64).reshape(*x.shape[:-1], -1, block)
  magnitude = np.abs(wide)
  amax = magnitude.max(-1, keepdims=True)
  finite = np.isfinite(amax)
  exponents = scale_exponents_oracle(np.where(finite, amax, 0.0), code_format)
  with np.errstate(invalid="ignore"):
    near = _nearest_oracle(np.ldexp(magnitude, -exponents), code_format)
  out = np.copysign(np.ldexp(near, exponents), wide)
  out = np.where(finite, out, np.nan)
  return rounding.round_oracle(out, x.dtype.name).reshape(x.shape)


def _nearest_oracle(magnitude: np.ndarray, code_format: str) -> np.ndarray:
  """The nearest number of a format: its codes in order, ties to the even."""
  numbers = block_scaled.code_values(code_format)
  numbers = numbers[: len(numbers) // 2]
  numbers = numbers[np.isfinite(numbers)]
  middle = (numbers[1:] + numbers[:-1]) / 2
  below = np.searchsorted(middle, magnitude, side="left")
  above = np.searchsorted(middle, magnitude, side="right")
  return numbers[np.where(below % 2 == 0, below, above)]


def simulate(x: jax.Array, code_format: str, block: int) -> jax.Array:
  """The twin of `simulate_oracle`: same arguments, same bits.

  Needs `jax_enable_x64`. Values travel as float64 and never lie below 2**-300,
  so that no backend flushes one.
  """
  _check(x, code_format, block)
  return _simulate(x, code_format, block)


@functools.partial(jax.jit, static_argnames=("code_format", "block"))
def _simulate(x, code_format, block):
  largest, floor, precision, smallest = _FORMATS[code_format]
  wide = rounding.widen(x).reshape(*x.shape[:-1], -1, block)
  word = lax.bitcast_convert_type(wide, jnp.uint64)
  sign = word & jnp.uint64(1 << 63)
  word = word & jnp.uint64((1 << 63) - 1)
  magnitude = lax.bitcast_convert_type(word, jnp.float64)
  # On the bits, so that NaN lies above infinity.
  amax = jnp.max(word.astype(jnp.int64), axis=-1, keepdims=True)
  finite = amax < jnp.int64(0x7FF << 52)
  # amax = m * 2**e with m in [1, 2) against largest = t * 2**f.
  bits = int(np.float64(largest).view(np.int64))
  rest = (1 << 52) - 1
  power = (amax >> 52) - (bits >> 52)
  power = power + ((amax & rest) > (bits & rest)).astype(jnp.int64)
  power = jnp.maximum(power, floor)
  scaled = magnitude * _power_of_two(-power)
  place = lax.bitcast_convert_type(scaled, jnp.int64) >> 52
  place = jnp.maximum(place - 1023, smallest) - (precision - 1)
  near = jnp.round(scaled * _power_of_two(-place)) * _power_of_two(place)
  out = near * _power_of_two(power)
  out = lax.bitcast_convert_type(
      lax.bitcast_convert_type(out, jnp.uint64) | sign, jnp.float64
  )
  out = jnp.where(finite, out, jnp.float64(jnp.nan))
  return rounding.round_pack(out.reshape(x.shape), x.dtype.name)


def _power_of_two(exponent: jax.Array) -> jax.Array:
  """2**exponent of int64 exponents that a normal float64 has; by its bits."""
  exponent = jnp.clip(exponent, -1022, 1023)
  return lax.bitcast_convert_type((exponent + 1023) << 52, jnp.float64)


def _check(x, code_format: str, block: int) -> None:
  if code_format not in _FORMATS:
    raise ValueError(
        f"code_format={code_format!r} is not one of {', '.join(_FORMATS)}."
    )
  if x.dtype.name not in _DTYPES:
    raise NotImplementedError(
        f"quantisation of {x.dtype.name} is not covered, only of"
        f" {' and '.join(_DTYPES)}."
    )
  if block < 1 or x.shape[-1] % block:
    raise ValueError(
        f"a width of {x.shape[-1]} is no multiple of blocks of {block}."
    )
