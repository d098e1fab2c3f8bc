"""Portable oracle: every operation against its exact value.

The expected values are made of integers (`fractions`) or of 200 bits
(`mpmath`) and rounded to float64, float32 and the dtype in turn. Elements near
a rounding boundary are rare, so some tests widen the unit roundoff of the
certificate until there are many. Needs no accelerator.
"""

from collections.abc import Callable
import fractions
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis as hp
import hypothesis.strategies as hps
import ml_dtypes
import mpmath
import numpy as np

from moejax.contracts import combine
from moejax.numerics import formats
from moejax.numerics import ordered_combine
from moejax.numerics.portable import certificate as certificate_lib
from moejax.numerics.portable import exact
from moejax.numerics.portable import portable_oracle as lib
from tests import bits

_DTYPES = ("float32", "bfloat16", "float16")
_BITS = 200


def _round(values, dtype: str) -> np.ndarray:
  """Rounds rationals or mpmath numbers to float64, float32 and dtype."""
  values = np.asarray(values, object)
  with mpmath.workprec(_BITS):
    wide = np.array([float(v) for v in values.reshape(-1)])
  with np.errstate(over="ignore", under="ignore"):
    out = wide.astype(np.float32).astype(formats.of(dtype).numpy)
  return out.reshape(values.shape)


def _fractions(x: np.ndarray) -> np.ndarray:
  x = np.asarray(x, np.float64)
  flat = [fractions.Fraction(v) for v in x.reshape(-1).tolist()]
  return np.array(flat, object).reshape(x.shape)


def _mpf(x: np.ndarray) -> np.ndarray:
  x = np.asarray(x, np.float64)
  flat = [mpmath.mpf(v) for v in x.reshape(-1).tolist()]
  return np.array(flat, object).reshape(x.shape)


def _elementwise(fn: Callable) -> Callable:
  def value(x):
    with mpmath.workprec(_BITS):
      return np.vectorize(fn, otypes=[object])(_mpf(x))

  return value


def _softmax(x: np.ndarray, log: bool = False) -> np.ndarray:
  with mpmath.workprec(_BITS):
    weights = np.vectorize(mpmath.exp, otypes=[object])(_mpf(x))
    total = weights.sum(-1, keepdims=True)
    if log:
      return _mpf(x) - np.vectorize(mpmath.log, otypes=[object])(total)
    return weights / total


# Functions of one value, from other formulas than the library's.
_UNARY = {
    "rsqrt": lambda x: mpmath.power(x, mpmath.mpf(-0.5)),
    "sqrt": lambda x: mpmath.power(x, mpmath.mpf(0.5)),
    "reciprocal": lambda x: mpmath.power(x, -1),
    "exp": lambda x: mpmath.power(mpmath.e, x),
    "log": lambda x: 2 * mpmath.log(mpmath.sqrt(x)),
    "cos": lambda x: mpmath.sin(x + mpmath.pi / 2),
    "sin": lambda x: mpmath.cos(x - mpmath.pi / 2),
    "tanh": lambda x: mpmath.sinh(x) / mpmath.cosh(x),
    "sigmoid": lambda x: (1 + mpmath.tanh(x / 2)) / 2,
    "silu": lambda x: x * (1 + mpmath.tanh(x / 2)) / 2,
    "softplus": lambda x: mpmath.log(1 + mpmath.exp(x)),
}
_POSITIVE = ("rsqrt", "sqrt", "reciprocal", "log")


def _unary(name: str):
  def run(ops, x, dtype):
    return ops.unary(name, np.abs(x) if name in _POSITIVE else x, dtype)

  def value(x):
    x = np.abs(x) if name in _POSITIVE else x
    return _elementwise(_UNARY[name])(x)

  return run, value


def _combine(ops, x, dtype):
  terms = x.reshape(2, 4, -1)
  contract = combine.CombineContract("slots", output=dtype)
  ids = np.zeros((2, 4), np.int32)
  order = ordered_combine.term_order(contract, ids, xp=np)
  return ops.combine(terms, order, contract)


