"""Weights of eight and four bits with a power of two per block, made wide.

  format  code                 scale covers          codes on disk
  E4M3    s eeee mmm, bias 7   128 rows x 128 cols   one a byte
  E2M1    s ee m, bias 1       1 row x 32 cols       two a byte
  E8M0    eeeeeeee, bias 127   is the scale          one a byte

E4M3 has no infinity: S.1111.111 is NaN, 448 is the largest number. E2M1 has
neither; its numbers are 0, .5, 1, 1.5, 2, 3, 4, 6 with both signs. E8M0 is
2**(code - 127), and 255 is NaN. The low nibble of an E2M1 byte is the even
column.

A weight is code * scale. The product is exact in float32 unless it overflows
(four significand bits, smallest 2**-136), so the only rounding is the one to
the wanted dtype, nearest even, subnormals kept; it is exact in bfloat16 too
from 2**-133 on. There are at most 65,536 products: they are tabulated once, and
a weight is looked up by the two bytes that make it.

Source: the Open Compute Project's 8-bit floating point and microscaling
specifications.

Layer: numerics.
"""

import functools

import numpy as np

from moejax.numerics import rounding

FP8_BLOCK = 128
FP4_BLOCK = 32

_NAN_SCALE = 255
# Rows at a time, so that the table's indices stay small beside the result.
_ROWS = 256


def fp8_weight(
    codes: np.ndarray, scales: np.ndarray, dtype: str
) -> np.ndarray:
  """Returns E4M3 codes times their scales.

  out[i, j] = round(e4m3(codes[i, j]) * 2**(scales[i / 128, j / 128] - 127)).

  Args:
    codes: [rows, columns], uint8 or float8_e4m3fn.
    scales: [ceil(rows / 128), ceil(columns / 128)], uint8 or float8_e8m0fnu.
    dtype: "bfloat16", "float32" or "float16", of the result.

  Returns:
    [rows, columns]. One rounding, nearest even; infinity where the product
    lies beyond the dtype, NaN where the code is NaN.

  Raises:
    ValueError: another shape or width, or a scale that is NaN.
  """
  codes, scales = _bytes("codes", codes), _bytes("scales", scales)
  rows, columns = codes.shape
  blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
  _check_scales(scales, blocks, codes.shape, f"{FP8_BLOCK} x {FP8_BLOCK}")
  table = _products("e4m3", dtype)
  out = np.empty(codes.shape, table.dtype)
  for start in range(0, rows, FP8_BLOCK):
    rows_of = slice(start, start + FP8_BLOCK)
    scale = scales[start // FP8_BLOCK].astype(np.uint16) << 8
    scale = np.repeat(scale, FP8_BLOCK)[:columns]
    np.take(table, scale | codes[rows_of], out=out[rows_of], mode="clip")
  return out


def fp4_weight(
    packed: np.ndarray, scales: np.ndarray, dtype: str
) -> np.ndarray:
  """Returns E2M1 codes, two a byte, times their scales.

  out[i, j] = round(e2m1(code[i, j]) * 2**(scales[i, j / 32] - 127)), where
  code[i, 2 m] is the low nibble of packed[i, m] and code[i, 2 m + 1] the high.

  Args:
    packed: [rows, columns / 2], int8 or uint8.
    scales: [rows, columns / 32], uint8 or float8_e8m0fnu.
    dtype: "bfloat16", "float32" or "float16", of the result.

  Returns:
    [rows, columns]. One rounding, nearest even; infinity where the product
    lies beyond the dtype.

  Raises:
    ValueError: another shape or width, or a scale that is NaN.
  """
  packed, scales = _bytes("packed", packed), _bytes("scales", scales)
  rows, columns = packed.shape[0], 2 * packed.shape[1]
  if columns % FP4_BLOCK:
    raise ValueError(f"{columns} columns are no blocks of {FP4_BLOCK}.")
  blocks = (rows, columns // FP4_BLOCK)
  _check_scales(scales, blocks, (rows, columns), f"1 x {FP4_BLOCK}")
  table = _products("e2m1", dtype)
  out = np.empty((rows, columns), table.dtype)
  for start in range(0, rows, _ROWS):
    rows_of = slice(start, start + _ROWS)
    scale = np.repeat(
        scales[rows_of].astype(np.uint16) << 4, FP4_BLOCK // 2, axis=1
    )
    even = scale | (packed[rows_of] & np.uint8(15))
    odd = scale | (packed[rows_of] >> np.uint8(4))
    out[rows_of, 0::2] = np.take(table, even)
    out[rows_of, 1::2] = np.take(table, odd)
  return out


@functools.cache
def _products(code_format: str, dtype: str) -> np.ndarray:
  """Returns every product, at index scale * number of codes + code."""
  codes = code_values(code_format)
  scales = np.ldexp(1.0, np.arange(256) - 127)
  scales[_NAN_SCALE] = np.nan
  # Exact in float64; round_oracle passes through float32, exact as well.
  table = rounding.round_oracle(scales[:, None] * codes, dtype).reshape(-1)
  table.flags.writeable = False
  return table


def code_values(code_format: str) -> np.ndarray:
  """Returns the float64 numbers of all codes of "e4m3" or "e2m1", in order."""
  exponent, mantissa, bias = {"e4m3": (4, 3, 7), "e2m1": (2, 1, 1)}[code_format]
  code = np.arange(1 << (1 + exponent + mantissa))
  fraction = code & ((1 << mantissa) - 1)
  power = (code >> mantissa) & ((1 << exponent) - 1)
  hidden = np.where(power > 0, 1 << mantissa, 0)
  magnitude = np.ldexp(
      (hidden | fraction).astype(np.float64),
      np.maximum(power, 1) - bias - mantissa,
  )
  values = np.where(code >> (exponent + mantissa), -magnitude, magnitude)
  if code_format == "e4m3":
    values[[0x7F, 0xFF]] = np.nan
  return values


def _bytes(name: str, array: np.ndarray) -> np.ndarray:
  """Returns a matrix of one-byte elements as uint8; bits, not values."""
  array = np.ascontiguousarray(array)
  if array.ndim != 2 or array.dtype.itemsize != 1:
    raise ValueError(
        f"{name} are {array.dtype}{array.shape}, not a matrix of bytes."
    )
  return array.view(np.uint8)


def _check_scales(scales, blocks, shape, block: str) -> None:
  """Refuses scales of another block and scales that are no number."""
  if scales.shape != blocks:
    raise ValueError(
        f"scales {scales.shape} of weights {shape} are not {blocks}, one for"
        f" each block of {block}."
    )
  nan = scales == _NAN_SCALE
  if nan.any():
    first = tuple(map(int, np.unravel_index(int(nan.argmax()), scales.shape)))
    raise ValueError(
        f"{int(nan.sum())} scales are NaN (code {_NAN_SCALE}); first at"
        f" {first}."
    )
