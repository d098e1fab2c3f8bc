"""Drawn weights: whose stream, which spread, one rounding; distinct choices."""

import itertools

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import numpy as np

from experiments.tiny import seeded_weights as lib
from tests import bits


class DrawTest(parameterized.TestCase):

  def test_the_bits_are_these(self):
    # Written down once; a change of the arithmetic or of a stream shows here.
    bits.assert_same_bits(
        lib.draw("a.weight", (2, 3), 5, (1.5, 11)).view(np.uint16),
        np.array(
            [[0x3fbd, 0x3fbf, 0x3fb4], [0x3fd1, 0x3fce, 0x3fbc]], np.uint16
        ),
    )
    bits.assert_same_bits(
        lib.draw_choices("table", 2, 4, 9, 5),
        np.array([[4, 3, 5, 0], [6, 4, 5, 7]]),
    )

  def test_name_and_seed_decide_the_stream(self):
    draws = [
        lib.draw(name, (4, 8), seed, (0.0, 20))
        for name, seed in (("a", 5), ("b", 5), ("a", 6))
    ]
    for left, right in itertools.combinations(draws, 2):
      self.assertFalse(np.array_equal(left, right))
    bits.assert_same_bits(lib.draw("a", (4, 8), 5, (0.0, 20)), draws[0])

  @parameterized.parameters((0.0, 111, 1.0), (1.5, 11, 0.0991), (-1.0, 22, 0.2))
  def test_spread_and_centre_follow_the_law(self, centre, multiplier, spread):
    values = lib.draw("a", (100, 100), 0, (centre, multiplier))
    self.assertEqual(values.dtype, np.dtype(ml_dtypes.bfloat16))
    values = values.astype(np.float64)
    self.assertAlmostEqual(values.mean(), centre, delta=0.04 * spread)
    self.assertAlmostEqual(values.std(), spread, delta=0.04 * spread)

  @parameterized.parameters((0.0, 129), (3.0, 60), (-3.0, 60), (4.0, 0))
  def test_refuses_what_float32_could_not_hold(self, *law):
    with self.assertRaisesRegex(ValueError, "'a'.*exact range"):
      lib.draw("a", (1,), 0, law)


class ChoicesTest(absltest.TestCase):

  def test_rows_are_distinct_and_every_slot_has_every_choice(self):
    rows = lib.draw_choices("table", 500, 6, 16, 0)
    self.assertEqual((rows.shape, rows.dtype), ((500, 6), np.int64))
    self.assertTrue(all(len({*row}) == 6 for row in rows.tolist()))
    for slot in range(6):
      self.assertEqual({*rows[:, slot].tolist()}, {*range(16)})

  def test_all_choices_are_a_permutation(self):
    rows = lib.draw_choices("table", 20, 5, 5, 0)
    np.testing.assert_array_equal(np.sort(rows, 1), [[*range(5)]] * 20)
    self.assertGreater(len({tuple(row) for row in rows.tolist()}), 10)

  def test_refuses_more_than_there_are(self):
    with self.assertRaisesRegex(ValueError, "'table'.*chosen=6.*choices=5"):
      lib.draw_choices("table", 2, 6, 5, 0)


if __name__ == "__main__":
  absltest.main()
