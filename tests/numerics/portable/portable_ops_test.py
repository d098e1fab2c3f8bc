"""Portable operations in JAX: the same bits as their oracle.

Every operation, every dtype, on values that include zeros of both signs,
subnormals, infinities and NaN. Needs no accelerator, and float64.
"""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis as hp
import hypothesis.strategies as hps
import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import combine
from moejax.numerics import formats
from moejax.numerics import ordered_combine
from moejax.numerics.portable import certificate as certificate_lib
from moejax.numerics.portable import portable_ops as lib
from moejax.numerics.portable import portable_oracle
from tests import bits

_DTYPES = ("float32", "bfloat16", "float16")
_SITE = "projection"
_SHAPE = (8, 16)


def _combine(ops, x, contract):
  terms = x.reshape(2, 4, -1)
  ids = jnp.asarray([[3, 0, 2, 1], [0, 1, 2, 3]], jnp.int32)
  return ops.combine(terms, ids, contract, 0)


def _combine_oracle(ops, x, contract):
  ids = np.int32([[3, 0, 2, 1], [0, 1, 2, 3]])
  order = ordered_combine.term_order(contract, ids, xp=np)
  return ops.combine(x.reshape(2, 4, -1), order, contract)


def _float32_sum(dtype):
  return combine.CombineContract("sum", output=dtype)


def _chain(dtype):
  return combine.CombineContract(
      "chain", accumulator="bfloat16", output=dtype, order="expert"
  )


# name: (the twin on x [8, 16], the oracle on x and its dtype).
_CERTAIN = {
    "add": (
        lambda ops, x: ops.add(x, x[::-1]),
        lambda ops, x, dtype: ops.add(x, x[::-1], dtype),
    ),
    "add_scalar": (
        lambda ops, x: ops.add_scalar(x, 1e-6),
        lambda ops, x, dtype: ops.add(x, 1e-6, dtype),
    ),
    "multiply": (
        lambda ops, x: ops.multiply(x, x[::-1]),
        lambda ops, x, dtype: ops.multiply(x, x[::-1], dtype),
    ),
    "scale": (
        lambda ops, x: ops.scale(x, 0.1),
        lambda ops, x, dtype: ops.multiply(x, 0.1, dtype),
    ),
    "divide": (
        lambda ops, x: ops.divide(x, x[::-1]),
        lambda ops, x, dtype: ops.divide(x, x[::-1], dtype),
    ),
    "combine_in_a_chain": (
        lambda ops, x: _combine(ops, x, _chain(x.dtype.name)),
        lambda ops, x, dtype: _combine_oracle(ops, x, _chain(dtype)),
    ),
}
_UNCERTAIN = {
    "power": (
        lambda ops, x: ops.power(10000.0, x),
        lambda ops, x, dtype: ops.power(10000.0, x, dtype),
    ),
    "rsqrt": (
        lambda ops, x: ops.rsqrt(x),
        lambda ops, x, dtype: ops.unary("rsqrt", x, dtype),
    ),
    "exp": (
        lambda ops, x: ops.exp(x),
        lambda ops, x, dtype: ops.unary("exp", x, dtype),
    ),
    "cos": (
        lambda ops, x: ops.cos(x),
        lambda ops, x, dtype: ops.unary("cos", x, dtype),
    ),
    "sin": (
        lambda ops, x: ops.sin(x),
        lambda ops, x, dtype: ops.unary("sin", x, dtype),
    ),
    "silu": (
        lambda ops, x: ops.silu(x),
        lambda ops, x, dtype: ops.unary("silu", x, dtype),
    ),
    "sigmoid": (
        lambda ops, x: ops.sigmoid(x),
        lambda ops, x, dtype: ops.unary("sigmoid", x, dtype),
    ),
    "softplus": (
        lambda ops, x: ops.softplus(x),
        lambda ops, x, dtype: ops.unary("softplus", x, dtype),
    ),
    "sqrt": (
        lambda ops, x: ops.sqrt(x),
        lambda ops, x, dtype: ops.unary("sqrt", x, dtype),
    ),
    "mean": (
        lambda ops, x: ops.mean(x, _SITE),
        lambda ops, x, dtype: ops.mean(x, True, dtype),
    ),
    "sum": (
        lambda ops, x: ops.sum(x, _SITE),
        lambda ops, x, dtype: ops.sum(x, -1, True, dtype),
    ),
    "softmax": (
        lambda ops, x: ops.softmax(x, _SITE),
        lambda ops, x, dtype: ops.softmax(x, -1, dtype),
    ),
    "matmul": (
        lambda ops, x: ops.matmul(
            x.reshape(2, 1, 4, 16), x.reshape(2, 4, 16).swapaxes(1, 2), _SITE
        ),
        lambda ops, x, dtype: ops.matmul(
            x.reshape(2, 1, 4, 16), x.reshape(2, 4, 16).swapaxes(1, 2), dtype
        ),
    ),
    "linear": (
        lambda ops, x: ops.linear(x, x[:5], _SITE),
        lambda ops, x, dtype: ops.matmul(x, x[:5].T, dtype),
    ),
    "combine": (
        lambda ops, x: _combine(ops, x, _float32_sum(x.dtype.name)),
        lambda ops, x, dtype: _combine_oracle(ops, x, _float32_sum(dtype)),
    ),
}
_OPERATIONS = {**_CERTAIN, **_UNCERTAIN}


