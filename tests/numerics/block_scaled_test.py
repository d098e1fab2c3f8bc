"""Block-scaled weights against a decoder written from the bit layout.

The decoder here makes exact fractions out of strings of bits and rounds them
by comparing distances; the library tabulates float64 products. Needs no
accelerator.
"""

import fractions

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import numpy as np

from moejax.numerics import block_scaled as lib
from moejax.numerics import formats
from tests import bits

_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def _e4m3(code: int) -> tuple[int, fractions.Fraction | None]:
  """(sign, magnitude) from the eight bits; None for NaN."""
  word = f"{code:08b}"
  sign, power, fraction = int(word[0]), int(word[1:5], 2), int(word[5:], 2)
  if word[1:] == "1111111":
    return sign, None
  if power == 0:
    return sign, fractions.Fraction(fraction, 8) * fractions.Fraction(1, 64)
  significand = 1 + fractions.Fraction(fraction, 8)
  return sign, significand * fractions.Fraction(2) ** (power - 7)


def _e2m1(code: int) -> tuple[int, fractions.Fraction]:
  return code >> 3, fractions.Fraction(_E2M1[code & 7])


def _nearest(sign: int, exact: fractions.Fraction, dtype: str) -> int | None:
  """Bits of the nearest value, the even one of two; None if not finite."""
  fmt = formats.of(dtype)
  # All denominators are powers of two, so this is floor(log2(exact)).
  power = exact.numerator.bit_length() - exact.denominator.bit_length()
  power = max(power, fmt.min_exponent) if exact else fmt.min_exponent
  quantum = fractions.Fraction(2) ** (power - fmt.precision + 1)
  multiple = round(exact / quantum)  # Python rounds a fraction half to even.
  word = multiple + (power - fmt.min_exponent) * (1 << (fmt.precision - 1))
  infinity = (fmt.max_exponent - fmt.min_exponent + 2) << (fmt.precision - 1)
  return None if word >= infinity else sign << (fmt.bits - 1) | word


def _expected(decode, num_codes: int, dtype: str) -> dict[tuple, int]:
  """{(scale, code): bits} of every product that is finite."""
  out = {}
  for scale in range(255):
    factor = fractions.Fraction(2) ** (scale - 127)
    for code in range(num_codes):
      sign, magnitude = decode(code)
      word = None
      if magnitude is not None:
        word = _nearest(sign, magnitude * factor, dtype)
      if word is not None:
        out[scale, code] = word
  return out


def _assert_words(actual: np.ndarray, expected: dict[tuple, int]):
  """Compares [scale, code] values with the finite ones, bit for bit."""
  fmt = formats.of(actual.dtype)
  words = actual.view(fmt.uint)
  where = tuple(np.array(list(expected)).T)
  bits.assert_same_bits(
      words[where], np.array(list(expected.values()), fmt.uint)
  )
  finite = np.zeros(actual.shape, bool)
  finite[where] = True
  np.testing.assert_array_equal(np.isfinite(actual), finite)


class EveryCodeTest(parameterized.TestCase):

  @parameterized.parameters(("bfloat16", 64_210), ("float32", 64_210))
  def test_e4m3_under_every_scale(self, dtype, finite):
    # One block of 128 x 128 holds all codes; one block row for each scale.
    codes = np.tile(np.arange(256, dtype=np.uint8), (128 * 255, 1))
    scales = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 2, axis=1)
    out = lib.fp8_weight(codes, scales, dtype)[::128]
    expected = _expected(_e4m3, 256, dtype)
    self.assertEqual(len(expected), finite)
    _assert_words(out, expected)

  @parameterized.parameters(("bfloat16", 4_068), ("float32", 4_068))
  def test_e2m1_under_every_scale(self, dtype, finite):
    packed = np.arange(16, dtype=np.uint8).reshape(1, 16) | 0xA0
    scales = np.arange(255, dtype=np.uint8)[:, None]
    out = lib.fp4_weight(
        np.tile(packed, (255, 1)).view(np.int8), scales, dtype
    )
    expected = _expected(_e2m1, 16, dtype)
    self.assertEqual(len(expected), finite)
    _assert_words(np.ascontiguousarray(out[:, 0::2]), expected)
    ten = {k: v for k, v in expected.items() if k[1] == 10}
    np.testing.assert_array_equal(
        np.ascontiguousarray(out[:, 1::2]).view(formats.of(dtype).uint),
        np.array([[ten[s, 10]] * 16 for s in range(255)]),
    )

  def test_the_rounding_to_bfloat16_is_to_the_nearest_even(self):
    # 2**-127 * 15 * 2**-9 lies between bfloat16's subnormals; 11 ties down.
    out = lib.fp8_weight(
        np.uint8([[7, 3, 9, 0x87]]), np.uint8([[0]]), "bfloat16"
    )
    self.assertEqual(out.view(np.uint16).tolist(), [[1, 0, 1, 0x8001]])

  def test_views_of_the_same_bytes_are_the_same_weights(self):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 127, (130, 70), dtype=np.uint8)
    scales = rng.integers(100, 140, (2, 1), dtype=np.uint8)
    bits.assert_same_bits(
        lib.fp8_weight(codes, scales, "bfloat16"),
        lib.fp8_weight(
            codes.view(ml_dtypes.float8_e4m3fn),
            scales.view(ml_dtypes.float8_e8m0fnu),
            "bfloat16",
        ),
    )


