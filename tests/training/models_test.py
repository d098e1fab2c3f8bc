"""Whole decoders: what they compute, and that their gradients are right.

Selections are made idle (every expert has a slot, every entry is visible, no
limit is met), so that the losses are smooth and differences measure a slope.
"""

import dataclasses
from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import decoder as decoder_contract
from moejax.contracts import deepseek_v4 as deepseek_v4_contract
from moejax.contracts import named_combines
from moejax.modules import config as qwen3_moe
from moejax.modules import decoder as qwen3_moe_decoder
from moejax.modules.deepseek_v4 import config as deepseek_v4
from moejax.modules.deepseek_v4 import decoder as deepseek_v4_decoder
from moejax.numerics import native_ops
from moejax.training import first_weights
from moejax.training import losses
from moejax.training import models
from tests.training import tiny

_QWEN3_MOE = dataclasses.replace(tiny.QWEN3_MOE, top_k=4, dtype="float32")
_DEEPSEEK_V4 = dataclasses.replace(
    tiny.DEEPSEEK_V4,
    attentions=("csa", "hca"),
    num_experts=4,
    top_k=4,
    index_top_k=6,
    swiglu_limit=1e3,
    dtype="float32",
)
_ROWS = tiny.tokens(24).reshape(2, 12).astype(np.int32)


def _weights(model):
  """Weights away from the first ones, where nothing is zero or one."""
  rng = np.random.default_rng(0)
  return {
      path: leaf if leaf.dtype == jnp.int32
      else leaf + jnp.asarray(0.2 * rng.standard_normal(leaf.shape), leaf.dtype)
      for path, leaf in first_weights.draw(model, 0).items()
  }


def _native(model):
  """The decoder that conformance runs compare, experts and all."""
  config = model.config
  combine = named_combines.at_dtype(
      named_combines.named("transformers_grouped_mm"), config.dtype
  )
  if isinstance(config, qwen3_moe.DecoderConfig):
    contract = decoder_contract.native(
        qwen3_moe.router_contract(config), combine
    )
    build = qwen3_moe_decoder.Decoder
  else:
    contract = deepseek_v4_contract.of(
        "native",
        deepseek_v4.router_contract(config),
        combine,
        deepseek_v4_contract.TRANSFORMERS,
    )
    build = deepseek_v4_decoder.Decoder

  def run(params, rows, state):
    nested = qwen3_moe_decoder.nest(params)
    decoder = build(config, nested, contract, native_ops.NativeOperations())
    if state is None:
      state = qwen3_moe_decoder.empty_state(config, *rows.shape)
    return decoder(rows, state)[0]

  return run