def _random(dtype: str) -> np.ndarray:
  """Values of either sign over several binades."""
  rng = np.random.default_rng(0)
  x = np.ldexp(rng.standard_normal(_SHAPE), rng.integers(-9, 4, _SHAPE))
  return x.astype(np.float32).astype(formats.of(dtype).numpy)


def _special(dtype: str) -> np.ndarray:
  """A row of each kind: zeros, subnormals, infinities, NaN, large values."""
  fmt = formats.of(dtype)
  rng = np.random.default_rng(0)
  tiny = np.ldexp(1.0, fmt.min_exponent - (fmt.precision - 1))
  large = np.ldexp(1.75, fmt.max_exponent)
  x = rng.standard_normal(_SHAPE)
  x[0] = rng.choice([0.0, -0.0], 16)
  x[1] = -0.0
  x[2] = tiny * rng.integers(-100, 100, 16)
  x[3, 3], x[3, 5] = np.inf, 0.0
  x[4, 3], x[4, 5] = -np.inf, np.inf
  x[5, 7] = -np.nan
  x[6] = large * rng.choice([1, -1, 0.25], 16)
  x[7, :4] = [large, 1e-6, -large, 3e4]
  return x.astype(np.float32).astype(fmt.numpy)


class TwinTest(parameterized.TestCase):

  @parameterized.product(name=tuple(_OPERATIONS), dtype=_DTYPES)
  def test_equals_the_oracle(self, name, dtype):
    twin, oracle = _OPERATIONS[name]
    for x in (_random(dtype), _special(dtype)):
      ops = lib.PortableOperations()
      with np.errstate(invalid="ignore"):
        expected = oracle(portable_oracle.PortableOracle(), x, dtype)
      bits.assert_same_bits(twin(ops, jnp.asarray(x)), expected)
      self.assertEqual(ops.certificate.elements, expected.size)
      self.assertTrue(ops.certificate.complete)

  @parameterized.product(dtype=_DTYPES, to=_DTYPES)
  def test_cast_rounds_to_nearest_and_keeps_subnormals(self, dtype, to):
    ops = lib.PortableOperations()
    for x in (_random(dtype), _special(dtype)):
      kind = formats.of(to).numpy
      with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(np.float32).astype(kind)
      if dtype != to:
        expected = np.where(
            np.isnan(expected), np.array(np.nan, kind), expected
        )
      bits.assert_same_bits(ops.cast(jnp.asarray(x), to), expected)

  def test_a_scalar_is_not_rounded_first(self):
    ops = lib.PortableOperations()
    x = jnp.asarray([-0.1, *range(1, 100)], jnp.float32)
    rounded = jnp.full_like(x, 0.1)
    wide = np.asarray(x, np.float64)
    for scalar, array, value in (
        (ops.add_scalar, ops.add, wide + 0.1),
        (ops.scale, ops.multiply, wide * 0.1),
    ):
      y = np.asarray(scalar(x, 0.1))
      bits.assert_same_bits(y, value.astype(np.float32))
      self.assertTrue((y != np.asarray(array(x, rounded))).any())

  @parameterized.parameters(*_DTYPES)
  def test_expert_linear_is_a_linear_layer_for_each_row(self, dtype):
    x = _random(dtype)
    weight = np.stack([x[:3], x[3:6], x[2:5]])
    experts = np.int32([2, 0, 3, 2, 2, 0, 3, 0])  # Nobody goes to expert 1.
    out = lib.PortableOperations().expert_linear(
        jnp.asarray(x), jnp.asarray(weight), jnp.asarray(experts), _SITE
    )
    oracle = portable_oracle.PortableOracle()
    expected = np.zeros((8, 3), x.dtype)
    for row, expert in enumerate(experts):
      if expert < 3:
        expected[row] = oracle.matmul(x[row, None], weight[expert].T, dtype)[0]
    bits.assert_same_bits(out, expected)

  @parameterized.parameters(*_DTYPES)
  def test_gate_terms_equal_the_oracle_of_the_combine(self, dtype):
    x = _random(dtype).reshape(2, 4, -1)
    gate = np.random.default_rng(1).random((2, 4), np.float32)
    contract = combine.CombineContract(
        "terms", gate_dtype="bfloat16", operand=dtype
    )
    ops = lib.PortableOperations()
    bits.assert_same_bits(
        ops.gate_terms(jnp.asarray(x), jnp.asarray(gate), contract),
        ordered_combine.gate_terms_oracle(x, gate, contract),
    )
    self.assertEqual(ops.certificate.elements, x.size)


