"""Error bounds: no computed value lies farther away than its bound says.

Measures the functions and reductions that portable arithmetic is made of, in
NumPy and in XLA, against 160 bits, at arguments that are hard for them: angles
next to multiples of pi / 2 up to 2**15, tiny values, long sums that cancel.
The bounds are far above what these machines return; a machine on which one of
them fails has no portable arithmetic. XLA's float32 functions are held by the
same bounds, which makes them the rule for native operations.

Needs no accelerator.
"""


from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
import mpmath
import numpy as np

from moejax.numerics import formats
from moejax.numerics.portable import error_bounds as lib
from moejax.numerics.portable import exact
from moejax.numerics.portable import portable_ops
from moejax.numerics.portable import portable_oracle
from moejax.numerics import ulp

_U64 = formats.FLOAT64.unit_roundoff
_U32 = formats.FLOAT32.unit_roundoff
_BITS = 160
_POSITIVE = ("rsqrt", "sqrt", "reciprocal", "log")


def _float32(x) -> np.ndarray:
  """float32 values as float64: the arguments of portable arithmetic."""
  return np.asarray(x, np.float32).astype(np.float64)


def _angles() -> np.ndarray:
  """Angles up to 2**15; many lie as near to a zero of cos or sin as any."""
  rng = np.random.default_rng(0)
  count = np.arange(1, 20861)
  with mpmath.workprec(_BITS):
    zeros = [int(k) * mpmath.pi / 2 for k in count]
    near = _float32([float(zero) for zero in zeros])
    distance = np.array(
        [float(abs(a - z)) for a, z in zip(near.tolist(), zeros, strict=True)]
    )
  nearest = [
      near[count % 2 == odd][distance[count % 2 == odd].argsort()[:40]]
      for odd in (0, 1)
  ]
  return np.concatenate([
      *nearest,
      _float32(rng.uniform(-(2.0**15), 2.0**15, 100)),
      _float32(rng.uniform(-7, 7, 100)),
      _float32(10.0 ** rng.uniform(-37, 0, 40)),
      _float32([2.0**15, np.pi, np.pi / 2, 1.0, -1.0]),
  ])


def _numbers() -> np.ndarray:
  """Values of either sign, tiny to where exp over- or underflows."""
  rng = np.random.default_rng(0)
  tiny = _float32(10.0 ** rng.uniform(-37, 0, 40))
  return np.concatenate([
      _float32(rng.uniform(-85, 85, 150)),
      _float32(rng.uniform(-600, 600, 50)),
      _float32(rng.standard_normal(100)),
      tiny,
      -tiny,
  ])


def _positive() -> np.ndarray:
  rng = np.random.default_rng(0)
  return np.concatenate([
      _float32(10.0 ** rng.uniform(-37, 38, 200)),
      _float32(rng.uniform(0.5, 2, 100)),
      _float32([1.0, 1 - 2.0**-24, 1 + 2.0**-23, 2.0**-149, 2.0**127]),
  ])


def _arguments(name: str) -> np.ndarray:
  if name in _POSITIVE:
    return _positive()
  if name in ("cos", "sin"):
    return _angles()
  return _numbers()


def _distance(computed: np.ndarray, exact_values: list) -> np.ndarray:
  """|computed - exact| as float64; the difference is taken in 160 bits."""
  with mpmath.workprec(_BITS):
    pairs = zip(computed.reshape(-1).tolist(), exact_values, strict=True)
    distance = [float(abs(mpmath.mpf(a) - b)) for a, b in pairs]
  return np.reshape(distance, computed.shape)


def _exact_unary(name: str, x: np.ndarray) -> list:
  with mpmath.workprec(_BITS):
    return [exact._UNARY[name](mpmath.mpf(v)) for v in x.tolist()]


def _exact_power(base: float, x: np.ndarray) -> list:
  with mpmath.workprec(_BITS):
    return [mpmath.power(mpmath.mpf(base), mpmath.mpf(v)) for v in x.tolist()]


def _exact_softmax(x: np.ndarray) -> list:
  out = []
  with mpmath.workprec(_BITS):
    for row in x.tolist():
      weights = [mpmath.exp(mpmath.mpf(v)) for v in row]
      out += [weight / mpmath.fsum(weights) for weight in weights]
  return out


def _exact_dots(a: np.ndarray, b: np.ndarray) -> list:
  with mpmath.workprec(1000):
    return [
        mpmath.fdot(row, column)
        for row in a.tolist()
        for column in b.T.tolist()
    ]


def _terms() -> np.ndarray:
  """[4, 1000] values over 40 binades; the last two rows nearly cancel."""
  rng = np.random.default_rng(0)
  x = np.ldexp(rng.standard_normal((4, 1000)), rng.integers(-20, 20, (4, 1000)))
  x[2:, 500:] = -x[2:, :500] * (1 + 2.0**-20 * rng.random((2, 500)))
  return _float32(x)


