"""Sinkhorn rounds: the twin has the oracle's bits, the oracle its definition.

Needs no accelerator.
"""

import fractions

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from moejax.numerics import native_ops
from moejax.numerics import sequential_ops
from moejax.numerics import sinkhorn as lib
from moejax.numerics.portable import portable_ops
from tests import bits

_EPSILON = 1e-6


def _matrices(seed: int, spread: float, size: int = 4) -> np.ndarray:
  """[30, size, size] positive float32 over many binades."""
  exponents = np.random.default_rng(seed).normal(size=(30, size, size))
  return np.exp(spread * exponents).astype(np.float32)


def _round(matrix: np.ndarray, axis: int) -> np.ndarray:
  """One round of one matrix, its sum in rationals."""
  total = [
      sum(map(fractions.Fraction, line.tolist()), fractions.Fraction())
      for line in (matrix.T if axis == 0 else matrix)
  ]
  sums = np.float32([float(t) for t in total])
  shifted = (sums.astype(np.float64) + _EPSILON).astype(np.float32)
  return matrix / (shifted[None] if axis == 0 else shifted[:, None])


class SinkhornTest(parameterized.TestCase):

  @parameterized.parameters(0.5, 4.0, 12.0)
  def test_every_round_is_what_the_definition_says(self, spread):
    x = _matrices(0, spread)
    rounds = lib.portable_oracle(x, 3, _EPSILON)
    self.assertEqual(rounds.shape, (30, 5, 4, 4))
    for matrix, found in zip(x, rounds):
      for index, result in enumerate(found):
        matrix = _round(matrix, axis=0 if index % 2 == 0 else 1)
        bits.assert_same_bits(result, matrix)

  @parameterized.product(spread=(0.5, 4.0, 12.0), size=(2, 3, 4, 8))
  def test_the_twin_has_the_oracle_s_bits(self, spread, size):
    x = _matrices(1, spread, size)
    bits.assert_same_bits(
        lib.portable(jnp.asarray(x), 20, _EPSILON),
        lib.portable_oracle(x, 20, _EPSILON),
    )

  def test_a_sum_that_float64_cannot_hold_is_still_rounded_once(self):
    # Each small term lies below half a spacing of the sum in float64, the two
    # together above it; 1 + 2**-24 is a tie in float32, which they break.
    x = np.full((1, 4, 4), 0.75 * 2.0**-53, np.float32)
    x[0, 0], x[0, 1] = 1.0, 2.0**-24
    expected = np.float32(1.0) / np.float32(1.0 + 2.0**-23)
    for found in (
        lib.portable(jnp.asarray(x), 1, 0.0),
        lib.portable_oracle(x, 1, 0.0),
    ):
      bits.assert_same_bits(np.asarray(found)[0, 0, 0, 0], expected)

  def test_portable_operations_give_the_same_rounds_one_by_one(self):
    x, ops = _matrices(2, 4.0), portable_ops.PortableOperations()
    rounds = ops.sinkhorn(jnp.asarray(x), 20, _EPSILON, "sinkhorn")
    bits.assert_same_bits(
        lib.by_operations(ops, jnp.asarray(x), 20, _EPSILON, "sinkhorn"),
        rounds,
    )
    self.assertEqual(
        ops.certificate.to_dict()["operations"]["sinkhorn"]["elements"],
        rounds.size,
    )

  @parameterized.named_parameters(
      ("native", native_ops.NativeOperations()),
      (
          "sequential",
          sequential_ops.SequentialReductions(
              portable_ops.PortableOperations()
          ),
      ),
  )
  def test_the_columns_of_the_last_round_sum_to_one(self, ops):
    x = _matrices(3, 1.0)
    last = ops.sinkhorn(jnp.asarray(x), 20, _EPSILON, "sinkhorn")[:, -1]
    sums = np.asarray(last).astype(np.float64).sum(-2)
    # Four terms below one, each with three roundings of 2**-24, and epsilon.
    np.testing.assert_allclose(sums, 1.0, rtol=0, atol=8 * 2.0**-24 + 1e-6)


if __name__ == "__main__":
  absltest.main()