class CombineTest(parameterized.TestCase):

  @parameterized.parameters("slot", "expert")
  def test_only_slot_order_is_one_sum(self, order):
    # 2**-25 is lost against 1 if it is added by itself; twice it is a tie that
    # the last term breaks.
    terms = np.float32([1.0, 2.0**-25, 2.0**-25, 2.0**-30]).reshape(1, 4, 1)
    ids = np.int32([[0, 1, 2, 3]])
    contract = combine.CombineContract("c", order=order, output="float32")
    expected = {"slot": 1.0 + 2.0**-23, "expert": 1.0}[order]
    expected = np.float32([[expected]])
    slots = ordered_combine.term_order(contract, jnp.asarray(ids), 0)
    bits.assert_same_bits(
        portable_oracle.PortableOracle().combine(
            terms, np.asarray(slots), contract
        ),
        expected,
    )
    bits.assert_same_bits(
        lib.PortableOperations().combine(
            jnp.asarray(terms), jnp.asarray(ids), contract, 0
        ),
        expected,
    )


class UncertainTest(parameterized.TestCase):

  def _widen_unit(self, dtype):
    """Makes many elements uncertain; the compiled code holds the constant."""
    unit = formats.of(dtype).unit_roundoff * 2.0**-6
    self.enter_context(mock.patch.object(portable_oracle, "UNIT", unit))
    lib.evaluate.clear_cache()
    self.addCleanup(lib.evaluate.clear_cache)

  @parameterized.product(name=tuple(_UNCERTAIN), dtype=_DTYPES)
  def test_uncertain_elements_are_recomputed_to_the_same_bits(
      self, name, dtype
  ):
    twin, oracle = _UNCERTAIN[name]
    x = _random(dtype)
    if name == "rsqrt":
      x = np.abs(x)
    expected = oracle(portable_oracle.PortableOracle(), x, dtype)
    self._widen_unit(dtype)
    certificate = certificate_lib.Certificate()
    out = twin(lib.PortableOperations(certificate), jnp.asarray(x))
    bits.assert_same_bits(out, expected)
    report = certificate.to_dict()
    (counts,) = report["operations"].values()
    self.assertGreater(counts["uncertain"], 0)
    self.assertLessEqual(counts["uncertain"], out.size)
    self.assertEqual(counts["recomputed"], counts["uncertain"])
    self.assertTrue(report["complete"])

  @parameterized.parameters(*_DTYPES)
  def test_an_error_within_the_bound_is_repaired(self, dtype):
    x = _random(dtype)
    expected = portable_oracle.PortableOracle().unary("exp", x, dtype)
    error = 4 * formats.of(dtype).unit_roundoff * 2.0**-6  # The bound is 8.
    value = lib._VALUES["exp"]

    def sloppy(x):
      y, bound = value(x)
      return y * (1 + error), bound

    self.enter_context(mock.patch.dict(lib._VALUES, exp=sloppy))
    lib.evaluate.clear_cache()
    wrong = np.asarray(lib.PortableOperations().exp(jnp.asarray(x)))
    self.assertTrue((wrong != expected).any())
    self._widen_unit(dtype)
    bits.assert_same_bits(
        lib.PortableOperations().exp(jnp.asarray(x)), expected
    )

  def test_certain_operations_stay_certain(self):
    self._widen_unit("float32")
    ops = lib.PortableOperations()
    for twin, _ in _CERTAIN.values():
      twin(ops, jnp.asarray(_random("float32")))
    self.assertGreater(ops.certificate.elements, 0)
    self.assertEqual(ops.certificate.uncertain, 0)

  def test_a_tie_goes_to_even(self):
    ops = lib.PortableOperations()
    step = 2.0**-23
    x = jnp.asarray([[1, step / 2], [1 + step, step / 2]], jnp.float32)
    expected = np.float32([[1], [1 + 2 * step]])
    bits.assert_same_bits(ops.sum(x, _SITE), expected)
    bits.assert_same_bits(
        ops.matmul(x, jnp.ones((2, 1), jnp.float32), _SITE), expected
    )
    self.assertEqual(ops.certificate.uncertain, 4)
    self.assertTrue(ops.certificate.complete)


