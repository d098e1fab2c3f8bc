"""Simulated quantisation: over every code and every bfloat16 value.

The casts of ml_dtypes and rationals are the witnesses. Needs no accelerator.
"""

import fractions

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.numerics import block_scaled
from moejax.numerics import quantization_simulation as lib
from tests import bits

_LARGEST = {"e4m3": 448, "e2m1": 6}
_FLOOR = {"e4m3": -22, "e2m1": -126}
_CAST = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
_EVERY = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)


def _scale_exponent(amax: float, code_format: str) -> int:
  """The smallest k >= floor with largest * 2**k >= amax, in rationals."""
  exponent, exact = _FLOOR[code_format], fractions.Fraction(amax)
  while _LARGEST[code_format] * fractions.Fraction(2) ** exponent < exact:
    exponent += 1
  return exponent


def _numbers(code_format: str) -> np.ndarray:
  values = block_scaled.code_values(code_format)
  return values[np.isfinite(values)]


def _beside(values: np.ndarray, companion: float) -> np.ndarray:
  """Blocks of two: each value, and the one that decides its scale."""
  other = np.full(values.shape, companion).astype(values.dtype)
  return np.stack([values, other], -1)


def _boundaries(code_format: str) -> np.ndarray:
  """float32 numbers of a format, their midpoints, and the neighbours of all."""
  numbers = np.sort(_numbers(code_format))
  places = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
  places = places.astype(np.float32)
  infinity = np.float32(np.inf)
  return np.concatenate([
      places, np.nextafter(places, infinity), np.nextafter(places, -infinity)
  ])


class OracleTest(parameterized.TestCase):

  @parameterized.product(
      code_format=lib.FORMATS, dtype=("bfloat16", "float32")
  )
  def test_a_number_of_the_format_times_its_scale_is_kept(
      self, code_format, dtype
  ):
    numbers = _numbers(code_format)
    for exponent in range(_FLOOR[code_format], 118, 7):
      x = np.ldexp(numbers, exponent).astype(dtype)
      x = _beside(x, np.ldexp(float(_LARGEST[code_format]), exponent))
      bits.assert_same_bits(lib.simulate_oracle(x, code_format, 2), x)

  @parameterized.product(
      code_format=lib.FORMATS,
      companion=(1e-30, 1e-5, 1.0, 5.0, 6.0, 6.03125, 448.0, 450.0, 1e30),
  )
  def test_every_bfloat16_value_rounds_as_a_cast_does(
      self, code_format, companion
  ):
    companion = float(np.float32(companion).astype(ml_dtypes.bfloat16))
    wide = _EVERY.astype(np.float32)
    x = _EVERY[np.abs(wide) <= companion]
    exponent = _scale_exponent(companion, code_format)
    scaled = np.ldexp(x.astype(np.float64), -exponent).astype(np.float32)
    code = scaled.astype(_CAST[code_format]).astype(np.float64)
    expected = np.ldexp(code, exponent).astype(np.float32)
    found = lib.simulate_oracle(_beside(x, companion), code_format, 2)[:, 0]
    bits.assert_same_bits(found, expected.astype(ml_dtypes.bfloat16))

  @parameterized.parameters(*lib.FORMATS)
  def test_every_scale_is_the_smallest_power_that_covers(self, code_format):
    positive = _EVERY[: 0x7F80].astype(np.float64)
    found = lib.scale_exponents_oracle(positive, code_format)
    largest = _LARGEST[code_format]
    covers = np.ldexp(float(largest), found) >= positive
    smaller = np.ldexp(float(largest), found - 1) < positive
    self.assertTrue(covers.all())
    self.assertTrue((smaller | (found == _FLOOR[code_format])).all())
    self.assertEqual(int(found.min()), _FLOOR[code_format])

  @parameterized.parameters(*lib.FORMATS)
  def test_a_float32_quotient_gives_16_bit_values_the_same_scale(
      self, code_format
  ):
    positive = _EVERY[1:0x7F80].astype(np.float32)
    largest = np.float32(_LARGEST[code_format])
    floor = np.ldexp(largest, _FLOOR[code_format])
    for quotient in (
        np.maximum(positive, floor) / largest,
        np.maximum(positive, floor) * (np.float32(1) / largest),
    ):
      fraction, exponent = np.frexp(quotient.astype(np.float64))
      bits.assert_same_bits(
          lib.scale_exponents_oracle(positive, code_format),
          exponent - (fraction == 0.5).astype(np.int32),
      )

  def test_the_floor_is_that_of_the_specification(self):
    self.assertEqual(_FLOOR["e4m3"], np.ceil(np.log2(1e-4 / 448)))
    self.assertEqual(_FLOOR["e2m1"], np.log2(6 * 2.0**-126 / 6))

  def test_blocks_do_not_see_one_another(self):
    x = np.float32([[1.0, 1.1, 1e6, 1.1]])
    out = lib.simulate_oracle(x, "e4m3", 2)
    self.assertNotEqual(out[0, 1], out[0, 3])
    bits.assert_same_bits(out[:, :2], lib.simulate_oracle(x[:, :2], "e4m3", 2))

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_a_block_without_a_scale_is_nan_and_its_neighbour_is_not(self, odd):
    x = np.float32([1.0, odd, 1.0, 2.0])
    out = lib.simulate_oracle(x, "e4m3", 2)
    self.assertEqual(np.isnan(out).tolist(), [True, True, False, False])

  def test_refuses_what_it_does_not_cover(self):
    x = np.zeros((2, 6), np.float32)
    for simulate in (lib.simulate_oracle, lib.simulate):
      with self.assertRaisesRegex(ValueError, "6 is no multiple of .* 4"):
        simulate(x, "e4m3", 4)
      with self.assertRaisesRegex(ValueError, "'e5m2'"):
        simulate(x, "e5m2", 2)
      with self.assertRaisesRegex(NotImplementedError, "float16"):
        simulate(x.astype(np.float16), "e4m3", 2)