# name: (operation on x [8, 16], its exact value).
_CERTAIN = {
    "add": (
        lambda ops, x, dtype: ops.add(x, x[::-1], dtype),
        lambda x: _fractions(x) + _fractions(x[::-1]),
    ),
    "subtract": (
        lambda ops, x, dtype: ops.subtract(x, x[::-1], dtype),
        lambda x: _fractions(x) - _fractions(x[::-1]),
    ),
    "multiply": (
        lambda ops, x, dtype: ops.multiply(x, x[::-1], dtype),
        lambda x: _fractions(x) * _fractions(x[::-1]),
    ),
    "divide": (
        lambda ops, x, dtype: ops.divide(x, x[::-1], dtype),
        lambda x: _fractions(x) / _fractions(x[::-1]),
    ),
    "square": (
        lambda ops, x, dtype: ops.power(x, 2, dtype),
        lambda x: _fractions(x) ** 2,
    ),
}
_UNCERTAIN = {
    **{name: _unary(name) for name in _UNARY},
    "power": (
        lambda ops, x, dtype: ops.power(10.0, x, dtype),
        _elementwise(lambda x: mpmath.exp(x * mpmath.log(10))),
    ),
    "sum": (
        lambda ops, x, dtype: ops.sum(x, -1, True, dtype),
        lambda x: _fractions(x).sum(-1, keepdims=True),
    ),
    "sum_of_columns": (
        lambda ops, x, dtype: ops.sum(x, 0, False, dtype),
        lambda x: _fractions(x).sum(0),
    ),
    "mean": (
        lambda ops, x, dtype: ops.mean(x, True, dtype),
        lambda x: _fractions(x).sum(-1, keepdims=True) / x.shape[-1],
    ),
    "cumsum": (
        lambda ops, x, dtype: ops.cumsum(x, 0, dtype),
        lambda x: _fractions(x).cumsum(0),
    ),
    "softmax": (lambda ops, x, dtype: ops.softmax(x, -1, dtype), _softmax),
    "softmax_of_columns": (
        lambda ops, x, dtype: ops.softmax(x, 0, dtype),
        lambda x: _softmax(x.T).T,
    ),
    "log_softmax": (
        lambda ops, x, dtype: ops.log_softmax(x, -1, dtype),
        lambda x: _softmax(x, log=True),
    ),
    "matmul": (
        lambda ops, x, dtype: ops.matmul(x, x.T, dtype),
        lambda x: _fractions(x).dot(_fractions(x).T),
    ),
    "matmul_with_bias": (
        lambda ops, x, dtype: ops.matmul(x, x.T, dtype, bias=x[0, :8]),
        lambda x: _fractions(x).dot(_fractions(x).T) + _fractions(x[0, :8]),
    ),
    "combine": (
        _combine, lambda x: _fractions(x).reshape(2, 4, -1).sum(1)
    ),
}
_OPERATIONS = {**_CERTAIN, **_UNCERTAIN}


def _x(dtype: str) -> np.ndarray:
  """[8, 16] values of either sign over several binades, none of them zero."""
  rng = np.random.default_rng(0)
  x = np.ldexp(rng.standard_normal((8, 16)), rng.integers(-6, 3, (8, 16)))
  return x.astype(np.float32).astype(formats.of(dtype).numpy)


class ExactTest(parameterized.TestCase):

  def test_the_cases_cover_every_function_of_one_value(self):
    self.assertEqual(set(_UNARY), set(lib.UNARY))

  @parameterized.product(name=tuple(_OPERATIONS), dtype=_DTYPES)
  def test_equals_the_exact_value_rounded_in_turn(self, name, dtype):
    run, value = _OPERATIONS[name]
    ops = lib.PortableOracle()
    x = _x(dtype)
    out = run(ops, x, dtype)
    bits.assert_same_bits(out, _round(value(x), dtype))
    self.assertEqual(ops.certificate.elements, out.size)
    self.assertTrue(ops.certificate.complete)

  @parameterized.parameters("exp", "sin", "silu", "sigmoid", "softplus")
  def test_holds_far_from_zero(self, name):
    rng = np.random.default_rng(1)
    x = np.concatenate([
        rng.uniform(-90, 90, 200), np.exp2(rng.uniform(-120, 5, 50))
    ]).astype(np.float32)
    for dtype in _DTYPES:
      bits.assert_same_bits(
          lib.PortableOracle().unary(name, x, dtype),
          _round(_elementwise(_UNARY[name])(x), dtype),
      )

  def test_a_batch_of_matrices_is_multiplied_one_by_one(self):
    x = _x("float32").reshape(2, 4, 16)
    out = lib.PortableOracle().matmul(x[:, None], x.swapaxes(1, 2), "float32")
    self.assertEqual(out.shape, (2, 2, 4, 4))
    for i in range(2):
      for j in range(2):
        expected = _fractions(x[i]).dot(_fractions(x[j]).T)
        bits.assert_same_bits(out[i, j], _round(expected, "float32"))

  def test_a_16_bit_accumulator_rounds_every_addition(self):
    terms = np.array([256, 1, 1], ml_dtypes.bfloat16).reshape(1, 3, 1)
    contract = combine.CombineContract("A", accumulator="bfloat16")
    order = np.int32([[0, 1, 2]])
    ops = lib.PortableOracle()
    for slots, expected in ((order, 256), (order[:, ::-1], 258)):
      bits.assert_same_bits(
          ops.combine(terms, slots, contract),
          np.array([[expected]], ml_dtypes.bfloat16),
      )
    self.assertEqual(ops.certificate.to_dict()["uncertain"], 0)

  @parameterized.parameters(*_DTYPES)
  def test_a_scalar_stays_a_scalar(self, dtype):
    ops = lib.PortableOracle()
    x, three = np.float32([1, 2]), np.array(3, formats.of(dtype).numpy)
    bits.assert_same_bits(ops.add(x[0], x[1], dtype), three)
    bits.assert_same_bits(ops.sum(x, 0, False, dtype), three)
    # So large a unit roundoff makes everything uncertain.
    with mock.patch.object(lib, "UNIT", 0.5):
      bits.assert_same_bits(ops.sum(x, 0, False, dtype), three)
      self.assertEqual(ops.unary("exp", np.float32(1), dtype).shape, ())
    self.assertEqual(ops.certificate.uncertain, 2)


