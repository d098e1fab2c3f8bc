"""Rounding: every rounding against a definition that shares no code with it.

The definitions here scale by powers of two and call `numpy.rint`, or compare
distances to the two neighbours; the library works on bit patterns. The fence
is tested together with what it prevents. Needs no accelerator.
"""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.numerics import formats
from moejax.numerics import rounding as lib
from tests import bits

_DTYPES = ("float32", "bfloat16", "float16")
_LOWER_HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
_RULES = ("paper", "ieee")


def _all_upper_halves() -> np.ndarray:
  """All 65,536 upper halves with each boundary lower half, as float32."""
  upper = np.arange(1 << 16, dtype=np.uint32) << 16
  lower = np.array(_LOWER_HALVES, np.uint32)
  return (upper[:, None] | lower).reshape(-1).view(np.float32)


def _magnitude(word: np.ndarray) -> np.ndarray:
  """The value of sign-free float32 bits, infinity standing for 2**128."""
  exponent, fraction = word >> 23, word & 0x7FFFFF
  normal = exponent > 0
  significand = np.where(normal, fraction | (1 << 23), fraction)
  return np.ldexp(
      significand.astype(np.float64), np.where(normal, exponent, 1) - 150
  )


def _bf16_by_distance(x: np.ndarray, rule: str) -> np.ndarray:
  """The nearer of the two bfloat16 neighbours, the even one in a tie."""
  word = x.view(np.uint32).astype(np.int64)
  sign, magnitude = word >> 31, word & 0x7FFFFFFF
  low = magnitude >> 16 << 16
  high = low + 0x10000
  below = _magnitude(magnitude) - _magnitude(low)
  above = _magnitude(high) - _magnitude(magnitude)
  odd = (low >> 16) % 2 == 1
  nearest = np.where((above < below) | ((above == below) & odd), high, low)
  # What is not finite is cut, and "ieee" has one NaN for either sign.
  nearest = np.where(magnitude >= 0x7F800000, low, nearest)
  if rule == "ieee":
    nearest = np.where(magnitude > 0x7F800000, 0x7FC00000, nearest)
  return ((sign << 15) | (nearest >> 16)).astype(np.uint16)


def _nearest(y: np.ndarray, dtype: str) -> np.ndarray:
  """The value of float64 y rounded once to dtype, still in float64."""
  fmt = formats.of(dtype)
  _, exponent = np.frexp(y)
  last = np.maximum(exponent - 1, fmt.min_exponent) - (fmt.precision - 1)
  with np.errstate(invalid="ignore"):
    rounded = np.ldexp(np.rint(np.ldexp(y, -last)), last)
  too_large = np.abs(rounded) >= 2.0 ** (fmt.max_exponent + 1)
  return np.where(too_large, np.copysign(np.inf, y), rounded)


def _arguments(dtype: str) -> np.ndarray:
  """float64 values on, beside and between a format's numbers, all ranges."""
  fmt = formats.of(dtype)
  rng = np.random.default_rng(0)
  last = fmt.precision - 1
  significand = rng.integers(1 << last, 1 << fmt.precision, 2048)
  exponent = rng.integers(fmt.min_exponent - 3, fmt.max_exponent + 2, 2048)
  # Below the normal range the numbers thin out: fewer bits of significand.
  subnormal = rng.integers(0, 1 << last, 512)
  numbers = np.concatenate([
      np.ldexp(significand.astype(np.float64), exponent - last),
      np.ldexp(subnormal.astype(np.float64), fmt.min_exponent - last),
      np.ldexp(np.float64([1, 2, 3]), fmt.min_exponent - last),
      [np.ldexp(2.0 - 2.0**-last, fmt.max_exponent), 2.0**fmt.min_exponent],
  ])
  _, exponent = np.frexp(numbers)
  spacing = np.maximum(exponent - 1, fmt.min_exponent) - last
  ties = numbers + np.ldexp(0.5, spacing)
  finite = np.concatenate([
      numbers,
      ties,
      np.nextafter(ties, np.inf),
      np.nextafter(ties, -np.inf),
      np.nextafter(numbers, np.inf),
      np.ldexp(rng.random(2048), rng.integers(-160, 140, 2048)),
  ])
  patterns = rng.integers(0, 1 << 64, 2048, np.uint64).view(np.float64)
  nan = np.array([0x7FF8 << 48, 0xFFF8 << 48, (0x7FF << 52) | 1], np.uint64)
  return np.concatenate([
      finite,
      -finite,
      patterns,
      [0.0, -0.0, np.inf, -np.inf, 5e-324, 1.7e308],
      nan.view(np.float64),
  ])


def _array(y: np.ndarray, dtype: str) -> np.ndarray:
  """float64 values that dtype represents, in dtype; NaN has no sign."""
  out = y.astype(formats.of(dtype).numpy)
  return np.where(np.isnan(y), np.array(np.nan, out.dtype), out)


