"""Our load-balancing loss is that of transformers."""

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers.models.qwen3_moe import modeling_qwen3_moe

from moejax.training import losses


class LoadBalanceTest(absltest.TestCase):

  def test_equals_that_of_transformers_over_two_layers(self):
    logits = np.random.default_rng(0).standard_normal((2, 37, 8))
    logits = (2 * logits).astype(np.float32)
    theirs = modeling_qwen3_moe.load_balancing_loss_func(
        tuple(torch.from_numpy(layer) for layer in logits), 8, 3
    )
    flat = jnp.asarray(logits.reshape(-1, 8))
    ids = jax.lax.top_k(flat, 3)[1].astype(jnp.int32)
    ours = losses.load_balance(
        losses.routed_fraction(ids, 8), jax.nn.softmax(flat).mean(0)
    )
    np.testing.assert_allclose(ours, float(theirs), rtol=1e-5)
    self.assertGreater(float(ours), 3.01)  # Even would be three.


if __name__ == "__main__":
  absltest.main()
