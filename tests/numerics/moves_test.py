"""Moved values keep their bits, subnormals and signed zeros included.

Needs no accelerator.
"""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

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


if __name__ == "__main__":
  absltest.main()
