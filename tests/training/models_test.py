"""Whole decoders: what they compute, and that their gradients are right."""

from absl.testing import absltest
from absl.testing import parameterized
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
from moejax.modules.deepseek_v4 import state as deepseek_v4_state
from moejax.numerics import native_ops
from moejax.training import first_weights
from moejax.training import losses
from tests.training import tiny

_NAMES = ("qwen3_moe", "deepseek_v4")


def _weights(model, seed=0):
  """Weights away from the first ones, where nothing is zero or one."""
  rng = np.random.default_rng(seed)
  return {
      path: leaf if leaf.dtype == jnp.int32
      else leaf + jnp.asarray(0.2 * rng.standard_normal(leaf.shape), leaf.dtype)
      for path, leaf in first_weights.draw(model, seed).items()
  }


def _rows(count=2, length=12):
  return jnp.asarray(
      tiny.tokens(count * length).reshape(count, length).astype(np.int32)
  )


def _native_logits(model, params, rows):
  """Op by op, by the operations that conformance runs use."""
  config = model.config
  flat = {p: params[p].astype(d) for p, (_, d) in model.leaves().items()}
  nested = qwen3_moe_decoder.nest(flat)
  combine = named_combines.at_dtype(
      named_combines.named("transformers_grouped_mm"), config.dtype
  )
  ops = native_ops.NativeOperations()
  if isinstance(config, qwen3_moe.DecoderConfig):
    contract = decoder_contract.native(
        qwen3_moe.router_contract(config), combine
    )
    decoder = qwen3_moe_decoder.Decoder(config, nested, contract, ops)
    return decoder(rows, qwen3_moe_decoder.empty_state(config, *rows.shape))[0]
  contract = deepseek_v4_contract.of(
      "native",
      deepseek_v4.router_contract(config),
      combine,
      deepseek_v4_contract.TRANSFORMERS,
  )
  decoder = deepseek_v4_decoder.Decoder(config, nested, contract, ops)
  return decoder(rows, deepseek_v4_state.empty(config, *rows.shape))[0]


class ModelsTest(parameterized.TestCase):

  @parameterized.parameters(*_NAMES)
  def test_computes_what_the_decoder_computes_op_by_op(self, name):
    model = tiny.model(name, "float32")
    params, rows = _weights(model), _rows()
    outputs = jax.jit(model.apply)(params, rows, model.state(*rows.shape))
    expected = np.asarray(_native_logits(model, params, rows))
    # One float32 rounding an operation, three layers of fewer than a hundred.
    scale = np.abs(expected).max()
    np.testing.assert_allclose(
        outputs.logits, expected, atol=300 * 2.0**-24 * scale
    )
    self.assertEqual(
        {layer: ids.shape for layer, ids in outputs.ids.items()},
        {
            layer: (rows.size, model.config.top_k)
            for layer in range(model.config.num_layers)
        },
    )

  @parameterized.parameters(*_NAMES)
  def test_a_step_along_the_gradient_changes_the_loss_as_it_says(self, name):
    model = tiny.model(name, "float32")
    params, rows = _weights(model), _rows()
    state = model.state(*rows.shape)
    trained = {p: v for p, v in params.items() if v.dtype != jnp.int32}
    fixed = {p: v for p, v in params.items() if p not in trained}

    @jax.jit
    def loss(trained):
      out = model.apply(trained | fixed, rows, state)
      total = losses.cross_entropy(out.logits[:, :-1], rows[:, 1:]).sum()
      for value in out.auxiliary.values():
        total = total + value
      return total, out.ids

    (_, ids), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained)
    rng = np.random.default_rng(1)
    groups = sorted({path.rsplit(".", 1)[-1] for path in trained})
    checked = 0
    for group in groups:
      if group == "bias":
        continue
      way = {
          p: jnp.asarray(rng.standard_normal(v.shape), jnp.float32)
          if p.endswith(group) else jnp.zeros_like(v)
          for p, v in trained.items()
      }
      size = 2e-3

      def at(factor, way=way):
        moved = {p: trained[p] + factor * way[p] for p in trained}
        value, found = loss(moved)
        same = all(np.array_equal(ids[i], found[i]) for i in ids)
        return float(value), same

      (above, same), (below, also) = at(size), at(-size)
      slope = sum(float(jnp.vdot(slopes[p], way[p])) for p in trained)
      if not (same and also):  # A route changed: there is no slope here.
        continue
      checked += 1
      measured = (above - below) / (2 * size)
      largest = np.sqrt(sum(
          float(jnp.vdot(slopes[p], slopes[p])) for p in trained
          if p.endswith(group)
      ))
      with self.subTest(group):
        # float32 losses of about 80 carry an error of 1e-5; curvature the rest.
        self.assertLess(abs(slope - measured), 0.02 * largest + 5e-3)
    self.assertGreaterEqual(checked, len(groups) // 2)


class WhoTrainsWhatTest(absltest.TestCase):

  def test_indexers_are_trained_by_their_divergence_and_by_nothing_else(self):
    model = tiny.model("deepseek_v4", "float32")
    params, rows = _weights(model), _rows()
    state = model.state(*rows.shape)
    floats = {p: v for p, v in params.items() if v.dtype != jnp.int32}

    def both(trained):
      out = model.apply(params | trained, rows, state)
      entropy = losses.cross_entropy(out.logits[:, :-1], rows[:, 1:]).mean()
      return jnp.stack([entropy, out.auxiliary["indexer"]])

    slopes = jax.jit(jax.jacrev(both))(floats)
    for path, (of_entropy, of_divergence) in slopes.items():
      with self.subTest(path):
        if ".indexer." in path:
          self.assertFalse(np.any(of_entropy))
          self.assertTrue(np.any(of_divergence))
        else:
          self.assertFalse(np.any(of_divergence))
          # The bias takes part in a selection alone.
          self.assertEqual(np.any(of_entropy), not path.endswith(".bias"))

  def test_first_hash_tables_name_distinct_experts(self):
    model = tiny.model("deepseek_v4")
    table = np.sort(first_weights.draw(model, 5)["layers.0.moe.table"], axis=1)
    self.assertEqual(table.shape, (32, 3))
    self.assertTrue((table[:, 1:] > table[:, :-1]).all())
    self.assertLen(np.unique(table), model.config.num_experts)


if __name__ == "__main__":
  absltest.main()