def _is_nan(x: np.ndarray) -> np.ndarray:
  with np.errstate(invalid="ignore"):
    return np.isnan(x)


class Bfloat16Test(chex.TestCase):

  @parameterized.parameters(*_RULES)
  def test_oracle_is_the_nearest_neighbour_of_every_upper_half(self, rule):
    x = _all_upper_halves()
    bits.assert_same_bits(
        lib.bf16_bits_oracle(x, rule), _bf16_by_distance(x, rule)
    )

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(*_RULES)
  def test_twin_equals_the_oracle_for_every_upper_half(self, rule):
    x = _all_upper_halves()
    fn = self.variant(functools.partial(lib.bf16_bits, rule=rule))
    bits.assert_same_bits(fn(jnp.asarray(x)), lib.bf16_bits_oracle(x, rule))

  def test_ieee_is_the_cast_of_ml_dtypes(self):
    x = _all_upper_halves()
    with np.errstate(invalid="ignore"):
      cast = x.astype(ml_dtypes.bfloat16)
    bits.assert_same_bits(
        lib.bf16_bits_oracle(x, "ieee").view(ml_dtypes.bfloat16), cast
    )

  def test_rules_differ_in_nan_only_and_paper_makes_one_of_them_infinite(self):
    x = _all_upper_halves()
    paper, ieee = (lib.bf16_bits_oracle(x, rule) for rule in _RULES)
    self.assertFalse((paper != ieee)[~np.isnan(x)].any())
    low_payload = np.uint32([0x7F800001, 0xFF80FFFF]).view(np.float32)
    bits.assert_same_bits(
        lib.bf16_bits_oracle(low_payload, "paper"), np.uint16([0x7F80, 0xFF80])
    )
    bits.assert_same_bits(
        lib.bf16_bits_oracle(low_payload, "ieee"), np.uint16([0x7FC0, 0xFFC0])
    )

  def test_refuses_an_unknown_rule(self):
    for fn in (lib.bf16_bits_oracle, lib.bf16_bits):
      with self.assertRaisesRegex(ValueError, "rule='truncate'"):
        fn(np.float32([1]), "truncate")


class Float16Test(absltest.TestCase):

  def test_integers_round_as_numpys_cast(self):
    # Every float16 value with what lies beside it and half way to the next.
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    words = values.astype(np.float32).view(np.uint32)
    steps = np.uint32([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF])
    x = np.concatenate(
        [(words[:, None] + steps).reshape(-1).view(np.float32),
         _all_upper_halves()]
    )
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
      wanted = x.astype(np.float16)
    found = np.asarray(jax.jit(lib.f16_bits)(x))
    nan = np.isnan(x)
    bits.assert_same_bits(found[~nan], wanted[~nan].view(np.uint16))
    self.assertEqual(set(found[nan].tolist()), {0x7E00, 0xFE00})


class RoundTest(chex.TestCase):

  @parameterized.parameters(
      ("float32", np.float32), ("float16", np.float16)
  )
  def test_the_definition_here_is_numpys_cast(self, dtype, kind):
    y = _arguments(dtype)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
      cast = y.astype(kind)
    bits.assert_same_bits(
        _array(_nearest(y, dtype), dtype), _array(cast.astype(float), dtype)
    )

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(*_DTYPES)
  def test_round_value_rounds_once_to_the_nearest(self, dtype):
    y = _arguments(dtype)
    fn = self.variant(functools.partial(lib.round_value, dtype=dtype))
    bits.assert_same_bits(
        fn(jnp.asarray(y)), _array(_nearest(y, dtype), "float64")
    )

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(*_DTYPES)
  def test_pack_keeps_every_value_of_the_format(self, dtype):
    y = _nearest(_arguments(dtype), dtype)
    fn = self.variant(functools.partial(lib.pack, dtype=dtype))
    number = ~np.isnan(y)
    packed = np.asarray(fn(jnp.asarray(y)))
    bits.assert_same_bits(packed[number], _array(y[number], dtype))
    # A NaN loses its payload and keeps its sign.
    uint = formats.of(dtype).uint
    words = packed[~number].view(uint)
    quiet = np.array(np.nan, packed.dtype).view(uint)
    negative = np.signbit(y[~number])
    top = uint.type(1 << (8 * uint.itemsize - 1))
    self.assertTrue(negative.any() and not negative.all())
    bits.assert_same_bits(words, np.where(negative, quiet | top, quiet))

  @parameterized.parameters(*_DTYPES)
  def test_oracle_rounds_to_float32_and_then_to_the_format(self, dtype):
    for edges in ("float32", dtype):
      y = _arguments(edges)
      expected = _nearest(_nearest(y, "float32"), dtype)
      bits.assert_same_bits(lib.round_oracle(y, dtype), _array(expected, dtype))

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(*_DTYPES)
  def test_round_pack_equals_the_oracle(self, dtype):
    y = np.concatenate([_arguments("float32"), _arguments(dtype)])
    fn = self.variant(functools.partial(lib.round_pack, dtype=dtype))
    bits.assert_same_bits(fn(jnp.asarray(y)), lib.round_oracle(y, dtype))

  def test_two_roundings_differ_from_one_just_above_a_tie(self):
    y = np.float64([1 + 2.0**-8 + 2.0**-40])
    bits.assert_same_bits(
        lib.round_value(jnp.asarray(y), "bfloat16"), np.float64([1 + 2.0**-7])
    )
    bits.assert_same_bits(
        lib.round_oracle(y, "bfloat16"), np.array([1], ml_dtypes.bfloat16)
    )

  def test_float64_is_left_alone(self):
    y = _arguments("float32")
    bits.assert_same_bits(lib.round_oracle(y, "float64"), y)
    bits.assert_same_bits(lib.round_pack(jnp.asarray(y), "float64"), y)

  @parameterized.parameters(*_DTYPES)
  def test_oracle_keeps_the_shape_of_a_scalar(self, dtype):
    self.assertEqual(lib.round_oracle(np.float64(0.3), dtype).shape, ())
    self.assertEqual(lib.round_oracle(np.array(0.3), dtype).shape, ())


