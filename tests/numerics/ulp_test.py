"""Distances in representable steps: across zero, to infinity, around NaN.

Needs no accelerator.
"""


from absl.testing import absltest
from absl.testing import parameterized
import hypothesis as hp
import hypothesis.strategies as hps
import ml_dtypes
import numpy as np

from moejax.numerics import formats
from moejax.numerics import ulp as lib
from tests import bits

_DTYPES = ("float32", "bfloat16", "float16")


def _words(dtype: str, *words: int) -> np.ndarray:
  fmt = formats.of(dtype)
  return np.array(words, fmt.uint).view(fmt.numpy)


class OrdinalTest(parameterized.TestCase):

  @parameterized.parameters("bfloat16", "float16")
  def test_grows_by_one_from_each_number_to_the_next(self, dtype):
    x = _words(dtype, *range(1 << 16))
    with np.errstate(invalid="ignore"):
      x = x[np.isfinite(x)]
    order = np.argsort(x.astype(np.float64), kind="stable")
    steps = np.diff(lib.ordinal(x[order]))
    zeros = x[order].astype(np.float64) == 0
    expected = np.where(zeros[1:] & zeros[:-1], 0, 1)  # -0 and +0 are one.
    bits.assert_same_bits(steps, expected)

  def test_zeros_share_the_ordinal_zero(self):
    bits.assert_same_bits(
        lib.ordinal(np.float32([0.0, -0.0])), np.int64([0, 0])
    )


class DistanceTest(parameterized.TestCase):

  @parameterized.parameters(*_DTYPES)
  def test_counts_across_zero(self, dtype):
    top = 1 << (formats.of(dtype).bits - 1)
    a = _words(dtype, 0, 0, 1, top | 1, top | 2, 5)
    b = _words(dtype, top, 1, top | 1, 3, 0, 5)
    bits.assert_same_bits(
        lib.distance_ulp(a, b), np.int64([0, 1, 2, 4, 2, 0])
    )

  @parameterized.parameters(*_DTYPES)
  def test_infinity_follows_the_largest_number(self, dtype):
    kind = formats.of(dtype).numpy
    largest = ml_dtypes.finfo(kind).max
    a = np.array([largest, -largest, np.inf], kind)
    b = np.array([np.inf, -np.inf, np.inf], kind)
    bits.assert_same_bits(lib.distance_ulp(a, b), np.int64([1, 1, 0]))

  @parameterized.parameters(*_DTYPES)
  def test_nan_is_zero_from_nan_and_at_no_distance_from_a_number(self, dtype):
    kind = formats.of(dtype).numpy
    a = np.array([np.nan, np.nan, 1, np.inf], kind)
    b = np.array([-np.nan, 1, np.nan, np.nan], kind)
    bits.assert_same_bits(lib.distance_ulp(a, b), np.int64([0, -1, -1, -1]))

  def test_the_ends_of_float32_are_apart_by_all_its_numbers(self):
    a, b = np.float32([-np.inf]), np.float32([np.inf])
    bits.assert_same_bits(lib.distance_ulp(a, b), np.int64([2 * 0x7F800000]))

  @hp.given(
      a=hps.floats(width=32, allow_nan=False),
      b=hps.floats(width=32, allow_nan=False),
  )
  def test_is_symmetric_and_zero_for_equal_values_only(self, a, b):
    a, b = np.float32([a]), np.float32([b])
    distance = lib.distance_ulp(a, b)
    bits.assert_same_bits(distance, lib.distance_ulp(b, a))
    self.assertEqual(distance.item() == 0, a.item() == b.item())

  def test_keeps_the_shape(self):
    for shape in ((), (0,), (2, 3)):
      x = np.ones(shape, np.float32)
      self.assertEqual(lib.distance_ulp(x, x).shape, shape)

  def test_a_transposed_view_is_read_in_its_own_order(self):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y = np.ascontiguousarray(x.T)
    bits.assert_same_bits(lib.distance_ulp(x.T, y), np.zeros((3, 2), np.int64))

  def test_refuses_other_dtypes_shapes_and_float64(self):
    x = np.ones(3, np.float32)
    with self.assertRaisesRegex(ValueError, "float32.*float16"):
      lib.distance_ulp(x, x.astype(np.float16))
    with self.assertRaisesRegex(ValueError, r"no distance .*\(3,\).*\(1,\)"):
      lib.distance_ulp(x, x[:1])
    with self.assertRaisesRegex(ValueError, "16- and 32-bit"):
      lib.distance_ulp(x.astype(np.float64), x.astype(np.float64))


class SpacingTest(parameterized.TestCase):

  @parameterized.parameters(*_DTYPES)
  def test_is_the_distance_to_the_next_larger_number(self, dtype):
    fmt = formats.of(dtype)
    last = (0xFF << 7 if dtype == "bfloat16" else 0x1F << 10) - 1
    words = np.arange(1, last) if fmt.bits == 16 else np.concatenate([
        np.arange(1, 200), np.arange(0x7FFF00, 0x800100),
        np.arange(0x3F7FFF00, 0x3F800100), np.arange(0x7F7FFF00, 0x7F7FFFFE),
    ])
    x = words.astype(fmt.uint).view(fmt.numpy).astype(np.float64)
    above = (words + 1).astype(fmt.uint).view(fmt.numpy).astype(np.float64)
    for sign in (1, -1):
      bits.assert_same_bits(lib.spacing(sign * x, dtype), above - x)

  @parameterized.parameters(*_DTYPES)
  def test_around_zero_is_the_smallest_subnormal(self, dtype):
    fmt = formats.of(dtype)
    smallest = 2.0 ** (fmt.min_exponent - (fmt.precision - 1))
    bits.assert_same_bits(
        lib.spacing(np.float64([0.0, -0.0]), dtype),
        np.float64([smallest, smallest]),
    )


if __name__ == "__main__":
  absltest.main()
