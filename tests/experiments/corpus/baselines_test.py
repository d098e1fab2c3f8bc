"""The baselines against sums by hand, and as distributions."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from experiments.corpus import baselines

_TRAIN = np.array([0, 1, 2, 1, 2, 1, 3], np.uint16)


class BaselinesTest(parameterized.TestCase):

  def test_by_hand(self):
    # V = 5, N = 7; counts 1, 3, 2, 1, 0. After 1: twice 2, once 3.
    counts = baselines.fit(_TRAIN, 5)
    tokens = np.array([1, 2, 4, 3, 3], np.uint16)
    unigram = np.array([3, 1, 2, 2]) / 12
    np.testing.assert_allclose(
        baselines.unigram_nats(counts, tokens), -np.log(unigram), rtol=1e-15
    )
    bigram = np.array([
        (2 + 2 * 3 / 12) / (3 + 2),  # 2 after 1; 2 kinds in 3 follow 1
        (0 + 1 * 1 / 12) / (2 + 1),  # 4 after 2; 1 kind in 2
        2 / 12,  # 3 after 4, which was never seen
        2 / 12,  # 3 after 3, which nothing followed
    ])
    np.testing.assert_allclose(
        baselines.bigram_nats(counts, tokens), -np.log(bigram), rtol=1e-15
    )

  @parameterized.parameters(*range(6))
  def test_probabilities_after_a_context_sum_to_one(self, context):
    rng = np.random.default_rng(context)
    counts = baselines.fit(rng.integers(0, 5, 40), 6)
    for nats in (baselines.unigram_nats, baselines.bigram_nats):
      total = sum(
          np.exp(-nats(counts, np.array([context, b]))[0]) for b in range(6)
      )
      self.assertAlmostEqual(total, 1.0, delta=1e-14)

  def test_large_ids_of_16_bits_do_not_wrap(self):
    train = np.array([65535, 65534, 65535, 65534], np.uint16)
    counts = baselines.fit(train, 65536)
    self.assertEqual(list(counts.pair_counts), [1, 2])
    self.assertEqual(
        list(counts.pairs), [65534 * 65536 + 65535, 65535 * 65536 + 65534]
    )

  @parameterized.parameters(
      (np.array([1], np.uint16), "at least two"),
      (np.array([[1, 2]], np.uint16), "no row"),
      (np.array([1, 5], np.uint16), "ids from 1 to 5"),
  )
  def test_refusals(self, tokens, message):
    with self.assertRaisesRegex(ValueError, message):
      baselines.fit(tokens, 5)


if __name__ == "__main__":
  absltest.main()
