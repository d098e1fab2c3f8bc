"""Losses against float64, and where their gradients must not go."""

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from moejax.training import losses as lib
from tests import bits


def _normal(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return rng.standard_normal(shape).astype(np.float32)


class CrossEntropyTest(absltest.TestCase):

  def test_is_the_negative_log_probability(self):
    logits = 4 * _normal(3, 5, 50)
    targets = np.random.default_rng(1).integers(0, 50, (3, 5)).astype(np.int32)
    wide = logits.astype(np.float64)
    expected = np.log(np.exp(wide).sum(-1)) - np.take_along_axis(
        wide, targets[..., None], -1
    )[..., 0]
    found = lib.cross_entropy(jnp.asarray(logits), jnp.asarray(targets))
    # A sum of 50 exponentials, its logarithm and a difference of size 16.
    np.testing.assert_allclose(found, expected, atol=60 * 16 * 2.0**-24)

  def test_even_logits_cost_the_logarithm_of_the_vocabulary(self):
    logits = jnp.zeros((1, 2, 64), jnp.bfloat16)
    found = lib.cross_entropy(logits, jnp.zeros((1, 2), jnp.int32))
    np.testing.assert_allclose(found, np.log(64), rtol=1e-6)


class LoadBalanceTest(absltest.TestCase):

  def test_counts(self):
    ids = jnp.asarray([[0, 2], [0, 3], [0, 2]], jnp.int32)
    bits.assert_same_bits(
        lib.expert_counts(ids, 5), np.int32([3, 0, 2, 1, 0])
    )
    np.testing.assert_allclose(
        lib.routed_fraction(ids, 5), [1, 0, 2 / 3, 1 / 3, 0], rtol=1e-6
    )

  def test_is_top_k_when_even_and_pulls_probability_from_full_experts(self):
    even = jnp.full((4,), 0.5, jnp.float32)
    self.assertEqual(lib.load_balance(even, even / 2), 2.0)
    fraction = jnp.asarray([2.0, 0.0, 0.0, 0.0], jnp.float32)
    slopes = jax.grad(lib.load_balance, (0, 1))(fraction, even / 2)
    bits.assert_same_bits(slopes[0], np.zeros(4, np.float32))
    bits.assert_same_bits(slopes[1], np.float32([8, 0, 0, 0]))


class IndexerDivergenceTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    visible = np.ones((2, 3, 4), np.int32)
    visible[:, 0] = 0  # The first query sees no entry.
    visible[:, 1, 2:] = 0
    self.visible = jnp.asarray(visible)
    raw = np.exp(_normal(2, 2, 3, 5 + 4 + 1))
    raw[..., 5:9] *= visible[:, None]
    self.weights = jnp.asarray(raw / raw.sum(-1, keepdims=True))
    self.scores = jnp.asarray(_normal(2, 3, 4, seed=1))

  def test_is_the_mean_divergence_over_queries_that_see_something(self):
    total = []
    for b in range(2):
      for t in range(1, 3):
        seen = np.asarray(self.visible)[b, t] != 0
        p = np.asarray(self.weights, np.float64)[b, :, t, 5:9].sum(0)[seen]
        q = np.exp(np.asarray(self.scores, np.float64)[b, t][seen])
        p, q = p / p.sum(), q / q.sum()
        total.append(np.sum(p * np.log(p / q)))
    found = lib.indexer_divergence(self.weights, self.scores, self.visible)
    np.testing.assert_allclose(found, np.mean(total), rtol=1e-5)

  def test_is_zero_where_the_scores_say_what_attention_does(self):
    target = self.weights[..., 5:9].sum(1)
    scores = jnp.log(jnp.where(target > 0, target, 1.0))
    found = lib.indexer_divergence(self.weights, scores, self.visible)
    self.assertLess(abs(float(found)), 1e-6)

  def test_trains_scores_of_what_is_visible_and_nothing_else(self):
    slopes = jax.grad(lib.indexer_divergence, (0, 1))(
        self.weights, self.scores, self.visible
    )
    self.assertFalse(np.any(slopes[0]))
    scores = np.asarray(slopes[1])
    self.assertTrue(np.isfinite(scores).all())
    seen = np.asarray(self.visible) != 0
    self.assertFalse(np.any(scores[~seen]))
    self.assertTrue(np.all(scores[seen]))


if __name__ == "__main__":
  absltest.main()