class TwinTest(parameterized.TestCase):

  @parameterized.product(
      code_format=lib.FORMATS,
      companion=(0.0, 2.0**-133, 1e-5, 6.0, 450.0, 3.0e38, np.nan),
  )
  def test_every_bfloat16_value_has_the_oracle_s_bits(
      self, code_format, companion
  ):
    x = _beside(_EVERY, companion)
    bits.assert_same_bits(
        lib.simulate(jnp.asarray(x), code_format, 2),
        lib.simulate_oracle(x, code_format, 2),
    )

  @parameterized.product(code_format=lib.FORMATS, exponent=(-140, -20, 0, 100))
  def test_boundaries_in_float32_have_the_oracle_s_bits(
      self, code_format, exponent
  ):
    x = np.ldexp(_boundaries(code_format), exponent)
    for companion in (0.0, np.ldexp(np.float32(_LARGEST[code_format]),
                                    exponent)):
      pairs = _beside(x.astype(np.float32), companion)
      bits.assert_same_bits(
          lib.simulate(jnp.asarray(pairs), code_format, 2),
          lib.simulate_oracle(pairs, code_format, 2),
      )

  @parameterized.product(
      code_format=lib.FORMATS, dtype=("bfloat16", "float32"), block=(1, 8, 32)
  )
  def test_random_blocks_of_many_binades(self, code_format, dtype, block):
    rng = np.random.default_rng(block)
    x = rng.standard_normal((3, 40, 64)) * np.exp(
        8 * rng.standard_normal((3, 40, 1))
    )
    x = x.astype(np.float32).astype(dtype)
    bits.assert_same_bits(
        lib.simulate(jnp.asarray(x), code_format, block),
        lib.simulate_oracle(x, code_format, block),
    )


if __name__ == "__main__":
  absltest.main()