class UncertainTest(parameterized.TestCase):

  def _widen_unit(self, dtype):
    unit = formats.of(dtype).unit_roundoff * 2.0**-6
    self.enter_context(mock.patch.object(lib, "UNIT", unit))

  @parameterized.product(name=tuple(_UNCERTAIN), dtype=_DTYPES)
  def test_uncertain_elements_are_recomputed_to_the_same_bits(
      self, name, dtype
  ):
    run, value = _UNCERTAIN[name]
    self._widen_unit(dtype)
    ops = lib.PortableOracle()
    x = _x(dtype)
    bits.assert_same_bits(run(ops, x, dtype), _round(value(x), dtype))
    report = ops.certificate.to_dict()
    (counts,) = report["operations"].values()
    self.assertGreater(counts["uncertain"], 0)
    self.assertEqual(counts["recomputed"], counts["uncertain"])
    self.assertTrue(report["complete"])

  @parameterized.product(name=tuple(_CERTAIN), dtype=_DTYPES)
  def test_one_operation_in_float64_is_never_uncertain(self, name, dtype):
    self._widen_unit(dtype)
    ops = lib.PortableOracle()
    _CERTAIN[name][0](ops, _x(dtype), dtype)
    self.assertEqual(ops.certificate.uncertain, 0)

  @parameterized.parameters(*_DTYPES)
  def test_an_error_within_the_bound_is_repaired(self, dtype):
    x = _x(dtype)
    expected = _round(_elementwise(mpmath.exp)(x), dtype)
    error = 4 * formats.of(dtype).unit_roundoff * 2.0**-6  # The bound is 8.
    self.enter_context(
        mock.patch.object(
            lib, "unary_value", lambda name, x: np.exp(x) * (1 + error)
        )
    )
    wrong = lib.PortableOracle().unary("exp", x, dtype)
    self.assertTrue((wrong != expected).any())
    self._widen_unit(dtype)
    bits.assert_same_bits(lib.PortableOracle().unary("exp", x, dtype), expected)

  def test_a_sum_that_cancels_is_computed_exactly(self):
    # float64 loses the two small terms against 2**80.
    x = np.float32([[2.0**80, 1, 2.0**-23, -(2.0**80)]])
    ops = lib.PortableOracle()
    expected = np.float32([[1 + 2.0**-23]])
    bits.assert_same_bits(ops.sum(x, -1, True, "float32"), expected)
    bits.assert_same_bits(
        ops.matmul(x, np.ones((4, 1), np.float32), "float32"), expected
    )
    bits.assert_same_bits(
        ops.mean(x, True, "float32"), np.float32([[0.25 * (1 + 2.0**-23)]])
    )
    self.assertEqual(ops.certificate.uncertain, 3)

  def test_a_bias_widens_the_bound(self):
    # The dot product loses 2**-78, without which the sum is a tie of float64
    # and then one of float32.
    y = lib.PortableOracle().matmul(
        np.ones((1, 3), np.float32),
        np.float32([[2.0**-24], [2.0**-53], [2.0**-78]]),
        "float32",
        bias=np.float32([1]),
    )
    bits.assert_same_bits(y, np.float32([[1 + 2.0**-23]]))

  @parameterized.parameters(
      ("float32", 2.0**-23), ("bfloat16", 2.0**-7), ("float16", 2.0**-10)
  )
  def test_a_tie_goes_to_even(self, dtype, step):
    kind = formats.of(dtype).numpy
    ops = lib.PortableOracle()
    for start, expected in ((1, 1), (1 + step, 1 + 2 * step)):
      x = np.array([[start, step / 2]], kind)
      y = ops.sum(x, -1, True, dtype)
      bits.assert_same_bits(y, np.array([[expected]], kind))
      y = ops.matmul(x, np.ones((2, 1), kind), dtype)
      bits.assert_same_bits(y, np.array([[expected]], kind))
    # A tie of a 16-bit dtype is a float32 number, so nothing near it is lost.
    self.assertEqual(
        ops.certificate.uncertain, 4 if dtype == "float32" else 0
    )
    self.assertTrue(ops.certificate.complete)

  def test_what_is_infinite_or_nan_is_not_uncertain(self):
    self._widen_unit("float32")
    ops = lib.PortableOracle()
    x = np.float32([[np.inf, 1], [np.nan, 1], [np.inf, -np.inf]])
    with np.errstate(invalid="ignore"):
      y = ops.sum(x, -1, True, "float32")
    bits.assert_same_bits(y, np.float32([[np.inf], [np.nan], [np.nan]]))
    self.assertEqual(ops.certificate.uncertain, 0)


