"""Moved values keep their bits, subnormals and signed zeros included.

Needs no accelerator.
"""

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.numerics import formats
from moejax.numerics import moves as lib
from tests import bits

_FLOATS = (np.float32, ml_dtypes.bfloat16, np.float16)


def _values(dtype, shape, seed=0):
  """Bit patterns without NaN: zeros of both signs, subnormals, infinities."""
  uint = np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")
  random = np.random.default_rng(seed)
  raw = random.integers(0, np.iinfo(uint).max, shape, uint, endpoint=True)
  tiny = random.random(shape) < 0.4
  top = np.iinfo(uint).max // 2 + 1
  raw = np.where(tiny, raw & np.array(top + 7, uint), raw).astype(uint)
  x = raw.view(dtype)
  return np.where(np.isnan(x), np.array(0, dtype), x)


@parameterized.parameters(*_FLOATS)
class MovesTest(parameterized.TestCase):

  def test_gathers_rows_of_each_sequence(self, dtype):
    x = _values(dtype, (3, 5, 17))
    index = np.int32([[4, 0, 0], [1, 2, 3], [9, -1, 2]])
    expected = np.stack(
        [row[np.clip(i, 0, 4)] for row, i in zip(x, index)]
    )
    for run in (lib.gather_rows, jax.jit(lib.gather_rows)):
      bits.assert_same_bits(run(jnp.asarray(x), jnp.asarray(index)), expected)

  def test_selects_and_joins(self, dtype):
    x, y = _values(dtype, (3, 5, 2)), _values(dtype, (3, 5, 2), 1)
    mask = np.random.default_rng(2).random((3, 5)) < 0.5
    bits.assert_same_bits(
        lib.where_rows(jnp.asarray(mask), jnp.asarray(x), jnp.asarray(y)),
        np.where(mask[..., None], x, y),
    )
    bits.assert_same_bits(
        lib.concatenate([jnp.asarray(x), jnp.asarray(y)], 1),
        np.concatenate([x, y], 1),
    )

  def test_parts_of_two_dtypes_are_refused(self, dtype):
    x = jnp.asarray(_values(dtype, (2, 3)))
    with self.assertRaisesRegex(ValueError, "parts of dtypes"):
      lib.concatenate([x, jnp.zeros((2, 3), jnp.int32)], 1)

  def test_the_largest_is_one_of_them(self, dtype):
    x = _values(dtype, (64, 7))
    x[0] = np.array(-0.0, dtype)
    expected = np.take_along_axis(
        x, np.argmax(x.astype(np.float64), -1)[:, None], -1
    )
    found = np.array(lib.largest(jnp.asarray(x)))
    both_zero = (found == 0) & (expected == 0)
    bits.assert_same_bits(np.where(both_zero, expected, found), expected)

  def test_clamps_between_bounds_and_keeps_nan(self, dtype):
    x = _values(dtype, (300,))
    x[0] = np.nan
    expected = np.where(x > 10, np.array(10, dtype), x)
    bits.assert_same_bits(lib.clamp(jnp.asarray(x), None, 10.0), expected)
    expected = np.where(expected < -10, np.array(-10, dtype), expected)
    bits.assert_same_bits(lib.clamp(jnp.asarray(x), -10.0, 10.0), expected)


class TakeRowsTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters("float32", "bfloat16", "float16")
  def test_moves_subnormals_and_nan_without_a_change(self, dtype):
    fmt = formats.of(dtype)
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << fmt.bits, (64, 8)).astype(fmt.uint)
    words[0] = np.arange(8)  # The smallest subnormals.
    index = rng.integers(0, 64, (5, 40)).astype(np.int32)
    out = self.variant(lib.take_rows)(
        jnp.asarray(words.view(fmt.numpy)), jnp.asarray(index)
    )
    bits.assert_same_bits(np.asarray(out).view(fmt.uint), words[index])


