"""Rows by expert: gathered, multiplied and put back, no bit changed.

Needs no accelerator.
"""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from moejax.numerics import expert_rows as lib
from tests import bits


def _outer_sum(x: jax.Array, weight: jax.Array) -> jax.Array:
  """Stands for a linear layer: exact, and depends on one row only."""
  return x[:, :1] + weight[:, 0][None]


class PerExpertTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("every_expert", [0, 1, 2, 3, 0, 1, 2]),
      ("one_expert", [2, 2, 2, 2, 2, 2, 2]),
      ("first_and_last_empty", [1, 2, 2, 1, 2, 1, 1]),
      ("some_rows_unowned", [4, 0, 4, 3, 3, 0, 4]),
      ("one_row_owned", [4, 4, 4, 4, 1, 4, 4]),
      ("no_row_owned", [4, 4, 4, 4, 4, 4, 4]),
  )
  def test_equals_a_loop_over_the_rows(self, experts):
    rows = jnp.arange(1, 22, dtype=jnp.float32).reshape(7, 3)
    weight = jnp.arange(100, 140, dtype=jnp.float32).reshape(4, 5, 2)
    expected = np.zeros((7, 5), np.float32)
    for row, expert in enumerate(experts):
      if expert < 4:
        expected[row] = _outer_sum(rows[row, None], weight[expert])[0]
    bits.assert_same_bits(
        lib.per_expert(_outer_sum, rows, weight, jnp.asarray(experts)), expected
    )

  def test_row_counts_are_padded_to_powers_of_two(self):
    shapes = []

    def linear(x, weight):
      shapes.append(x.shape)
      return _outer_sum(x, weight)

    experts = jnp.asarray([0] * 1 + [1] * 2 + [2] * 3 + [3] * 5)
    rows = jnp.ones((11, 2), jnp.float32)
    lib.per_expert(linear, rows, jnp.ones((5, 4, 1), jnp.float32), experts)
    self.assertEqual(shapes, [(1, 2), (2, 2), (4, 2), (8, 2)])


if __name__ == "__main__":
  absltest.main()