class OrderTest(parameterized.TestCase):

  @hp.settings(max_examples=10)
  @hp.given(seed=hps.integers(0, 2**16), order=hps.permutations(range(16)))
  def test_permuting_the_terms_changes_no_bit(self, seed, order):
    rng = np.random.default_rng(seed)
    x = np.ldexp(rng.standard_normal(_SHAPE), rng.integers(-30, 30, _SHAPE))
    ops = lib.PortableOperations()
    order = np.array(order)
    for dtype in ("float32", "bfloat16"):
      y = jnp.asarray(x, dtype)
      turned = y[:, order]
      for run in (
          lambda v: ops.sum(v, _SITE),
          lambda v: ops.mean(v, _SITE),
          lambda v: ops.linear(v, v[:5], _SITE),
      ):
        bits.assert_same_bits(run(turned), run(y))
      bits.assert_same_bits(
          ops.softmax(turned, _SITE), ops.softmax(y, _SITE)[:, order]
      )
      contract = _float32_sum(dtype)
      ids = jnp.zeros((1, 16), jnp.int32)
      bits.assert_same_bits(
          ops.combine(turned.T[None], ids, contract, 0),
          ops.combine(y.T[None], ids, contract, 0),
      )


class ZeroTest(absltest.TestCase):

  def test_a_sum_that_vanishes_is_plus_zero(self):
    ops = lib.PortableOperations()
    x = jnp.asarray([[-0.0, -0.0], [1, -1]], jnp.float32)
    zero = np.zeros((2, 1), np.float32)
    ones = jnp.ones((2, 1), jnp.float32)
    bits.assert_same_bits(ops.sum(x, _SITE), zero)
    bits.assert_same_bits(ops.mean(x, _SITE), zero)
    bits.assert_same_bits(ops.matmul(x, ones, _SITE), zero)
    # With one term a compiler may drop the addition to +0.
    one = jnp.asarray([[-0.0], [-0.0]], jnp.float32)
    bits.assert_same_bits(ops.sum(one, _SITE), zero)
    bits.assert_same_bits(ops.mean(one, _SITE), zero)
    bits.assert_same_bits(ops.matmul(one, ones[:1], _SITE), zero)
    y = ops.combine(
        one[:, None], jnp.zeros((2, 1), jnp.int32), _float32_sum("float32"), 0
    )
    bits.assert_same_bits(y, zero)

  def test_one_operation_keeps_the_sign_of_zero(self):
    ops = lib.PortableOperations()
    zero = jnp.asarray([-0.0], jnp.float32)
    bits.assert_same_bits(ops.add(zero, zero), np.float32([-0.0]))
    bits.assert_same_bits(ops.scale(zero, 2.0), np.float32([-0.0]))
    bits.assert_same_bits(ops.sin(zero), np.float32([-0.0]))
    bits.assert_same_bits(ops.silu(zero), np.float32([-0.0]))
    bits.assert_same_bits(ops.rsqrt(zero), np.float32([-np.inf]))

  def test_c18_subnormals_are_kept(self):
    tiny = jnp.asarray([1e-20], jnp.float32)
    y = np.asarray(lib.PortableOperations().multiply(tiny, tiny))
    bits.assert_same_bits(y.view(np.uint32), np.uint32([0x000116C2]))


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters("add", "matmul", "softmax", "exp")
  def test_is_not_traced(self, name):
    twin = _OPERATIONS[name][0]
    ops = lib.PortableOperations()
    with self.assertRaisesRegex(NotImplementedError, f"{name} is being traced"):
      jax.jit(lambda x: twin(ops, x))(jnp.asarray(_random("float32")))

  @parameterized.parameters(("subnormals", "flush"), ("contraction", "fma"))
  def test_a_combine_that_flushes_or_contracts(self, field, value):
    contract = combine.CombineContract("mine", **{field: value})
    with self.assertRaisesRegex(
        NotImplementedError, f"mine has .*{field}='{value}'"
    ):
      _combine(
          lib.PortableOperations(), jnp.asarray(_random("float32")), contract
      )

  def test_a_float32_sum_that_starts_from_the_first_term(self):
    contract = combine.CombineContract("mine", start="first")
    with self.assertRaisesRegex(NotImplementedError, "start='first'"):
      _combine(
          lib.PortableOperations(), jnp.asarray(_random("float32")), contract
      )

  def test_needs_float64(self):
    with jax.enable_x64(False):
      with self.assertRaisesRegex(ValueError, "jax_enable_x64 is off"):
        lib.PortableOperations()


if __name__ == "__main__":
  absltest.main()