class BlockTest(parameterized.TestCase):

  @parameterized.parameters((128, 128), (256, 384), (130, 200), (1, 1))
  def test_a_scale_covers_128_rows_and_columns(self, rows, columns):
    scales = np.arange(-(-rows // 128) * -(-columns // 128), dtype=np.uint8)
    scales = scales.reshape(-(-rows // 128), -1) + np.uint8(120)
    one = np.full((rows, columns), 0x38, np.uint8)
    out = lib.fp8_weight(one, scales, "float32")
    for i in range(0, rows, 43):
      for j in range(0, columns, 43):
        self.assertEqual(
            out[i, j], 2.0 ** (int(scales[i // 128, j // 128]) - 127)
        )

  def test_a_scale_covers_32_columns_of_one_row(self):
    scales = np.arange(300 * 3, dtype=np.uint16).reshape(300, 3) % 200
    scales = (scales + 20).astype(np.uint8)
    out = lib.fp4_weight(np.full((300, 48), 0x22, np.int8), scales, "float32")
    for i in range(0, 300, 7):
      for j in range(96):
        self.assertEqual(out[i, j], 2.0 ** (int(scales[i, j // 32]) - 127))


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters((8, 8), (1, 2), (2, 1), (2, 2, 1))
  def test_refuses_scales_of_another_block(self, *shape):
    with self.assertRaisesRegex(ValueError, r"scales"):
      lib.fp8_weight(
          np.zeros((256, 256), np.uint8), np.zeros(shape, np.uint8), "float32"
      )

  def test_names_shapes_and_block(self):
    with self.assertRaisesRegex(
        ValueError, r"\(8, 8\) of weights \(256, 256\) are not \(2, 2\).*128"
    ):
      lib.fp8_weight(
          np.zeros((256, 256), np.uint8), np.zeros((8, 8), np.uint8), "float32"
      )
    with self.assertRaisesRegex(
        ValueError, r"\(4, 4\) of weights \(4, 64\) are not \(4, 2\).*1 x 32"
    ):
      lib.fp4_weight(
          np.zeros((4, 32), np.int8), np.zeros((4, 4), np.uint8), "float32"
      )

  def test_refuses_columns_that_are_no_blocks(self):
    with self.assertRaisesRegex(ValueError, "40 columns"):
      lib.fp4_weight(
          np.zeros((4, 20), np.int8), np.zeros((4, 1), np.uint8), "float32"
      )

  def test_refuses_wider_elements(self):
    with self.assertRaisesRegex(ValueError, r"codes are int16\(4, 4\)"):
      lib.fp8_weight(
          np.zeros((4, 4), np.int16), np.zeros((1, 1), np.uint8), "float32"
      )

  def test_refuses_nan_scales_with_their_place(self):
    scales = np.uint8([[0, 1, 255], [255, 2, 3]])
    with self.assertRaisesRegex(ValueError, r"2 scales are NaN.*\(0, 2\)"):
      lib.fp4_weight(np.zeros((2, 48), np.int8), scales, "float32")
    with self.assertRaisesRegex(ValueError, r"2 scales are NaN.*\(0, 2\)"):
      lib.fp8_weight(np.zeros((200, 300), np.uint8), scales, "float32")


if __name__ == "__main__":
  absltest.main()
