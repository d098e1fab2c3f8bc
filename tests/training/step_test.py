"""Optimiser steps: they learn, repeat, and stop at what is not finite."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from moejax.training import batches
from moejax.training import checkpoints
from moejax.training import step as lib
from tests import bits
from tests.training import tiny


def _rows(recipe, first=0):
  made = batches.Batches(
      tiny.tokens(), recipe.seed, recipe.batch, recipe.length
  )
  return np.stack([made.at(first + i) for i in range(recipe.chunk)])


class StepTest(parameterized.TestCase):

  @parameterized.parameters("qwen3_moe", "deepseek_v4")
  def test_a_run_learns_and_stops_at_what_is_not_finite(self, name):
    model, recipe = tiny.model(name), tiny.RECIPE
    trainer = lib.Trainer(model, recipe)
    state = trainer.initial()
    before = checkpoints.flatten(state)
    trainer.compile(state)
    state, report = trainer.run(state, _rows(recipe))
    self.assertTrue(report.done.all())
    self.assertEqual(int(state.step), recipe.chunk)
    self.assertAlmostEqual(float(report.loss[0]), np.log(32), delta=0.1)
    self.assertLess(float(report.loss[-1]), float(report.loss[0]) - 0.05)
    after = checkpoints.flatten(state)
    # Routes of a step: all tokens' slots, in each layer.
    routes = recipe.batch * recipe.length * model.config.top_k
    for counts in report.counts.values():
      np.testing.assert_array_equal(np.asarray(counts).sum(-1), routes)
    for path in trainer.paths:
      self.assertFalse(np.array_equal(
          before[f".params['{path}']"], after[f".params['{path}']"]
      ), path)
    for path in state.fixed:
      key = f".fixed['{path}']"
      if path.endswith(".bias"):
        layer = int(path.split(".")[1])
        steps = np.asarray(report.counts[layer])
        moves = np.sign(steps.mean(-1, keepdims=True) - steps).sum(0)
        np.testing.assert_allclose(
            after[key], recipe.bias_speed * moves, rtol=1e-5, atol=1e-9
        )
      else:
        bits.assert_same_bits(after[key], before[key])

    bad = dict(state.params)
    leaf = "layers.0.mlp_norm"
    bad[leaf] = bad[leaf].at[0].set(jnp.float32(np.inf))
    state = state._replace(params=bad)
    kept = checkpoints.flatten(state)
    state, report = trainer.run(state, _rows(recipe, recipe.chunk))
    self.assertFalse(np.any(report.done))
    finite = dict(zip(trainer.paths, np.asarray(report.finite[0]), strict=True))
    self.assertFalse(finite[leaf])
    for key, value in checkpoints.flatten(state).items():
      bits.assert_same_bits(value, kept[key])

  def test_the_rate_rises_falls_and_ends_as_declared(self):
    recipe = dataclasses.replace(
        tiny.RECIPE, steps=100, warm_up=10, weight_decay=0.0, clip=1e9
    )
    model = tiny.model("qwen3_moe")
    optimiser = lib.optimiser(model, recipe)
    leaf = {"embedding": jnp.ones((1,), jnp.float32)}
    state = optimiser.init(leaf)
    rates = []
    with jax.numpy_dtype_promotion("standard"):
      update = jax.jit(optimiser.update)
      for _ in range(100):
        # Adam's step from a gradient that never changes is the rate.
        updates, state = update(leaf, state, leaf)
        rates.append(-float(updates["embedding"][0]) / recipe.peak)
    self.assertAlmostEqual(rates[0], 0.0)
    self.assertAlmostEqual(rates[5], 0.5, places=4)
    self.assertAlmostEqual(rates[10], 1.0, places=4)
    self.assertAlmostEqual(rates[55], 0.55, places=4)
    self.assertAlmostEqual(rates[99], 0.1, delta=0.001)

  def test_matrices_decay_and_what_scales_does_not(self):
    model, recipe = tiny.model("deepseek_v4"), tiny.RECIPE
    optimiser = lib.optimiser(model, recipe)
    leaves = {
        path: jnp.ones(shape, jnp.float32)
        for path, (shape, _) in model.leaves().items()
        if not path.endswith(model.fixed)
    }
    nothing = jax.tree.map(jnp.zeros_like, leaves)
    state = optimiser.init(leaves)
    with jax.numpy_dtype_promotion("standard"):
      update = jax.jit(optimiser.update)
      for _ in range(2):  # The first rate is zero.
        updates, state = update(nothing, state, leaves)
    decayed = {path for path, value in updates.items() if np.any(value)}
    self.assertContainsSubset(
        {"embedding", "lm_head", "layers.1.moe.down",
         "layers.1.attention.indexer.q_b_proj"}, decayed
    )
    for path in decayed:
      self.assertNotRegex(path, r"norm|_hc\.|sinks|position_bias")

  def test_a_batch_that_cannot_be_split_is_refused(self):
    with self.assertRaisesRegex(ValueError, "evenly over 3 devices"):
      lib.Trainer(
          tiny.model("qwen3_moe"), tiny.RECIPE, devices=jax.devices()[:1] * 3
      )


if __name__ == "__main__":
  absltest.main()
