"""AWQ tensors decoded a second time, from the format's description alone.

Shares no code with the project: columns by the inverse table of nibbles, the
rounding by float64 integers. So equal bits mean that two readings agree.
"""

import ml_dtypes
import numpy as np

# Column 8 c + j lies in nibble _NIBBLE[j] of word c.
_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)
_SIGNIFICAND = {"bfloat16": (8, -133), "float16": (11, -24)}
_TYPE = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def codes(words: np.ndarray) -> np.ndarray:
  """[rows, words] int32 to [rows, 8 * words] of 0..15."""
  unsigned = words.astype(np.int64) & 0xFFFFFFFF
  out = np.empty((words.shape[0], 8 * words.shape[1]), np.int64)
  for column, nibble in enumerate(_NIBBLE):
    out[:, column::8] = unsigned // 16**nibble % 16
  return out


def weight(qweight, qzeros, scales, dtype: str) -> np.ndarray:
  """Returns [k, n] in dtype: one rounding of each exact product.

  The scales must have that dtype already.
  """
  group = np.arange(len(qweight)) // (len(qweight) // len(scales))
  difference = codes(qweight) - codes(qzeros)[group]
  exact = difference * scales.astype(np.float64)[group]
  precision, least = _SIGNIFICAND[dtype]
  _, exponent = np.frexp(exact)
  quantum = np.maximum(exponent - precision, least).astype(np.int32)
  rounded = np.ldexp(np.rint(np.ldexp(exact, -quantum)), quantum)
  return rounded.astype(np.float32).astype(_TYPE[dtype])
