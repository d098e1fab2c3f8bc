"""Clamp, silu times up, and their gradient: ties, masks, the definition.

Needs no accelerator.
"""

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from moejax.contracts import grouped_mlp
from moejax.numerics.grouped import activation as lib
from tests import bits

_ZERO = jnp.uint32(0)


def _around(limit: float, dtype) -> np.ndarray:
  """-limit and limit, each with its two neighbours."""
  ends = np.array([-limit, limit]).astype(dtype)
  word = ends.view(f"u{ends.itemsize}")
  return np.concatenate([
      (word.astype(np.int64) + step).astype(word.dtype).view(ends.dtype)
      for step in (-1, 0, 1)
  ])


def _gradients(gate, up, d_out, limit, dtype):
  contract = grouped_mlp.of_chain("portable", clamp_limit=limit)
  operands = [np.asarray(v).astype(dtype) for v in (gate, up, d_out)]
  found = lib.backward(*map(jnp.asarray, operands), contract, _ZERO)
  for got, wanted in zip(
      found, lib.backward_oracle(*operands, limit), strict=True
  ):
    bits.assert_same_bits(got, wanted)
  return [np.asarray(v) for v in found]


class ClampTest(parameterized.TestCase):

  @parameterized.product(
      limit=(7.0, 10.0), dtype=("bfloat16", "float16", "float32")
  )
  def test_m17_a_tie_passes_the_gradient(self, limit, dtype):
    dtype = jnp.dtype(dtype)
    values = _around(limit, dtype)
    wide = values.astype(np.float64)
    one = np.ones(6)
    d_gate, _ = _gradients(values, one, one, limit, dtype)
    np.testing.assert_array_equal(d_gate != 0, wide <= limit)
    _, d_up = _gradients(one, values, one, limit, dtype)
    np.testing.assert_array_equal(d_up != 0, np.abs(wide) <= limit)
    # Both sides of every bound are there, and the bounds themselves.
    self.assertEqual(np.sum(np.abs(wide) == limit), 2)
    self.assertEqual(np.sum(np.abs(wide) > limit), 2)

  def test_m17_a_tie_has_the_gradient_of_the_function_below(self):
    tie, below = np.float64([7.0]), np.float64([np.nextafter(7.0, 0)])
    one = np.ones(1)
    contract = grouped_mlp.of_chain("native", clamp_limit=7.0)
    gradients = [
        np.asarray(lib.backward(
            *map(jnp.asarray, (v, one, one)), contract, _ZERO
        )[0])
        for v in (tie, below)
    ]
    np.testing.assert_allclose(*gradients, rtol=1e-12)

  def test_m17_values_beyond_are_the_limit(self):
    contract = grouped_mlp.of_chain("native", clamp_limit=7.0)
    gate, up = np.float64([9.0, -9.0, 1.0]), np.float64([-9.0, 1.0, 9.0])
    _, out = lib.forward(jnp.asarray(gate), jnp.asarray(up), contract, _ZERO)
    held = np.minimum(gate, 7)
    np.testing.assert_allclose(
        out, held / (1 + np.exp(-held)) * np.clip(up, -7, 7), rtol=1e-14
    )


class TwinTest(parameterized.TestCase):

  @parameterized.product(
      dtype=("bfloat16", "float16", "float32"), limit=(None, 1.0)
  )
  def test_bits_of_the_definition(self, dtype, limit):
    dtype = jnp.dtype(dtype)
    rng = np.random.default_rng(0)
    gate, up, d_out = (
        (rng.standard_normal((64, 33)) * 3).astype(dtype) for _ in range(3)
    )
    contract = grouped_mlp.of_chain("portable", clamp_limit=limit)
    found = lib.forward(jnp.asarray(gate), jnp.asarray(up), contract, _ZERO)
    for got, wanted in zip(
        found, lib.forward_oracle(gate, up, limit), strict=True
    ):
      bits.assert_same_bits(got, wanted)
    _gradients(gate, up, d_out, limit, dtype)


if __name__ == "__main__":
  absltest.main()
