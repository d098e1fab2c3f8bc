"""The interval of a median: its rule against counting, its coverage."""

import fractions
import itertools

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from moejax.protocols.performance import interval as lib


class IntervalTest(parameterized.TestCase):

  @parameterized.parameters(*itertools.product(
      (5, 7, 9, 11, 13), (0.5, 0.75, 0.875, 0.9, 0.9375)
  ))
  def test_rank_by_counting_signs(self, samples, confidence):
    # A sample lies below the median or above it, each with one half: count the
    # sign patterns in which the l-th to the (n + 1 - l)-th enclose the median.
    below = [sum(s) for s in itertools.product((0, 1), repeat=samples)]

    def coverage(low):
      inside = sum(low <= b <= samples - low for b in below)
      return fractions.Fraction(inside, len(below))

    found = lib.rank(samples, confidence)
    self.assertGreaterEqual(coverage(found), fractions.Fraction(confidence))
    self.assertLess(coverage(found + 1), fractions.Fraction(confidence))

  def test_ranks_of_101_samples(self):
    # 2 P(Binomial(101, 1/2) < 41) = 0.0460 and < 42: 0.0721.
    self.assertEqual(lib.rank(101, 0.95), 41)

  def test_a_decimal_is_what_it_is_written_as(self):
    self.assertEqual(lib.exact(1.05), fractions.Fraction(21, 20))
    # 2 of 2**5 is 1/16: exactly allowed at 15/16, though not as a float sum.
    self.assertEqual(lib.rank(5, 0.9375), 1)

  def test_values(self):
    values = [fractions.Fraction(v) for v in (9, 1, 7, 3, 5, 2, 8)]
    self.assertEqual(lib.of_median(values, 0.9), (1, 5, 9))
    self.assertEqual(lib.of_median(values, 0.85), (2, 5, 8))

  def test_coverage_of_random_medians(self):
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
      drawn = [fractions.Fraction(float(v)) for v in rng.exponential(size=15)]
      found = lib.of_median(drawn, 0.9)
      hits += found.lower <= fractions.Fraction(np.log(2)) <= found.upper
    # Its exact coverage is 0.9648; five standard deviations of 2,000 draws.
    self.assertBetween(hits / 2000, 0.9648 - 0.0206, 0.9648 + 0.0206)

  @parameterized.parameters((3, 0.9), (1, 0.5))
  def test_too_few(self, samples, confidence):
    with self.assertRaisesRegex(ValueError, "give no interval"):
      lib.rank(samples, confidence)

  def test_even(self):
    with self.assertRaisesRegex(ValueError, "no middle one"):
      lib.of_median([fractions.Fraction(1)] * 6, 0.5)


if __name__ == "__main__":
  absltest.main()
