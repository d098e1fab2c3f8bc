"""The selection bias and what is said of loads."""

from absl.testing import absltest
import jax.numpy as jnp
import numpy as np

from moejax.training import balance as lib
from tests import bits


class BalanceTest(absltest.TestCase):

  def test_a_bias_moves_against_the_load(self):
    counts = jnp.asarray([5, 0, 3, 4], jnp.int32)  # The mean is 3.
    bias = jnp.asarray([0.5, 0.0, -1.0, 0.25], jnp.float32)
    bits.assert_same_bits(
        lib.moved_bias(bias, counts, 0.25),
        np.float32([0.25, 0.25, -1.0, 0.0]),
    )

  def test_statistics(self):
    found = lib.statistics({
        1: np.array([4, 4, 0, 0]), 0: np.array([1, 1, 1, 1]),
    })
    self.assertEqual(list(found), ["0", "1"])
    self.assertEqual(found["0"], {
        "load": [0.25] * 4, "entropy": 1.0, "dead": [],
    })
    self.assertEqual(found["1"], {
        "load": [0.5, 0.5, 0.0, 0.0], "entropy": 0.5, "dead": [2, 3],
    })


if __name__ == "__main__":
  absltest.main()
