"""Operations of a backward pass: the oracle exact, the twin as the oracle.

Expected values are rationals or 200 bits, rounded to float64, float32 and the
dtype in turn. Needs no accelerator.
"""

import fractions
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import mpmath
import numpy as np

from moejax.numerics import formats
from moejax.numerics.portable import gradient_ops
from moejax.numerics.portable import gradient_oracle as lib
from moejax.numerics.portable import portable_oracle
from tests import bits

_BITS = 200
_DTYPES = ("float32", "bfloat16")
_U = formats.FLOAT64.unit_roundoff


def _values(seed: int, dtype: str, shape=(6, 8)) -> np.ndarray:
  """Normal values over many magnitudes, with zeros of both signs."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 2, shape)
  x.reshape(-1)[:4] = 0.0, -0.0, 1e-40, -1e-40
  return x.astype(np.float32).astype(formats.of(dtype).numpy)


def _probabilities(seed: int, dtype: str) -> np.ndarray:
  weights = np.exp(_values(seed, "float32").astype(np.float64))
  return (weights / weights.sum(-1, keepdims=True)).astype(
      formats.of(dtype).numpy
  )


def _exact(fn, *arrays) -> np.ndarray:
  """Applies a function of rationals element by element, as mpmath numbers."""
  with mpmath.workprec(_BITS):
    rows = [
        [fn(*(mpmath.mpf(float(v)) for v in row)) for row in zip(*flat)]
        for flat in zip(*(a.reshape(len(a), -1) for a in arrays))
    ]
  return np.array(rows, object)


def _round(values: np.ndarray, dtype: str) -> np.ndarray:
  with mpmath.workprec(_BITS), np.errstate(all="ignore"):
    wide = np.array([float(v) for v in values.reshape(-1)])
    out = wide.astype(np.float32).astype(formats.of(dtype).numpy)
  return out.reshape(values.shape)


def _silu_slope(g, x):
  """From tanh: another formula than the library's."""
  s = (1 + mpmath.tanh(x / 2)) / 2
  return g * (s + x * s * (1 - s))


def _softmax_backward(g, y):
  rational = np.vectorize(fractions.Fraction)
  g, y = (rational(v.astype(np.float64)) for v in (g, y))
  return y * g - y * (g * y).sum(-1, keepdims=True)


def _log_softmax_backward(g, y):
  with mpmath.workprec(_BITS):
    g, y = (np.vectorize(mpmath.mpf)(v.astype(np.float64)) for v in (g, y))
    weights = np.vectorize(mpmath.exp, otypes=[object])(y)
    return g - weights * g.sum(-1, keepdims=True)


# name: (the oracle, the twin, the exact value), each of g and y.
_OPERATIONS = {
    "silu_backward": (
        lambda ops, g, y, dtype: ops.silu_backward(g, y, dtype),
        lambda ops, g, y: ops.silu_backward(g, y),
        lambda g, y: _exact(_silu_slope, g, y),
    ),
    "softmax_backward": (
        lambda ops, g, y, dtype: ops.softmax_backward(g, y, -1, dtype),
        lambda ops, g, y: ops.softmax_backward(g, y),
        _softmax_backward,
    ),
    "log_softmax_backward": (
        lambda ops, g, y, dtype: ops.log_softmax_backward(g, y, -1, dtype),
        lambda ops, g, y: ops.log_softmax_backward(g, y),
        _log_softmax_backward,
    ),
    "product": (
        lambda ops, g, y, dtype: ops.fused(g, -0.1, y, g, False, dtype),
        lambda ops, g, y: ops.fused(g, -0.1, y, g, False),
        lambda g, y: _exact(
            lambda g, y: g - mpmath.mpf(0.1) * y * g, g, y
        ),
    ),
    "quotient": (
        lambda ops, g, y, dtype: ops.fused(
            y, -0.1, g, _divisor(g), True, dtype
        ),
        lambda ops, g, y: ops.fused(
            y, -0.1, g, jnp.asarray(_divisor(np.asarray(g))), True
        ),
        lambda g, y: _exact(
            lambda g, y, z: y - mpmath.mpf(0.1) * g / z, g, y, _divisor(g)
        ),
    ),
    "lerp": (
        lambda ops, g, y, dtype: ops.lerp(g, y, 1 - 0.9, dtype),
        lambda ops, g, y: ops.lerp(g, y, 1 - 0.9),
        lambda g, y: _exact(
            lambda g, y: g + mpmath.mpf(1 - 0.9) * (y - g), g, y
        ),
    ),
}


