"""Parameter map: every tensor is used, every parameter found, bits unchanged.

The models are random and written by transformers itself.
"""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import torch
import transformers

from moejax.contracts import combine
from moejax.contracts import decoder as decoder_contract
from moejax.modules import config as config_lib
from moejax.modules import decoder
from moejax.numerics import reference_ops
from tests import bits
from tests.torch_bridge.hf import saved_models
from tests.torch_bridge.hf import tiny_models
from torch_bridge.hf import checkpoint
from torch_bridge.hf import hf_config
from torch_bridge.hf import parameter_map
from torch_bridge import tensor_bits

_SHIPPED = (
    pathlib.Path(__file__).parents[3]
    / "experiments/checkpoints/tiny_qwen3_moe"
)
# Our last segment -> where it lies in transformers' modules.
_MODULES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "router": "gate.weight",
    "gate_up": "experts.gate_up_proj",
    "down": "experts.down_proj",
    "input_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
}


def _module_name(path):
  """Names the parameter of transformers' model that has our path."""
  parts = path.split(".")
  leaf, bias = parts[-1].removesuffix("_bias"), parts[-1].endswith("_bias")
  leaf = _MODULES.get(leaf, f"{leaf}.{'bias' if bias else 'weight'}")
  if parts[0] != "layers":
    return leaf
  inside = {"attention": "self_attn.", "moe": "mlp.", "mlp": "mlp."}
  where = inside[parts[2]] if len(parts) == 4 else ""
  return f"model.layers.{parts[1]}.{where}{leaf}"


class LoadTest(saved_models.SavedModelTestCase):

  @parameterized.product(
      tie_word_embeddings=(False, True),
      attention_bias=(False, True),
      max_shard_size=("1GB", "4KB"),
  )
  def test_every_parameter_has_the_bits_of_transformers_model(
      self, max_shard_size, **changes
  ):
    made = tiny_models.model(**changes)
    config = self.save(made, max_shard_size=max_shard_size)
    self.assertEqual(config.tied_embeddings, changes["tie_word_embeddings"])
    params = self.load(config)
    self.assertEqual(
        {path: array.shape for path, array in params.items()},
        decoder.parameter_shapes(config),
    )
    self.assertEqual(list(params), list(decoder.parameter_shapes(config)))
    theirs = dict(made.named_parameters())
    for path, array in params.items():
      bits.assert_same_bits(
          array, tensor_bits.to_numpy(theirs.pop(_module_name(path)))
      )
    self.assertEmpty(theirs)

  @parameterized.parameters(torch.float32, torch.float16, torch.bfloat16)
  def test_the_dtype_is_kept(self, dtype):
    made = tiny_models.model(dtype=dtype)
    params = self.load(self.save(made))
    self.assertEqual(
        {array.dtype.name for array in params.values()},
        {tensor_bits.dtype_name(dtype)},
    )

  @parameterized.product(
      suffix=("", ".weight"), legacy=(False, True), interleaved=(False, True)
  )
  def test_stacked_experts_give_the_parameters_of_single_ones(
      self, suffix, legacy, interleaved
  ):
    made = tiny_models.model()
    config = self.save(made)
    expected = self.load(config)
    self.save(made, save_original_format=False)

    def change(tensors):
      for name in [n for n in tensors if ".experts." in n]:
        array = tensors.pop(name)
        if interleaved and "gate_up" in name:
          gate, up = np.split(array, 2, axis=1)
          array = np.stack([gate, up], axis=2).reshape(array.shape)
        if legacy:
          array = np.swapaxes(array, 1, 2)
        tensors[name + suffix] = array

    self.rewrite(change)
    self.assertEqual(
        parameter_map.form_of(checkpoint.Checkpoint(self.folder).names()),
        "stacked_weight" if suffix else "stacked",
    )
    params = self.load(
        config, gate_up_rows="interleaved" if interleaved else "halves"
    )
    self.assertEqual(list(params), list(expected))
    for path, array in expected.items():
      bits.assert_same_bits(params[path], array)

  def test_a_single_expert_keeps_its_axis(self):
    made = tiny_models.model(num_experts=1, num_experts_per_tok=1)
    params = self.load(self.save(made))
    self.assertEqual(params["layers.0.moe.down"].shape, (1, 16, 12))
    self.assertEqual(params["layers.0.moe.gate_up"].shape, (1, 24, 16))

  def test_the_shipped_checkpoint_loads_completely(self):
    config = hf_config.read(_SHIPPED)
    params = parameter_map.load_parameters(
        checkpoint.Checkpoint(_SHIPPED), config
    )
    self.assertEqual(sum(a.size for a in params.values()), 627_520)

  def test_a_decoder_of_the_parameters_computes_transformers_logits(self):
    made = tiny_models.model(
        dtype=torch.float32, attention_bias=True, use_sliding_window=True,
        sliding_window=5,
    )
    config = self.save(made)
    contract = decoder_contract.native(
        config_lib.router_contract(config),
        combine.CombineContract("slots", output="float32"),
    )
    ours = decoder.Decoder(
        config,
        decoder.nest(self.load(config)),
        contract,
        reference_ops.operations(contract),
    )
    tokens = np.arange(9, dtype=np.int32)[None] * 3
    logits, _ = ours(
        jnp.asarray(tokens), decoder.empty_state(config, 1, tokens.size)
    )
    with torch.no_grad():
      theirs = made(torch.from_numpy(tokens.astype(np.int64))).logits
    # Two float32 implementations of logits up to 10 in size; a wrong map is
    # off by whole numbers.
    np.testing.assert_allclose(logits, theirs.numpy(), atol=1e-3)

  def test_refuses_rows_that_say_nothing_about_single_experts(self):
    config = self.save(tiny_models.model())
    with self.assertRaisesRegex(ValueError, "'interleaved'.*one matrix"):
      self.load(config, gate_up_rows="interleaved")
    with self.assertRaisesRegex(ValueError, "'thirds' is not one of halves"):
      self.load(config, gate_up_rows="thirds")


