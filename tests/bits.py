"""The one assertion behind every claim of "same bits".

chex and numpy.testing accept -0 for +0, NaN for NaN or a wider dtype; bits
decide here.
"""

import numpy as np


def assert_same_bits(actual, expected):
  """Fails unless both arrays have the same shape, dtype and bytes."""
  actual, expected = np.asarray(actual), np.asarray(expected)
  if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
    raise AssertionError(
        f"{actual.dtype}{actual.shape} is not {expected.dtype}{expected.shape}"
    )
  word = f"u{actual.dtype.itemsize}"
  left = np.ascontiguousarray(actual).reshape(-1).view(word)
  right = np.ascontiguousarray(expected).reshape(-1).view(word)
  differs = left != right
  if differs.any():
    first = np.unravel_index(int(differs.argmax()), actual.shape)
    raise AssertionError(
        f"{int(differs.sum())} of {differs.size} elements differ; first at"
        f" {tuple(map(int, first))}: {actual[first]} vs {expected[first]}"
        f" ({int(left[differs.argmax()]):#x} vs"
        f" {int(right[differs.argmax()]):#x})"
    )
