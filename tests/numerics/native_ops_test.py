"""Native operations: XLA's arithmetic, never farther off than its bound.

The rule of closeness: |native - portable| is at most B * 2**-24, B from
`error_bounds`, plus one spacing of the result, since either side is rounded to
the dtype once. Needs no accelerator.
"""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import combine
from moejax.numerics import formats
from moejax.numerics import native_ops as lib
from moejax.numerics import ordered_combine
from moejax.numerics.portable import error_bounds
from moejax.numerics.portable import portable_oracle
from moejax.numerics import ulp
from tests import bits

_DTYPES = ("float32", "bfloat16", "float16")
_SITE = "projection"
_UNIT = formats.FLOAT32.unit_roundoff
_OPS = lib.NativeOperations()
_BOTH = ((3, 1, 0, 2), (1, 3, 2, 0))


def _random(dtype: str, *shape: int) -> np.ndarray:
  rng = np.random.default_rng(0)
  x = np.ldexp(rng.standard_normal(shape), rng.integers(-3, 3, shape))
  return x.astype(np.float32).astype(formats.of(dtype).numpy)


def _relative(name: str, factor: float = 1.0):
  def bound(x, value):
    del x
    return factor * error_bounds.relative(name, value, np)

  return bound


def _softmax_bound(x, value):
  return error_bounds.softmax(x - x.max(-1, keepdims=True), value, np)


# name: (native on x [8, 32], portable, B from x and the value in float64).
_CLOSE = {
    "add_scalar": (
        lambda x: _OPS.add_scalar(x, 1e-3),
        lambda ops, x, dtype: ops.add(x, 1e-3, dtype),
        lambda x, value: np.abs(value) + 1e-3,  # The scalar, then the sum.
    ),
    "scale": (
        lambda x: _OPS.scale(x, 0.1),
        lambda ops, x, dtype: ops.multiply(x, 0.1, dtype),
        lambda x, value: 2 * np.abs(value),  # The factor, then the product.
    ),
    "power": (
        lambda x: _OPS.power(10.0, x / x.dtype.type(8)),
        lambda ops, x, dtype: ops.power(10.0, x / x.dtype.type(8), dtype),
        _relative("power"),
    ),
    "rsqrt": (
        lambda x: _OPS.rsqrt(abs(x)),
        lambda ops, x, dtype: ops.unary("rsqrt", abs(x), dtype),
        _relative("rsqrt"),
    ),
    "exp": (
        lambda x: _OPS.exp(x),
        lambda ops, x, dtype: ops.unary("exp", x, dtype),
        _relative("exp"),
    ),
    "cos": (
        lambda x: _OPS.cos(x),
        lambda ops, x, dtype: ops.unary("cos", x, dtype),
        _relative("cos"),
    ),
    "sin": (
        lambda x: _OPS.sin(x),
        lambda ops, x, dtype: ops.unary("sin", x, dtype),
        _relative("sin"),
    ),
    "silu": (
        lambda x: _OPS.silu(x),
        lambda ops, x, dtype: ops.unary("silu", x, dtype),
        _relative("silu"),
    ),
    "sigmoid": (
        lambda x: _OPS.sigmoid(x),
        lambda ops, x, dtype: ops.unary("sigmoid", x, dtype),
        _relative("sigmoid"),
    ),
    "softplus": (
        lambda x: _OPS.softplus(x),
        lambda ops, x, dtype: ops.unary("softplus", x, dtype),
        _relative("softplus"),
    ),
    "sqrt": (
        lambda x: _OPS.sqrt(jnp.abs(x)),
        lambda ops, x, dtype: ops.unary("sqrt", np.abs(x), dtype),
        _relative("sqrt"),
    ),
    "mean": (
        lambda x: _OPS.mean(x, _SITE),
        lambda ops, x, dtype: ops.mean(x, True, dtype),
        lambda x, value: error_bounds.mean(x, np),
    ),
    "sum": (
        lambda x: _OPS.sum(x, _SITE),
        lambda ops, x, dtype: ops.sum(x, -1, True, dtype),
        lambda x, value: error_bounds.total(x, np),
    ),
    "softmax": (
        lambda x: _OPS.softmax(x, _SITE),
        lambda ops, x, dtype: ops.softmax(x, -1, dtype),
        _softmax_bound,
    ),
    "matmul": (
        lambda x: _OPS.matmul(x, x.T, _SITE),
        lambda ops, x, dtype: ops.matmul(x, x.T, dtype),
        lambda x, value: error_bounds.dot(
            error_bounds.norm(x, np), error_bounds.norm(x.T, np, 0), 32
        ),
    ),
    "linear": (
        lambda x: _OPS.linear(x, x[:5], _SITE),
        lambda ops, x, dtype: ops.matmul(x, x[:5].T, dtype),
        lambda x, value: error_bounds.dot(
            error_bounds.norm(x, np), error_bounds.norm(x[:5].T, np, 0), 32
        ),
    ),
}
_SAME = {
    "add": (
        lambda x: _OPS.add(x, x[::-1]),
        lambda ops, x, dtype: ops.add(x, x[::-1], dtype),
    ),
    "multiply": (
        lambda x: _OPS.multiply(x, x[::-1]),
        lambda ops, x, dtype: ops.multiply(x, x[::-1], dtype),
    ),
    "divide": (
        lambda x: _OPS.divide(x, x[::-1]),
        lambda ops, x, dtype: ops.divide(x, x[::-1], dtype),
    ),
    "scale_by_a_power_of_two": (
        lambda x: _OPS.scale(x, 0.125),
        lambda ops, x, dtype: ops.multiply(x, 0.125, dtype),
    ),
}


