"""The shape of a DeepSeek-V4 decoder, and the Flash model's by its numbers.

Needs no accelerator.
"""

import dataclasses
import math

from absl.testing import absltest
from absl.testing import parameterized

from moejax.modules.deepseek_v4 import config as lib
from moejax.modules.deepseek_v4 import parameters


class ConfigTest(parameterized.TestCase):

  def test_flash_has_the_parameters_of_the_released_model(self):
    leaves = parameters.leaves(lib.FLASH)
    counts = {
        path: math.prod(shape)
        for path, (shape, dtype) in leaves.items()
        if dtype != "int32" and not path.endswith("moe.bias")
    }  # The released count has no hash tables and no selection biases.
    self.assertEqual(sum(counts.values()), 284_332_230_231)

  def test_kinds_of_layers_have_their_own_parameters(self):
    leaves = parameters.leaves(lib.FLASH)
    self.assertEqual(lib.FLASH.num_layers, 43)
    self.assertEqual([lib.FLASH.rate(i) for i in (0, 2, 3)], [0, 4, 128])
    self.assertNotIn("layers.1.attention.compressor.norm", leaves)
    self.assertEqual(
        leaves["layers.2.attention.compressor.position_bias"],
        ((4, 1024), "float32"),
    )
    self.assertEqual(
        leaves["layers.3.attention.compressor.position_bias"],
        ((128, 512), "float32"),
    )
    self.assertNotIn("layers.3.attention.indexer.q_b_proj", leaves)
    self.assertEqual(leaves["layers.2.moe.table"], ((129280, 6), "int32"))
    self.assertNotIn("layers.2.moe.bias", leaves)
    self.assertNotIn("layers.3.moe.table", leaves)

  @parameterized.parameters(
      ({"attentions": ("swa", "full")}, "attentions"),
      ({"attentions": ()}, "attentions"),
      ({"hash_layers": (43,)}, r"hash_layers=\(43,\)"),
      ({"rotary_dim": 63}, "rotary_dim=63"),
      ({"rotary_dim": 130}, "rotary_dim=130"),
      ({"output_groups": 7}, "output_groups=7"),
      ({"top_k": 257}, "top_k=257"),
      ({"window": 0}, "window=0"),
      ({"dtype": "int8"}, "int8"),
  )
  def test_refuses_a_shape_that_does_not_fit(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(lib.FLASH, **changes)

  def test_the_router_works_in_the_model_s_dtype(self):
    contract = lib.router_contract(lib.FLASH)
    self.assertEqual(contract.score, "sqrt_softplus")
    self.assertEqual(contract.scale, 1.5)
    for dtype in ("logits_dtype", "score_dtype", "gate_dtype"):
      self.assertEqual(getattr(contract, dtype), "bfloat16")


if __name__ == "__main__":
  absltest.main()