class WidenTest(chex.TestCase):

  def _patterns(self, dtype):
    fmt = formats.of(dtype)
    if fmt.bits == 16:
      return np.arange(1 << 16, dtype=np.uint16).view(fmt.numpy)
    rng = np.random.default_rng(0)
    edges = np.arange(-64, 64, dtype=np.int64)
    centres = (0, 1 << 23, 0x7F800000, 1 << 31, 0x80800000, 0xFF800000)
    words = np.concatenate(
        [rng.integers(0, 1 << 32, 1 << 15)] + [edges + c for c in centres]
    )
    return (words % (1 << 32)).astype(np.uint32).view(fmt.numpy)

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(*_DTYPES)
  def test_is_exact_for_every_number_and_keeps_nan(self, dtype):
    x = self._patterns(dtype)
    wide = np.asarray(self.variant(lib.widen)(jnp.asarray(x)))
    nan = _is_nan(x)
    self.assertTrue(nan.any())
    bits.assert_same_bits(wide[~nan], x[~nan].astype(np.float64))
    self.assertTrue(np.isnan(wide[nan]).all())

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(*_DTYPES)
  def test_pack_takes_it_back(self, dtype):
    x = self._patterns(dtype)
    x = x[~_is_nan(x)]
    fn = self.variant(lambda v: lib.pack(lib.widen(v), dtype))
    bits.assert_same_bits(fn(jnp.asarray(x)), x)

  def test_float64_is_left_alone(self):
    y = _arguments("float32")
    bits.assert_same_bits(lib.widen(jnp.asarray(y)), y)


class DeclaredRoundingTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_c17_a_declared_rounding_happens(self):
    @self.variant
    def fn(x):
      return (
          lib.widen(lib.round_pack(lib.widen(x), "bfloat16")),
          lib.bf16_bits(x, "ieee"),
      )

    value, word = fn(jnp.asarray([1.001953125, np.pi], jnp.float32))
    bits.assert_same_bits(value, np.float64([1.0, 3.140625]))
    bits.assert_same_bits(word, np.uint16([0x3F80, 0x4049]))

  @chex.variants(with_jit=True, without_jit=True)
  def test_c17_one_is_lost_between_two_bfloat16_additions(self):
    @self.variant
    def fn(x, y):
      total = lib.round_pack(lib.widen(x) + lib.widen(y), "bfloat16")
      return lib.round_pack(lib.widen(total) - lib.widen(x), "bfloat16")

    y = fn(jnp.bfloat16([256]), jnp.bfloat16([1]))
    bits.assert_same_bits(y, np.zeros(1, ml_dtypes.bfloat16))


class FenceTest(chex.TestCase):

  def _operands(self):
    rng = np.random.default_rng(0)
    return rng.standard_normal((3, 4096)).astype(np.float32)

  def test_keeps_product_and_sum_apart_under_jit(self):
    a, b, c = self._operands()
    fn = jax.jit(lambda a, b, c, zero: lib.fence(a * b, zero) + c)
    bits.assert_same_bits(fn(a, b, c, np.uint32(0)), a * b + c)

  def test_is_needed_on_a_cpu(self):
    if jax.default_backend() != "cpu":
      self.skipTest("That XLA contracts a * b + c was seen on CPUs.")
    a, b, c = self._operands()
    contracted = np.asarray(jax.jit(lambda a, b, c: a * b + c)(a, b, c))
    self.assertGreater((contracted != a * b + c).sum(), 0)

  @chex.variants(with_jit=True, without_jit=True)
  def test_moves_no_bit(self):
    x = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32)
    x = x.view(np.float32)
    y = self.variant(lib.fence)(jnp.asarray(x), jnp.uint32(0))
    bits.assert_same_bits(y, x)


if __name__ == "__main__":
  absltest.main()