class FunctionsTest(parameterized.TestCase):

  def _assert_within(self, name, computed, bound, exact_values):
    """Fails where a value is off by more than the bound, both float64."""
    distance = _distance(computed, exact_values)
    # What underflows float64 or is flushed by XLA rounds to zero anyway.
    allowed = bound * _U64 + 2.0**-1022
    worst = np.max(distance / allowed)
    self.assertLessEqual(worst, 1.0, name)
    self.assertGreater(worst, 0.0, name)  # Some values must be rounded.

  @parameterized.parameters(*portable_oracle.UNARY)
  def test_numpy_is_within_the_bound(self, name):
    x = _arguments(name)
    y = portable_oracle.unary_value(name, x)
    self._assert_within(
        name, y, lib.relative(name, y, np), _exact_unary(name, x)
    )

  @parameterized.parameters(
      "rsqrt", "exp", "cos", "sin", "silu", "sigmoid", "softplus", "sqrt"
  )
  def test_xla_is_within_the_bound(self, name):
    x = _arguments(name)
    y, bound = map(np.asarray, jax.jit(portable_ops._VALUES[name])(x))
    # The operation reports the stated bound; the product may round otherwise.
    np.testing.assert_allclose(bound, lib.relative(name, y, np), rtol=1e-12)
    self._assert_within(name, y, bound, _exact_unary(name, x))

  @parameterized.parameters(10000.0, 1000000.0, 1.5)
  def test_power_is_within_the_bound(self, base):
    rng = np.random.default_rng(0)
    x = _float32(np.concatenate([
        np.arange(0, 1, 1 / 64), rng.uniform(-6, 6, 100)
    ]))
    expected = _exact_power(base, x)
    for y in (np.power(base, x), jax.jit(jnp.power)(jnp.float64(base), x)):
      y = np.asarray(y)
      self._assert_within("power", y, lib.relative("power", y, np), expected)

  def test_a_quotient_is_within_the_bound(self):
    x = _positive()
    y = x[::-1] / x
    with mpmath.workprec(_BITS):
      expected = [
          mpmath.mpf(a) / mpmath.mpf(b)
          for a, b in zip(x[::-1].tolist(), x.tolist(), strict=True)
      ]
    self._assert_within("divide", y, lib.relative("divide", y, np), expected)


class ReductionsTest(parameterized.TestCase):

  def _assert_within(self, y, bound, exact_values):
    distance = _distance(np.asarray(y), exact_values)
    allowed = np.broadcast_to(bound, distance.shape) * _U64
    self.assertTrue((distance <= allowed).all(), np.max(distance / allowed))
    self.assertGreater(distance.max(), 0.0)

  def test_sums_in_any_order_are_within_the_bound(self):
    x = _terms()
    expected = _exact_dots(x, np.ones((1000, 1)))
    chain = np.cumsum(x, -1)[:, -1:]
    backwards = np.cumsum(x[:, ::-1], -1)[:, -1:]
    rising = np.cumsum(
        np.take_along_axis(x, np.abs(x).argsort(-1), -1), -1
    )[:, -1:]
    compiled = jax.jit(lambda x: jnp.sum(x, -1, keepdims=True))(x)
    for y in (x.sum(-1, keepdims=True), chain, backwards, rising, compiled):
      self._assert_within(y, lib.total(x, np), expected)

  def test_means_are_within_the_bound(self):
    x = _terms()
    with mpmath.workprec(1000):
      expected = [v / 1000 for v in _exact_dots(x, np.ones((1000, 1)))]
    compiled = jax.jit(lambda x: jnp.mean(x, -1, keepdims=True))(x)
    for y in (x.mean(-1, keepdims=True), compiled):
      self._assert_within(y, lib.mean(x, np), expected)

  def test_dot_products_are_within_the_bound(self):
    a, b = _terms(), _float32(np.random.default_rng(1).random((1000, 3)) - 0.5)
    expected = _exact_dots(a, b)
    bound = lib.dot(lib.norm(a, np), lib.norm(b, np, 0), 1000)
    for y in (a @ b, jax.jit(jnp.matmul)(a, b), np.cumsum(
        a[:, :, None] * b, 1
    )[:, -1]):
      self._assert_within(y, bound, expected)

  def test_softmax_is_within_the_bound(self):
    rng = np.random.default_rng(0)
    spread = 2.0 ** np.arange(-3, 5)[:, None]
    x = _float32(spread * rng.standard_normal((8, 64)))
    expected = _exact_softmax(x)
    shifted = x - x.max(-1, keepdims=True)
    weights = np.exp(shifted)
    compiled = jax.jit(lambda x: jax.nn.softmax(x, -1))(x)
    for y in (weights / weights.sum(-1, keepdims=True), compiled):
      y = np.asarray(y)
      self._assert_within(y, lib.softmax(shifted, y, np), expected)