class WriteTest(saved_models.SavedModelTestCase):

  @parameterized.product(
      tie_word_embeddings=(False, True), attention_bias=(False, True)
  )
  def test_written_tensors_are_those_that_transformers_wrote(self, **changes):
    config = self.save(tiny_models.model(**changes))
    written = dict(parameter_map.to_hf(self.load(config), config))
    opened = checkpoint.Checkpoint(self.folder)
    self.assertEqual(tuple(sorted(written)), opened.names())
    for name, array in written.items():
      bits.assert_same_bits(array, opened.array(name))

  def test_transformers_loads_what_is_written(self):
    made = tiny_models.model(attention_bias=True)
    config = self.save(made)
    params = {
        path: jnp.asarray(array) for path, array in self.load(config).items()
    }
    safetensors.numpy.save_file(
        dict(parameter_map.to_hf(params, config)),
        self.folder / checkpoint.SINGLE,
        metadata={"format": "pt"},
    )
    loaded, info = transformers.Qwen3MoeForCausalLM.from_pretrained(
        self.folder,
        config=transformers.Qwen3MoeConfig(**hf_config.to_hf(config)),
        dtype=torch.bfloat16,
        local_files_only=True,
        output_loading_info=True,
    )
    self.assertEmpty(info["missing_keys"])
    self.assertEmpty(info["unexpected_keys"])
    theirs = dict(loaded.named_parameters())
    for name, parameter in made.named_parameters():
      bits.assert_same_bits(
          tensor_bits.to_numpy(theirs.pop(name)),
          tensor_bits.to_numpy(parameter),
      )
    self.assertEmpty(theirs)

  def test_arrays_are_contiguous_whatever_their_source(self):
    config = self.save(tiny_models.model())
    params = self.load(config)
    straight = dict(parameter_map.to_hf(params, config))
    turned = {
        path: np.asfortranarray(array) for path, array in params.items()
    }
    for name, array in parameter_map.to_hf(turned, config):
      self.assertTrue(array.flags.c_contiguous)
      bits.assert_same_bits(array, straight[name])

  @parameterized.parameters(
      ("missing", r"final_norm is None, not \(\(16,\), 'bfloat16'\)"),
      ("unknown", r"other is \(\(2,\), 'float32'\), not None"),
      ("shape", r"final_norm is \(\(4, 4\), 'bfloat16'\), not"),
      ("dtype", r"final_norm is \(\(16,\), 'float32'\), not"),
  )
  def test_refuses_parameters_of_another_config(self, fault, pattern):
    config = self.save(tiny_models.model())
    params = self.load(config)
    norm = params.pop("final_norm")
    if fault == "unknown":
      params |= {"final_norm": norm, "other": np.zeros(2, np.float32)}
    elif fault == "shape":
      params["final_norm"] = norm.reshape(4, 4)
    elif fault == "dtype":
      params["final_norm"] = norm.astype(np.float32)
    with self.assertRaisesRegex(ValueError, pattern):
      parameter_map.to_hf(params, config)


if __name__ == "__main__":
  absltest.main()
