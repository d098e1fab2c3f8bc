"""Sequential reductions: one float32 chain in ascending order.

The oracle is held against rationals, the twin against the oracle. Needs no
accelerator, and float64.
"""

import fractions

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from moejax.numerics import formats
from moejax.numerics.portable import portable_ops
from moejax.numerics.portable import portable_oracle
from moejax.numerics import sequential_ops as lib
from tests import bits

_DTYPES = ("float32", "bfloat16", "float16")
_SITE = "projection"


def _random(dtype: str, *shape: int) -> np.ndarray:
  rng = np.random.default_rng(0)
  x = np.ldexp(rng.standard_normal(shape), rng.integers(-8, 4, shape))
  return x.astype(np.float32).astype(formats.of(dtype).numpy)


def _special(dtype: str) -> tuple[np.ndarray, np.ndarray]:
  """[6, 5] and [5, 3] with zeros, subnormals, infinities, NaN, overflow."""
  fmt = formats.of(dtype)
  tiny = np.ldexp(1.0, fmt.min_exponent - (fmt.precision - 1))
  large = np.ldexp(1.75, fmt.max_exponent)
  a = np.array([
      [0.0, -0.0, 0.0, -0.0, 0.0],
      [tiny, -3 * tiny, 5 * tiny, tiny, -tiny],
      [np.inf, 1.0, 1.0, 1.0, 1.0],
      [np.inf, 1.0, -np.inf, 1.0, 1.0],
      [-np.nan, 1.0, 1.0, 1.0, 1.0],
      [large, large, -large, -large, 1.0],
  ])
  b = np.array([
      [1.0, -1.0, 0.5], [1.0, -0.0, 2.0], [1.0, 1.0, 0.25],
      [1.0, -1.0, 1.0], [1.0, -1.0, -1.0],
  ])
  return tuple(x.astype(np.float32).astype(fmt.numpy) for x in (a, b))


def _nearest_float32(value: fractions.Fraction) -> np.float32:
  """The float32 next to a rational; ties to even."""
  middle = np.float32(float(value))
  candidates = (
      middle,
      np.nextafter(middle, np.float32(np.inf)),
      np.nextafter(middle, np.float32(-np.inf)),
  )
  return min(
      candidates,
      key=lambda c: (
          abs(fractions.Fraction(float(c)) - value),
          int(c.view(np.uint32)) & 1,
      ),
  )


def _chain(row, column) -> float:
  total = fractions.Fraction(0)
  for x, y in zip(row.tolist(), column.tolist(), strict=True):
    term = fractions.Fraction(x) * fractions.Fraction(y)
    total = fractions.Fraction(float(_nearest_float32(total + term)))
  return float(total)


class OracleTest(parameterized.TestCase):

  @parameterized.parameters(*_DTYPES)
  def test_matmul_rounds_the_exact_sum_after_every_term(self, dtype):
    a, b = _random(dtype, 6, 24), _random(dtype, 24, 5)
    wide_a, wide_b = a.astype(float), b.astype(float)
    expected = np.float32(
        [[_chain(row, column) for column in wide_b.T] for row in wide_a]
    )
    bits.assert_same_bits(lib.matmul_oracle(a, b, "float32"), expected)
    bits.assert_same_bits(
        lib.matmul_oracle(a, b, dtype), expected.astype(a.dtype)
    )

  def test_matmul_rounds_once_beside_halfway(self):
    # In float64, 1 + 2**-23 + 2**-24 - 2**-70 is the halfway point itself.
    a = np.float32([[1, 2.0**-12 * (1 + 2.0**-23)]])
    b = np.float32([[1 + 2.0**-23], [2.0**-12 * (1 - 2.0**-23)]])
    bits.assert_same_bits(
        lib.matmul_oracle(a, b, "float32"), np.float32([[1 + 2.0**-23]])
    )
    bits.assert_same_bits(
        lib.matmul(jnp.asarray(a), jnp.asarray(b), "float32"),
        np.float32([[1 + 2.0**-23]]),
    )

  @parameterized.parameters(*_DTYPES)
  def test_sum_is_a_loop_over_scalars(self, dtype):
    x = _random(dtype, 6, 24)
    expected = np.zeros((6, 1), np.float32)
    for row in range(6):
      for value in x[row]:
        expected[row, 0] = expected[row, 0] + np.float32(value)
    bits.assert_same_bits(lib.sum_oracle(x, dtype), expected.astype(x.dtype))


class OrderTest(absltest.TestCase):

  def test_the_order_is_observable(self):
    x = np.float32([[2.0**24, 1, 1], [1, 1, 2.0**24]])
    expected = np.float32([[2.0**24], [2.0**24 + 2]])
    ones = np.ones((3, 1), np.float32)
    for y in (
        lib.sum_oracle(x, "float32"),
        lib.total(jnp.asarray(x), "float32"),
        lib.matmul_oracle(x, ones, "float32"),
        lib.matmul(jnp.asarray(x), jnp.asarray(ones), "float32"),
    ):
      bits.assert_same_bits(y, expected)


