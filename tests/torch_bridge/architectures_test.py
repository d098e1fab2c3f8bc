"""What a Qwen3-MoE config may say, each against transformers, bit for bit.

Random models that transformers builds and writes: dense layers, tied
embeddings, attention biases, sliding windows longer and shorter than the text,
gates that are not normalised, scaled rotary frequencies, three dtypes. All
taps, all states, prefill and decode, in portable arithmetic.
"""

import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import torch

from moejax.contracts import decoder as decoder_contract
from moejax.contracts import named_combines
from moejax.modules import config as config_lib
from moejax.modules import decoder as decoder_lib
from moejax.numerics import reference_ops
from moejax.protocols import compare
from moejax.protocols import trajectory
from tests.torch_bridge.hf import tiny_models
from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf import hf_config
from torch_bridge.hf import parameter_map
from torch_bridge import torch_reference

_PROMPTS = (
    trajectory.Prompt("long", (3, 1, 4, 1, 5, 9, 2, 6, 5)),
    trajectory.Prompt("short", (31, 7)),
)
_STEPS = 3
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _decoder(folder, combine):
  config = hf_config.read(folder)
  params = parameter_map.load_parameters(
      checkpoint_lib.Checkpoint(folder), config
  )
  contract = decoder_contract.portable(
      config_lib.router_contract(config),
      named_combines.at_dtype(named_combines.named(combine), config.dtype),
  )
  return decoder_lib.Decoder(
      config,
      decoder_lib.nest({k: jnp.asarray(v) for k, v in params.items()}),
      contract,
      reference_ops.operations(contract),
  )


class ArchitecturesTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("a_dense_layer", {}, torch.bfloat16, "eager"),
      ("float16", {}, torch.float16, "eager"),
      ("float32", {}, torch.float32, "batched_mm"),
      (
          "tied_embeddings_and_biases",
          dict(tie_word_embeddings=True, attention_bias=True),
          torch.bfloat16,
          "batched_mm",
      ),
      (
          "gates_not_normalized",
          dict(norm_topk_prob=False, mlp_only_layers=[], decoder_sparse_step=2),
          torch.bfloat16,
          "eager",
      ),
      (
          "a_sliding_window_shorter_than_the_text",
          dict(use_sliding_window=True, sliding_window=4),
          torch.bfloat16,
          "eager",
      ),
      (
          "a_sliding_window_longer_than_the_text",
          dict(use_sliding_window=True, sliding_window=40),
          torch.bfloat16,
          "eager",
      ),
      ("yarn", dict(rope_parameters=_YARN), torch.bfloat16, "eager"),
      (
          "yarn_with_mscale",
          dict(
              rope_parameters={**_YARN, "mscale": 0.707, "mscale_all_dim": 1.0}
          ),
          torch.float32,
          "eager",
      ),
      (
          "linear_rotary_scaling",
          dict(
              rope_parameters={
                  "rope_type": "linear",
                  "rope_theta": 10000.0,
                  "factor": 3.0,
              }
          ),
          torch.float32,
          "eager",
      ),
  )
  def test_all_bits_are_those_of_transformers(self, changes, dtype, experts):
    with tempfile.TemporaryDirectory() as name:
      folder = pathlib.Path(name)
      tiny_models.save(tiny_models.model(dtype=dtype, **changes), folder)
      reference = torch_reference.TransformersReference(folder, experts)
      decoder = _decoder(folder, f"transformers_{experts}")
    theirs = reference.run(_PROMPTS, _STEPS, arithmetic="portable")
    ours = trajectory.run(decoder, _PROMPTS, _STEPS)
    found = compare.compare(ours, theirs)
    self.assertIsNone(found.first)
    self.assertEmpty(found.missing)
    self.assertEqual(set(found.levels().values()), {"same_bits"})
    for a, b in zip(ours, theirs, strict=True):
      self.assertEqual(sorted(a.final_state), sorted(b.final_state))
      for key, rows in a.final_state.items():
        self.assertTrue(compare.same_bits(rows, b.final_state[key]), key)


if __name__ == "__main__":
  absltest.main()