class ExactElementTest(parameterized.TestCase):
  """One recomputed element is the exact value, rounded once to float64."""

  def _assert_equal(self, actual, exact_values):
    with mpmath.workprec(_BITS):
      expected = [float(value) for value in np.ravel(exact_values)]
    bits.assert_same_bits(np.float64(actual).ravel(), np.float64(expected))

  @parameterized.parameters(*_UNARY)
  def test_functions_of_one_value(self, name):
    x = _x("float32").reshape(-1).astype(np.float64)
    x = np.abs(x) if name in _POSITIVE else x
    self._assert_equal(
        [exact.unary(name, v) for v in x], _elementwise(_UNARY[name])(x)
    )

  def test_powers(self):
    x = _x("float32").reshape(-1).astype(np.float64)
    self._assert_equal(
        [exact.power(10.0, v) for v in x],
        _elementwise(lambda v: mpmath.exp(v * mpmath.log(10)))(x),
    )

  def test_reductions(self):
    x = _x("float32").astype(np.float64)
    columns = range(x.shape[1])
    self._assert_equal(
        [[exact.softmax(row, i) for i in columns] for row in x], _softmax(x)
    )
    self._assert_equal(
        [[exact.log_softmax(row, i) for i in columns] for row in x],
        _softmax(x, log=True),
    )
    sums = _fractions(x).sum(-1)
    self._assert_equal([exact.total(row.tolist()) for row in x], sums)
    self._assert_equal([exact.mean(row) for row in x], sums / 16)
    squares = (_fractions(x) ** 2).sum(-1)
    self._assert_equal(
        [exact.dot(row, row, 0.1) for row in x],
        squares + fractions.Fraction(0.1),
    )


class OrderTest(parameterized.TestCase):

  @hp.given(seed=hps.integers(0, 2**16), order=hps.permutations(range(12)))
  def test_permuting_the_terms_changes_no_bit(self, seed, order):
    rng = np.random.default_rng(seed)
    x = np.ldexp(rng.standard_normal((4, 12)), rng.integers(-30, 30, (4, 12)))
    x = x.astype(np.float32)
    y = rng.standard_normal((12, 3)).astype(np.float32)
    ops = lib.PortableOracle()
    for dtype in _DTYPES:
      for run in (
          lambda x, y: ops.sum(x, -1, True, dtype),
          lambda x, y: ops.mean(x, True, dtype),
          lambda x, y: ops.cumsum(x, -1, dtype)[:, -1],
          lambda x, y: ops.matmul(x, y, dtype),
          lambda x, y: ops.combine(
              x[..., None],
              np.tile(np.arange(12, dtype=np.int32), (4, 1)),
              combine.CombineContract("P32", output=dtype),
          ),
      ):
        bits.assert_same_bits(run(x[:, order], y[order]), run(x, y))
      for run in (ops.softmax, ops.log_softmax):
        bits.assert_same_bits(
            run(x[:, order], -1, dtype), run(x, -1, dtype)[:, order]
        )


