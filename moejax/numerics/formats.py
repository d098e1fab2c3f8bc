"""The float formats that a contract can name, as numbers.

Rounding, widening, error bounds and distances all need the same few facts of a
format; they stand here once.

Layer: numerics.
"""

import dataclasses

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
  """A binary float format.

  Attributes:
    name: The dtype's full name.
    precision: Significand bits, the hidden one included.
    min_exponent: Exponent of the smallest normal number, 2**min_exponent.
    max_exponent: Exponent of the largest finite number's leading bit.
    bits: Width of one element.
    numpy: The NumPy dtype.
  """

  name: str
  precision: int
  min_exponent: int
  max_exponent: int
  bits: int
  numpy: np.dtype

  @property
  def uint(self) -> np.dtype:
    """The unsigned integer dtype of the same width."""
    return np.dtype(f"u{self.bits // 8}")

  @property
  def unit_roundoff(self) -> float:
    """Half the distance from 1 to the next larger number."""
    return 2.0**-self.precision


FLOAT32 = Format("float32", 24, -126, 127, 32, np.dtype(np.float32))
BFLOAT16 = Format("bfloat16", 8, -126, 127, 16, np.dtype(ml_dtypes.bfloat16))
FLOAT16 = Format("float16", 11, -14, 15, 16, np.dtype(np.float16))
FLOAT64 = Format("float64", 53, -1022, 1023, 64, np.dtype(np.float64))

_BY_NAME = {f.name: f for f in (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)}


def of(dtype) -> Format:
  """Returns the format of a dtype or of a dtype's name.

  Raises:
    ValueError: no contract of this project names that dtype.
  """
  name = np.dtype(dtype).name if not isinstance(dtype, str) else dtype
  if name not in _BY_NAME:
    raise ValueError(f"dtype {name!r} is not one of {', '.join(_BY_NAME)}.")
  return _BY_NAME[name]


def is_float(dtype) -> bool:
  """Whether a dtype is one of the formats here."""
  return np.dtype(dtype).name in _BY_NAME