class TwinTest(parameterized.TestCase):

  @parameterized.product(dtype=_DTYPES, compiled=(True, False))
  def test_matmul_equals_the_oracle(self, dtype, compiled):
    for a, b in (
        (_random(dtype, 6, 24), _random(dtype, 24, 5)),
        # Two terms: whether the first is rounded shows in many elements.
        (_random(dtype, 16, 2), _random(dtype, 2, 16)),
        _special(dtype),
    ):
      with np.errstate(invalid="ignore", over="ignore"):
        expected = lib.matmul_oracle(a, b, dtype)
      with jax.disable_jit(not compiled):
        actual = lib.matmul(jnp.asarray(a), jnp.asarray(b), dtype)
      bits.assert_same_bits(actual, expected)

  @parameterized.product(dtype=_DTYPES, compiled=(True, False))
  def test_sum_equals_the_oracle(self, dtype, compiled):
    for x in (_random(dtype, 6, 24), _special(dtype)[0]):
      with np.errstate(invalid="ignore", over="ignore"):
        expected = lib.sum_oracle(x, dtype)
      with jax.disable_jit(not compiled):
        actual = lib.total(jnp.asarray(x), dtype)
      bits.assert_same_bits(actual, expected)

  def test_one_term_that_is_minus_zero_sums_to_plus_zero(self):
    # XLA drops an addition to a literal zero.
    x = np.float32([[-0.0]])
    bits.assert_same_bits(
        lib.total(jnp.asarray(x), "float32"), lib.sum_oracle(x, "float32")
    )

  def test_one_product_that_is_minus_zero_sums_to_plus_zero(self):
    a, b = np.float32([[-0.0]]), np.float32([[1]])
    bits.assert_same_bits(
        lib.matmul(jnp.asarray(a), jnp.asarray(b), "float32"),
        lib.matmul_oracle(a, b, "float32"),
    )

  def test_a_batch_of_matrices_is_multiplied_one_by_one(self):
    a, b = _random("float32", 2, 1, 3, 8), _random("float32", 3, 8, 2)
    out = np.asarray(lib.matmul(jnp.asarray(a), jnp.asarray(b), "float32"))
    self.assertEqual(out.shape, (2, 3, 3, 2))
    for i in range(2):
      for j in range(3):
        bits.assert_same_bits(
            out[i, j], lib.matmul_oracle(a[i, 0], b[j], "float32")
        )

  @parameterized.parameters(*_DTYPES)
  def test_a_token_alone_has_the_bits_it_has_in_a_batch(self, dtype):
    a, b = _random(dtype, 6, 24), jnp.asarray(_random(dtype, 24, 5))
    batch = np.asarray(lib.matmul(jnp.asarray(a), b, dtype))
    alone = np.asarray(lib.matmul(jnp.asarray(a[3:4]), b, dtype))
    bits.assert_same_bits(alone[0], batch[3])


class ReductionsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.ops = lib.SequentialReductions(portable_ops.PortableOperations())

  @parameterized.parameters(*_DTYPES)
  def test_linear_multiplies_by_the_transposed_weight(self, dtype):
    x, weight = _random(dtype, 6, 24), _random(dtype, 5, 24)
    bits.assert_same_bits(
        self.ops.linear(jnp.asarray(x), jnp.asarray(weight), _SITE),
        lib.matmul_oracle(x, weight.T, dtype),
    )

  @parameterized.parameters(*_DTYPES)
  def test_mean_divides_the_chain_by_the_count(self, dtype):
    x = _random(dtype, 6, 24)
    oracle = portable_oracle.PortableOracle()
    bits.assert_same_bits(
        self.ops.mean(jnp.asarray(x), _SITE),
        oracle.divide(lib.sum_oracle(x, dtype), 24.0, dtype),
    )

  def test_mean_divides_by_a_count_that_the_dtype_cannot_hold(self):
    # The sum is 772 and the mean 3; bfloat16 would make 256 of the count.
    x = jnp.full((1, 257), 3, jnp.bfloat16)
    total = lib.sum_oracle(np.asarray(x), "bfloat16")
    oracle = portable_oracle.PortableOracle()
    bits.assert_same_bits(
        self.ops.mean(x, _SITE), oracle.divide(total, 257.0, "bfloat16")
    )

  @parameterized.parameters(*_DTYPES)
  def test_softmax_rounds_shift_function_sum_and_quotient(self, dtype):
    x = _random(dtype, 6, 24)
    oracle = portable_oracle.PortableOracle()
    shifted = oracle.subtract(x, x.max(-1, keepdims=True), dtype)
    weights = oracle.unary("exp", shifted, dtype)
    total = lib.sum_oracle(weights, dtype)
    bits.assert_same_bits(
        self.ops.softmax(jnp.asarray(x), _SITE),
        oracle.divide(weights, total, dtype),
    )


if __name__ == "__main__":
  absltest.main()