class _Cases:
  """What holds for both; `CONFIG` is set below."""

  CONFIG = None

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    model = cls.model = models.of(cls.CONFIG)
    params = cls.params = _weights(model)
    state = cls.state = model.state(*_ROWS.shape)
    floats = cls.floats = {
        p: v for p, v in params.items() if v.dtype != jnp.int32
    }

    def both(trained):
      out = model.apply(params | trained, _ROWS, state)
      entropy = losses.cross_entropy(out.logits[:, :-1], _ROWS[:, 1:])
      rest = sum(out.auxiliary.values(), jnp.zeros((), jnp.float32))
      return entropy.sum(), rest

    @jax.jit
    def slopes(trained):
      _, back = jax.vjp(both, trained)
      one, none = jnp.ones((), jnp.float32), jnp.zeros((), jnp.float32)
      return back((one, none))[0], back((none, one))[0]

    cls.both = staticmethod(jax.jit(both))
    cls.of_entropy, cls.of_rest = slopes(floats)

  def test_computes_what_the_compared_decoder_computes(self):
    found = jax.jit(self.model.apply)(self.params, _ROWS, self.state).logits
    native = jax.jit(_native(self.model))(self.params, _ROWS, self.state)
    native = np.asarray(native)
    # One float32 rounding an operation, fewer than a hundred of them a layer.
    bound = 200 * 2.0**-24 * np.abs(native).max()
    np.testing.assert_allclose(found, native, atol=bound)
    self.assertGreater(np.abs(native).max(), 0.1)

  def test_losses_change_as_the_gradients_say(self):
    rng = np.random.default_rng(1)
    size = 2.0**-9
    # A divergence has slopes for its indexer alone: its target is held.
    groups: dict[tuple[bool, str], list[str]] = {}
    for path in self.floats:
      kind = path.rsplit(".", 1)[-1]
      groups.setdefault((".indexer." in path, kind), []).append(path)
    for (indexer, kind), paths in groups.items():
      way = {
          p: np.float32(rng.standard_normal(self.floats[p].shape))
          for p in paths
      }
      above, below = (
          self.both(self.floats | {
              p: self.floats[p] + np.float32(sign * size) * way[p]
              for p in paths
          })[indexer]
          for sign in (1, -1)
      )
      slopes = self.of_rest if indexer else self.of_entropy
      measured = (float(above) - float(below)) / (2 * size)
      said = sum(float(jnp.vdot(slopes[p], way[p])) for p in paths)
      norm = sum(float(jnp.vdot(slopes[p], slopes[p])) for p in paths) ** 0.5
      with self.subTest(f"indexer={indexer} {kind}"):
        # Losses near 80 are known to 1e-5, so slopes to 3e-3; the rest is
        # curvature over the step.
        self.assertLess(abs(said - measured), 0.02 * norm + 6e-3)


class Qwen3MoeTest(_Cases, absltest.TestCase):
  CONFIG = _QWEN3_MOE

  def test_every_weight_has_a_gradient(self):
    for path, slope in self.of_entropy.items():
      self.assertTrue(np.any(slope), path)


class DeepseekV4Test(_Cases, absltest.TestCase):
  CONFIG = _DEEPSEEK_V4

  def test_indexers_are_trained_by_their_divergence_and_by_nothing_else(self):
    for path in self.floats:
      of_entropy, of_rest = self.of_entropy[path], self.of_rest[path]
      with self.subTest(path):
        if ".indexer." in path:
          self.assertFalse(np.any(of_entropy))
          self.assertTrue(np.any(of_rest))
        else:
          self.assertFalse(np.any(of_rest))
          # A bias takes part in the selection alone.
          self.assertEqual(np.any(of_entropy), not path.endswith(".bias"))

  def test_first_hash_tables_name_distinct_experts(self):
    model = tiny.model("deepseek_v4")
    table = np.sort(first_weights.draw(model, 5)["layers.0.moe.table"], axis=1)
    self.assertEqual(table.shape, (32, 3))
    self.assertTrue((table[:, 1:] > table[:, :-1]).all())
    self.assertLen(np.unique(table), model.config.num_experts)


class BalanceTest(absltest.TestCase):

  def test_each_layer_is_balanced_for_itself(self):
    model = models.of(dataclasses.replace(
        tiny.QWEN3_MOE, num_layers=2, sparse_layers=(0, 1), dtype="float32"
    ))
    with mock.patch.object(
        losses, "load_balance", wraps=losses.load_balance
    ) as formed:
      out = model.apply(_weights(model), _ROWS, None)
    self.assertLen(formed.mock_calls, 2)
    values = []
    for layer, call in enumerate(formed.mock_calls):
      fraction, probability = call.args
      routes = np.bincount(np.asarray(out.ids[layer]).reshape(-1), minlength=4)
      np.testing.assert_allclose(fraction, routes / 24, rtol=2**-22)
      values.append(4 * np.sum(np.asarray(fraction) * np.asarray(probability)))
    self.assertNotAlmostEqual(values[0], values[1], places=4)
    self.assertAlmostEqual(
        float(out.auxiliary["balance"]), np.mean(values), places=5
    )


if __name__ == "__main__":
  absltest.main()