def _assert_close(case, native, portable, bound):
  case.assertEqual((native.shape, native.dtype),
                   (portable.shape, portable.dtype))
  native, wide = np.asarray(native, np.float64), portable.astype(np.float64)
  allowed = bound * _UNIT + ulp.spacing(wide, portable.dtype.name)
  case.assertLessEqual(np.max(np.abs(native - wide) / allowed), 1.0)


class CloseTest(parameterized.TestCase):

  @parameterized.product(name=tuple(_CLOSE), dtype=_DTYPES)
  def test_is_within_the_bound_of_portable(self, name, dtype):
    native, portable, bound = _CLOSE[name]
    x = _random(dtype, 8, 32)
    expected = portable(portable_oracle.PortableOracle(), x, dtype)
    wide = x.astype(np.float64)
    _assert_close(
        self,
        native(jnp.asarray(x)),
        expected,
        bound(wide, expected.astype(np.float64)),
    )

  @parameterized.product(name=tuple(_SAME), dtype=_DTYPES)
  def test_one_float32_operation_on_normal_numbers_is_portable(
      self, name, dtype
  ):
    native, portable = _SAME[name]
    x = _random(dtype, 8, 32)
    bits.assert_same_bits(
        native(jnp.asarray(x)), portable(portable_oracle.PortableOracle(), x,
                                         dtype)
    )

  @parameterized.parameters("float32", "bfloat16", "float16")
  def test_cast_is_the_portable_cast_of_normal_numbers(self, to):
    for dtype in _DTYPES:
      x = _random(dtype, 8, 32)
      bits.assert_same_bits(
          _OPS.cast(jnp.asarray(x), to),
          x.astype(np.float32).astype(formats.of(to).numpy),
      )

  def test_c18_subnormals_are_flushed_on_a_cpu(self):
    if jax.default_backend() != "cpu":
      self.skipTest("That XLA flushes subnormals was seen on CPUs.")
    tiny = jnp.asarray([1e-20], jnp.float32)
    bits.assert_same_bits(_OPS.multiply(tiny, tiny), np.zeros(1, np.float32))


class ExpertLinearTest(parameterized.TestCase):

  def _operands(self, dtype):
    weight = _random(dtype, 4, 6, 32)
    return _random(dtype, 9, 32), weight

  @parameterized.product(
      dtype=_DTYPES,
      experts=(
          (0, 3, 1, 0, 3, 3, 1, 0, 3),  # Nobody goes to expert 2.
          (4, 2, 4, 1, 2, 2, 4, 4, 1),  # First and last empty, rows unowned.
          (4,) * 9,
      ),
  )
  def test_traced_and_not_are_within_the_bound_of_a_loop_over_rows(
      self, dtype, experts
  ):
    rows, weight = self._operands(dtype)
    experts = np.int32(experts)
    oracle = portable_oracle.PortableOracle()
    expected = np.zeros((9, 6), rows.dtype)
    bound = np.zeros((9, 6))
    for row, expert in enumerate(experts):
      if expert == 4:
        continue
      matrix = weight[expert].T
      expected[row] = oracle.matmul(rows[row, None], matrix, dtype)[0]
      bound[row] = error_bounds.dot(
          error_bounds.norm(rows[row].astype(float), np),
          error_bounds.norm(matrix.astype(float), np, 0),
          32,
      )
    owned = experts < 4

    def fn(*args):
      return _OPS.expert_linear(*args, _SITE)

    for run in (fn, jax.jit(fn)):
      out = np.asarray(run(*map(jnp.asarray, (rows, weight, experts))))
      if owned.any():
        _assert_close(self, out[owned], expected[owned], bound[owned])
      bits.assert_same_bits(out[~owned], expected[~owned])  # +0.


class CombineTest(parameterized.TestCase):

  @parameterized.parameters("slot", "expert", "explicit")
  def test_runs_as_its_contract_says(self, order):
    rng = np.random.default_rng(0)
    expert_out = _random("bfloat16", 5, 4, 8)
    gate = rng.random((5, 4), np.float32)
    ids = rng.random((5, 8)).argsort(-1)[:, :4].astype(np.int32)
    contract = combine.CombineContract(
        "A",
        accumulator="bfloat16",
        order=order,
        permutations=_BOTH if order == "explicit" else (),
    )
    expected = ordered_combine.ordered_combine_oracle(
        expert_out, gate, ids, contract, layer=1
    )

    def fn(expert_out, gate, ids):
      terms = _OPS.gate_terms(expert_out, gate, contract)
      return _OPS.combine(terms, ids, contract, 1)

    for run in (fn, jax.jit(fn)):
      bits.assert_same_bits(
          run(*map(jnp.asarray, (expert_out, gate, ids))), expected
      )


if __name__ == "__main__":
  absltest.main()