def _divisor(x: np.ndarray) -> np.ndarray:
  return (np.abs(x.astype(np.float64)) + 3.0).astype(x.dtype)


def _operands(name: str, dtype: str):
  second = _probabilities if name == "softmax_backward" else _values
  g, y = _values(1, dtype), second(2, dtype)
  if name == "log_softmax_backward":
    y = np.minimum(y, np.zeros_like(y))
  return g, y


class OracleTest(parameterized.TestCase):

  @parameterized.product(name=tuple(_OPERATIONS), dtype=_DTYPES)
  def test_equals_the_exact_value_rounded_in_turn(self, name, dtype):
    oracle, _, expected = _OPERATIONS[name]
    g, y = _operands(name, dtype)
    actual = oracle(lib.GradientOracle(), g, y, dtype)
    wanted = _round(expected(g, y), dtype)
    # A sum that vanishes is +0, whatever the signs of its terms.
    zero = np.asarray(wanted == 0) & np.asarray(actual == 0)
    bits.assert_same_bits(
        np.where(zero, np.abs(actual), actual),
        np.where(zero, np.abs(wanted), wanted),
    )

  @parameterized.product(name=tuple(_OPERATIONS), dtype=_DTYPES)
  def test_uncertain_elements_are_computed_again(self, name, dtype):
    """A wide unit makes all uncertain, so every element takes that way."""
    oracle, _, _ = _OPERATIONS[name]
    g, y = _operands(name, dtype)
    plain = oracle(lib.GradientOracle(), g, y, dtype)
    with mock.patch.object(portable_oracle, "UNIT", 2.0**-6):
      ops = lib.GradientOracle()
      again = oracle(ops, g, y, dtype)
    self.assertGreater(ops.certificate.uncertain, g.size // 2)
    self.assertTrue(ops.certificate.complete)
    nonzero = np.asarray(plain != 0)
    bits.assert_same_bits(again[nonzero], plain[nonzero])

  @parameterized.product(name=tuple(_OPERATIONS), dtype=_DTYPES)
  def test_no_value_lies_beyond_its_bound(self, name, dtype):
    """Before it is rounded, in NumPy and in XLA."""
    oracle, twin, expected = _OPERATIONS[name]
    g, y = _operands(name, dtype)
    found = []

    def settle(self, name, y, bound, dtype, element):
      found.append((y, bound))
      return np.zeros(np.shape(y), formats.of(dtype).numpy)

    def run(self, name, operands, dtype, element=None, value=None):
      wide = [jnp.asarray(np.asarray(x).astype(np.float64)) for x in operands]
      found.append(jax.jit(value)(*wide))
      return jnp.zeros(found[-1][0].shape, dtype)

    with mock.patch.object(lib.GradientOracle, "_settle", settle):
      oracle(lib.GradientOracle(), g, y, dtype)
    with mock.patch.object(gradient_ops.PortableGradientOps, "_run", run):
      ops = gradient_ops.PortableGradientOps()
      twin(ops, jnp.asarray(g), jnp.asarray(y))
    exact_values = expected(g, y).reshape(-1)
    self.assertLen(found, 2)
    for value, bound in found:
      value, bound = np.broadcast_arrays(value, bound)
      with mpmath.workprec(_BITS):
        for v, b, e in zip(value.flat, bound.flat, exact_values, strict=True):
          e = mpmath.mpf(e.numerator) / e.denominator if isinstance(
              e, fractions.Fraction
          ) else e
          self.assertLessEqual(abs(mpmath.mpf(float(v)) - e), float(b) * _U)

  def test_rows_are_added_one_at_a_time_in_their_order(self):
    """In bfloat16 256 + 1 is 256, so the order of three rows is visible."""
    rows = np.array([[256.0], [1.0], [1.0]], formats.of("bfloat16").numpy)
    target = np.zeros((2, 1), rows.dtype)
    ops = lib.GradientOracle()
    out = ops.add_rows(target, [1, 1, 1], rows, "bfloat16")
    self.assertEqual(out.astype(np.float32).tolist(), [[0.0], [256.0]])
    out = ops.add_rows(target, [1, 1, 1], rows[::-1], "bfloat16")
    self.assertEqual(out.astype(np.float32).tolist(), [[0.0], [258.0]])

  @parameterized.parameters(([],), ([3],), ([2, 0, 2, 2, 1, 0],))
  def test_turns_hold_each_place_once_and_keep_the_order(self, index):
    groups = lib.in_turn(np.array(index, np.int64))
    for group in groups:
      self.assertLen(set(np.array(index)[group].tolist()), len(group))
    for place in set(index):
      rows = [r for group in groups for r in group if index[r] == place]
      self.assertEqual(rows, [r for r, p in enumerate(index) if p == place])

  def test_the_loss_leaves_out_rows_without_a_target(self):
    x = np.log(np.float32([[0.5, 0.5], [0.25, 0.75], [0.9, 0.1]]))
    ops = lib.GradientOracle()
    targets = np.array([1, -1, 0])
    loss = ops.nll_loss(x, targets, "float32")
    mean = -(x[0, 1].astype(np.float64) + x[2, 0].astype(np.float64)) / 2
    bits.assert_same_bits(loss, np.float32(mean))
    g = ops.nll_loss_backward(np.float32(3), x.shape, targets, "float32")
    bits.assert_same_bits(g, np.float32([[0, -1.5], [0, 0], [-1.5, 0]]))


class TwinTest(parameterized.TestCase):

  @parameterized.product(name=tuple(_OPERATIONS), dtype=_DTYPES)
  def test_has_the_bits_of_the_oracle(self, name, dtype):
    oracle, twin, _ = _OPERATIONS[name]
    g, y = _operands(name, dtype)
    ops = gradient_ops.PortableGradientOps()
    bits.assert_same_bits(
        twin(ops, jnp.asarray(g), jnp.asarray(y)),
        oracle(lib.GradientOracle(), g, y, dtype),
    )
    self.assertTrue(ops.certificate.complete)

  def test_cube_log_softmax_loss_and_rows(self):
    x = _values(3, "float32")
    ops, oracle = gradient_ops.PortableGradientOps(), lib.GradientOracle()
    bits.assert_same_bits(
        ops.cube(jnp.asarray(x)), oracle.power(x, 3.0, "float32")
    )
    log = oracle.log_softmax(x, -1, "float32")
    bits.assert_same_bits(ops.log_softmax(jnp.asarray(x)), log)
    targets = np.array([0, 7, -1, 3, 3, -1])
    bits.assert_same_bits(
        ops.nll_loss(jnp.asarray(log), targets),
        oracle.nll_loss(log, targets, "float32"),
    )
    g = np.float32(0.3)
    bits.assert_same_bits(
        ops.nll_loss_backward(jnp.asarray(g), x.shape, targets),
        oracle.nll_loss_backward(g, x.shape, targets, "float32"),
    )
    index, start = np.array([2, 0, 2, 2, 1, 0]), np.zeros((4, 8), np.float32)
    bits.assert_same_bits(
        ops.add_rows(start, index, x),
        oracle.add_rows(start, index, x, "float32"),
    )

  @parameterized.parameters(((1, 8),), ((8,),), ((6, 1),), ((1, 1),))
  def test_a_sum_to_a_shape_is_one_sum(self, shape):
    x = _values(4, "bfloat16")
    out = gradient_ops.PortableGradientOps().sum_to(jnp.asarray(x), shape)
    wide = x.astype(np.float64)
    axes = tuple(i for i, n in enumerate((1, *shape)[-2:]) if n == 1)
    wanted = wide.sum(axes, keepdims=True).reshape(shape)
    bits.assert_same_bits(
        out, wanted.astype(np.float32).astype(x.dtype)
    )


if __name__ == "__main__":
  absltest.main()
