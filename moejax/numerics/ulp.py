"""Distance between floats, in representable steps.

Layer: numerics.
"""

import numpy as np

from moejax.numerics import formats


def ordinal(x: np.ndarray) -> np.ndarray:
  """Maps floats to int64 such that neighbours differ by one; -0 equals +0."""
  fmt = formats.of(x.dtype)
  bits = np.array(x, order="C").view(fmt.uint).astype(np.int64)
  magnitude = bits & ((1 << (fmt.bits - 1)) - 1)
  return np.where(bits >> (fmt.bits - 1), -magnitude, magnitude)


def distance_ulp(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """The number of representable steps from a to b, as int64.

  NaN against NaN is 0 here (bits are a fingerprint's business), NaN against a
  number is -1: there is no number of steps.

  Raises:
    ValueError: dtypes or shapes differ, or the dtype is float64, whose steps
      do not fit the result.
  """
  if a.dtype != b.dtype or a.shape != b.shape:
    raise ValueError(
        f"no distance between {a.dtype}{a.shape} and {b.dtype}{b.shape}."
    )
  if formats.of(a.dtype) is formats.FLOAT64:
    raise ValueError("distance_ulp covers 16- and 32-bit floats.")
  steps = np.abs(ordinal(a) - ordinal(b))
  nan_a, nan_b = np.isnan(a), np.isnan(b)
  return np.where(nan_a & nan_b, 0, np.where(nan_a | nan_b, -1, steps))


def spacing(x: np.ndarray, dtype: str) -> np.ndarray:
  """The distance between neighbours of that dtype around |x|, as float64.

  The larger of the two sides where x is a power of two; the subnormal spacing
  below the normal range. NaN for what is not finite.
  """
  fmt = formats.of(dtype)
  x = np.asarray(x, np.float64)
  _, exponent = np.frexp(np.abs(x))
  lowest = fmt.min_exponent - (fmt.precision - 1)
  step = np.maximum(exponent - fmt.precision, lowest)
  step = np.where(x == 0, lowest, step)  # frexp gives zero the exponent 0.
  return np.where(np.isfinite(x), np.ldexp(1.0, step), np.nan)