_INDEX = np.int32([[4, 0, 0, 3], [1, 2, 3, 1], [0, 0, 0, 0]])
_MASK = np.array([[1, 0, 1, 1, 0], [0, 0, 1, 0, 1], [1, 1, 1, 0, 0]], bool)
# The move, and what computes the same with gradients of JAX's own.
_MOVES = {
    "gather_rows": (
        lambda x, y: lib.gather_rows(x, _INDEX),
        lambda x, y: jnp.take_along_axis(x, _INDEX[..., None], 1),
    ),
    "gather_thin_rows": (
        lambda x, y: lib.gather_rows(x[..., 0], _INDEX),
        lambda x, y: jnp.take_along_axis(x[..., 0], _INDEX, 1),
    ),
    "take_rows": (
        lambda x, y: lib.take_rows(x, _INDEX[:, :3] % 3),
        lambda x, y: x[_INDEX[:, :3] % 3],
    ),
    "where_rows": (
        lambda x, y: lib.where_rows(_MASK, x, y),
        lambda x, y: jnp.where(_MASK[..., None], x, y),
    ),
    "where_of_a_number": (
        lambda x, y: lib.where(_MASK, x[..., 0], 7.0),
        lambda x, y: jnp.where(_MASK, x[..., 0], jnp.array(7, x.dtype)),
    ),
    "where_that_broadcasts": (
        lambda x, y: lib.where(_MASK[..., None], x, y[:1]),
        lambda x, y: jnp.where(_MASK[..., None], x, y[:1]),
    ),
    "concatenate": (
        lambda x, y: lib.concatenate([x, y[:, :2], x[:, 1:]], 1),
        lambda x, y: jnp.concatenate([x, y[:, :2], x[:, 1:]], 1),
    ),
    "largest": (
        lambda x, y: lib.largest(x),
        lambda x, y: jnp.take_along_axis(x, jnp.argmax(x, -1)[..., None], -1),
    ),
    "clamp": (
        lambda x, y: lib.clamp(x, -2.0, 3.0),
        lambda x, y: jnp.where((x >= -2.0) & (x <= 3.0), x, jnp.zeros_like(x)),
    ),
}


class GradientTest(parameterized.TestCase):
  """Small whole numbers: sums are exact, so bits decide."""

  @parameterized.product(
      move=tuple(_MOVES), dtype=("float32", "bfloat16", "float64")
  )
  def test_the_cotangent_goes_back_to_where_a_value_came_from(
      self, move, dtype
  ):
    ours, plain = _MOVES[move]
    rng = np.random.default_rng(0)
    x, y = (
        jnp.asarray(rng.integers(-4, 5, (3, 5, 6)), dtype) for _ in range(2)
    )
    if move == "largest":  # The rule for equals is the first.
      self.assertTrue((jnp.sort(x)[..., -1] == jnp.sort(x)[..., -2]).any())
    out, expected = jax.eval_shape(ours, x, y), jax.eval_shape(plain, x, y)
    self.assertEqual((out.shape, out.dtype), (expected.shape, expected.dtype))
    cotangent = jnp.asarray(rng.integers(-9, 10, out.shape), dtype)
    for run in (lambda f: f, jax.jit):
      found = run(lambda a, b: jax.vjp(ours, a, b)[1](cotangent))(x, y)
      wanted = jax.vjp(plain, x, y)[1](cotangent)
      for mine, theirs in zip(found, wanted, strict=True):
        bits.assert_same_bits(mine, theirs)
    self.assertTrue(np.any(np.asarray(wanted[0])))

  def test_equal_cotangents_of_one_row_are_added_before_they_are_rounded(self):
    x = jnp.ones((1, 2, 4), jnp.bfloat16)
    index = jnp.zeros((1, 4), jnp.int32)
    parts = jnp.asarray([256.0, 0.5, 0.5, 1.0], jnp.bfloat16)
    cotangent = jnp.broadcast_to(parts[None, :, None], (1, 4, 4))
    pull = jax.vjp(lambda v: lib.gather_rows(v, index), x)[1]
    expected = np.zeros((1, 2, 4), ml_dtypes.bfloat16)
    expected[0, 0] = 258  # Rounded after each addition it would be 256.
    bits.assert_same_bits(pull(cotangent)[0], expected)


if __name__ == "__main__":
  absltest.main()