class Float32Test(parameterized.TestCase):
  """XLA's float32 functions: bound * 2**-24 and half a spacing."""

  def _assert_within(self, y, bound, exact_values):
    y = np.asarray(y)
    self.assertEqual(y.dtype, np.float32)
    with mpmath.workprec(_BITS):
      value = np.array([float(v) for v in exact_values]).reshape(y.shape)
    # XLA on a CPU flushes what is below the normal numbers.
    normal = (np.abs(value) >= 2.0**-126) & (np.abs(value) < 2.0**127)
    distance = _distance(y.astype(np.float64), exact_values)
    allowed = bound * _U32 + ulp.spacing(value, "float32") / 2
    self.assertGreater(normal.sum(), normal.size / 2)
    self.assertTrue((distance <= allowed)[normal].all())
    self.assertGreater(distance[normal].max(), 0.0)

  @parameterized.parameters(
      ("rsqrt", lax.rsqrt),
      ("exp", jnp.exp),
      ("cos", jnp.cos),
      ("sin", jnp.sin),
      ("silu", lambda x: x / (1.0 + jnp.exp(-x))),
      ("sigmoid", lambda x: 1.0 / (1.0 + jnp.exp(-x))),
      ("softplus", lambda x: jnp.logaddexp(x, 0.0)),
      ("sqrt", jnp.sqrt),
  )
  def test_a_function_is_within_the_bound(self, name, fn):
    x = _arguments(name)
    x = x[np.abs(x) >= 2.0**-126]
    expected = _exact_unary(name, x)
    value = np.array([float(v) for v in expected])
    self._assert_within(
        jax.jit(fn)(x.astype(np.float32)),
        lib.relative(name, value, np),
        expected,
    )

  @parameterized.parameters(10000.0, 1000000.0)
  def test_power_is_within_the_bound(self, base):
    x = _float32(np.arange(0, 1, 1 / 128))
    expected = _exact_power(base, x)
    value = np.array([float(v) for v in expected])
    self._assert_within(
        jax.jit(jnp.power)(jnp.float32(base), x.astype(np.float32)),
        lib.relative("power", value, np),
        expected,
    )

  def test_sums_means_and_dot_products_are_within_the_bound(self):
    x = _terms()[:2]
    ones = np.ones((1000, 1))
    expected = _exact_dots(x, ones)
    narrow = x.astype(np.float32)
    self._assert_within(
        jax.jit(lambda x: jnp.sum(x, -1, keepdims=True))(narrow),
        lib.total(x, np),
        expected,
    )
    self._assert_within(
        jax.jit(jnp.matmul)(narrow, ones.astype(np.float32)),
        lib.dot(lib.norm(x, np), lib.norm(ones, np, 0), 1000),
        expected,
    )
    with mpmath.workprec(_BITS):
      expected = [value / 1000 for value in expected]
    self._assert_within(
        jax.jit(lambda x: jnp.mean(x, -1, keepdims=True))(narrow),
        lib.mean(x, np),
        expected,
    )

  def test_softmax_is_within_the_bound(self):
    rng = np.random.default_rng(0)
    spread = 2.0 ** np.arange(-3, 5)[:, None]
    x = _float32(spread * rng.standard_normal((8, 64)))
    expected = _exact_softmax(x)
    value = np.array([float(v) for v in expected]).reshape(x.shape)
    shifted = x - x.max(-1, keepdims=True)
    self._assert_within(
        jax.jit(lambda x: jax.nn.softmax(x, -1))(x.astype(np.float32)),
        lib.softmax(shifted, value, np),
        expected,
    )


class BoundTest(absltest.TestCase):

  def test_a_dot_product_is_bounded_by_the_norms_and_the_length(self):
    a, b = np.float64([[3, 4]]), np.float64([[5], [12]])
    self.assertAlmostEqual(
        float(lib.dot(lib.norm(a, np), lib.norm(b, np, 0), 2)[0, 0]),
        3 * 5 * 13,
        delta=0.002 * 195,
    )

  def test_the_bounds_grow_with_the_terms(self):
    x = np.float64([[1, -2, 3]])
    self.assertAlmostEqual(float(lib.total(x, np)[0, 0]), 18, delta=0.02)
    self.assertAlmostEqual(float(lib.mean(x, np)[0, 0]), 10, delta=0.011)
    self.assertAlmostEqual(
        float(lib.relative("exp", np.float64(-2), np)), 16, delta=0.017
    )


if __name__ == "__main__":
  absltest.main()
