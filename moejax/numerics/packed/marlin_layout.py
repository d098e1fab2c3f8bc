"""How vLLM's Marlin kernel wants an AWQ weight laid out.

The layout has no part in the numerics; the bridge to the real kernel needs it.
A weight is cut into tiles of 16 rows by 64 columns, 128 words each, columns
fastest. Word 4 * lane + g of a tile belongs to lane 0..31 and the 16-column
group g; its nibble m holds

  row     2 * (lane % 4) + _ROW[m]
  column  16 * g + lane // 4 + _COLUMN[m]

Layer: numerics.
"""

import numpy as np

from moejax.numerics.packed import awq_format

_ROW = np.array((0, 8, 0, 8, 1, 9, 1, 9))
_COLUMN = np.array((0, 0, 8, 8, 0, 0, 8, 8))


def repack(codes: np.ndarray) -> np.ndarray:
  """Returns [k / 16, 2 n] int32 words of [k, n] codes.

  Raises:
    ValueError: k is no multiple of 16 or n none of 64.

  Source: specification of the packed-AWQ MoE, section 2.1.
  """
  k, n = codes.shape
  if k % 16 or n % 64:
    raise ValueError(f"codes {codes.shape} do not fall into tiles of 16 by 64.")
  tiles = codes.reshape(k // 16, 16, n // 64, 64).transpose(0, 2, 1, 3)
  lane, group, m = np.ogrid[:32, :4, :8]
  nibbles = tiles[
      :, :, 2 * (lane % 4) + _ROW[m], 16 * group + lane // 4 + _COLUMN[m]
  ]
  words = awq_format.pack(nibbles, tuple(range(8)))
  return words.reshape(k // 16, 2 * n)


def permute_scales(scales: np.ndarray) -> np.ndarray:
  """Returns scales with column i + 8 j of each 64 at position 8 i + j."""
  groups, n = scales.shape
  _check_columns(n)
  eights = scales.reshape(groups, n // 64, 8, 8)
  return np.ascontiguousarray(eights.swapaxes(2, 3)).reshape(groups, n)


def repack_zeros(zeros: np.ndarray) -> np.ndarray:
  """Returns [group, n / 8] int32; nibble m of word 8 c + i is column
  64 c + i + 8 * ORDER[m]."""
  permuted = permute_scales(zeros)
  return awq_format.pack(permuted)


def _check_columns(n: int) -> None:
  if n % 64:
    raise ValueError(f"{n} columns do not fall into runs of 64.")