class ZeroTest(absltest.TestCase):

  def test_a_sum_that_vanishes_is_plus_zero(self):
    ops = lib.PortableOracle()
    x = np.float32([[-0.0, -0.0], [1, -1]])
    zero = np.zeros((2, 1), np.float32)
    bits.assert_same_bits(ops.sum(x, -1, True, "float32"), zero)
    bits.assert_same_bits(ops.mean(x, True, "float32"), zero)
    bits.assert_same_bits(
        ops.matmul(x, np.ones((2, 1), np.float32), "float32"), zero
    )
    bits.assert_same_bits(
        ops.cumsum(x, -1, "float32"), np.float32([[0, 0], [1, 0]])
    )

  def test_one_operation_keeps_the_sign_of_zero(self):
    ops = lib.PortableOracle()
    zero = np.float32([-0.0])
    bits.assert_same_bits(ops.add(zero, zero, "float32"), zero)
    bits.assert_same_bits(ops.multiply(zero, np.float32([1]), "float32"), zero)
    bits.assert_same_bits(ops.divide(zero, np.float32([1]), "float32"), zero)
    for name in ("sin", "tanh", "silu"):
      bits.assert_same_bits(ops.unary(name, zero, "float32"), zero)
    bits.assert_same_bits(
        ops.unary("rsqrt", zero, "float32"), np.float32([-np.inf])
    )

  def test_a_combine_keeps_minus_zero_only_if_it_starts_from_the_first_term(
      self,
  ):
    terms = np.float32([[[-0.0, -0.0, 1], [-0.0, 0.0, -1]]])
    order = np.int32([[0, 1]])
    for start, first in (("zero", 0.0), ("first", -0.0)):
      contract = combine.CombineContract("x", start=start, output="float32")
      expected = np.float32([[first, 0, 0]])
      bits.assert_same_bits(
          lib.PortableOracle().combine(terms, order, contract), expected
      )
      bits.assert_same_bits(
          ordered_combine.add_terms_oracle(terms, order, contract), expected
      )

  def test_subnormals_are_kept(self):
    tiny = np.float32([1e-20])
    y = lib.PortableOracle().multiply(tiny, tiny, "float32")
    bits.assert_same_bits(y.view(np.uint32), np.uint32([0x000116C2]))

  def test_every_nan_loses_sign_and_payload(self):
    ops = lib.PortableOracle()
    x = np.uint32([0xFFC12345, 0x7F800001]).view(np.float32)
    for dtype in _DTYPES:
      expected = np.full(2, np.nan, formats.of(dtype).numpy)
      with np.errstate(invalid="ignore"):
        bits.assert_same_bits(ops.add(x, x, dtype), expected)
        bits.assert_same_bits(ops.unary("exp", x, dtype), expected)


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
      ("subnormals", "flush"), ("contraction", "fma")
  )
  def test_a_combine_that_flushes_or_contracts(self, field, value):
    contract = combine.CombineContract("mine", **{field: value})
    with self.assertRaisesRegex(
        NotImplementedError, f"mine has .*{field}='{value}'"
    ):
      lib.PortableOracle().combine(
          np.zeros((1, 1, 1), np.float32), np.int32([[0]]), contract
      )


class CertificateTest(absltest.TestCase):

  def test_is_not_complete_while_an_element_is_unresolved(self):
    certificate = certificate_lib.Certificate()
    certificate.note("sum", 10, 3)
    certificate.note("exp", 5)
    certificate.note_recomputed("sum", 2)
    certificate.note_ties(4)
    self.assertEqual(certificate.ties, 4)
    self.assertFalse(certificate.complete)
    self.assertEqual(
        certificate.to_dict(),
        {
            "complete": False,
            "elements": 15,
            "uncertain": 3,
            "unresolved": 1,
            "operations": {
                "exp": {"elements": 5, "uncertain": 0, "recomputed": 0},
                "sum": {"elements": 10, "uncertain": 3, "recomputed": 2},
            },
        },
    )
    self.assertEqual(list(certificate.to_dict()["operations"]), ["exp", "sum"])
    certificate.note_recomputed("sum", 1)
    self.assertTrue(certificate.complete)

  def test_collects_over_several_operations(self):
    certificate = certificate_lib.Certificate()
    ops = lib.PortableOracle(certificate)
    x = np.ones((2, 3), np.float32)
    ops.add(x, x, "float32")
    ops.add(x, x, "float32")
    ops.sum(x, -1, True, "float32")
    self.assertIs(ops.certificate, certificate)
    self.assertEqual(certificate.elements, 14)
    self.assertIn("sum", certificate.to_dict()["operations"])


if __name__ == "__main__":
  absltest.main()
