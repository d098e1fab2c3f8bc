"""Configs: read as transformers reads them, and no field goes unseen."""

import dataclasses
import json

from absl.testing import absltest
from absl.testing import parameterized
import transformers

from moejax.modules import config as config_lib
from moejax.modules import rotary
from tests.torch_bridge.hf import published_config
from tests.torch_bridge.hf import tiny_models
from torch_bridge.hf import hf_config

_PUBLISHED = published_config.PUBLISHED
_YARN = published_config.YARN


def _from(**changes):
  return hf_config.from_hf({**_PUBLISHED, **changes})


def _values(theirs):
  """What transformers understood: our fields of one of its configs."""
  rope = theirs.rope_parameters
  model_layers = [
      i
      for i in range(theirs.num_hidden_layers)
      if i not in theirs.mlp_only_layers
      and theirs.num_experts > 0
      and (i + 1) % theirs.decoder_sparse_step == 0
  ]
  scaling = config_lib.RopeScaling()
  if rope["rope_type"] == "linear":
    scaling = config_lib.RopeScaling("linear", factor=rope["factor"])
  if rope["rope_type"] == "yarn":
    scaling = config_lib.RopeScaling(
        "yarn",
        factor=rope["factor"],
        original_positions=rope["original_max_position_embeddings"],
        beta_fast=rope.get("beta_fast") or 32,
        beta_slow=rope.get("beta_slow") or 1,
        mscale=rope.get("mscale") or 0,
        mscale_all_dim=rope.get("mscale_all_dim") or 0,
        attention_factor=rope.get("attention_factor"),
        truncate=bool(rope.get("truncate", True)),
    )
  return config_lib.DecoderConfig(
      vocab_size=theirs.vocab_size,
      embed=theirs.hidden_size,
      num_layers=theirs.num_hidden_layers,
      num_heads=theirs.num_attention_heads,
      num_kv_heads=theirs.num_key_value_heads,
      head_dim=getattr(
          theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads
      ),
      hidden=theirs.intermediate_size,
      expert_hidden=theirs.moe_intermediate_size,
      num_experts=theirs.num_experts,
      top_k=theirs.num_experts_per_tok,
      normalize_gates=theirs.norm_topk_prob,
      sparse_layers=tuple(model_layers),
      norm_epsilon=theirs.rms_norm_eps,
      rope_theta=rope["rope_theta"],
      rope_scaling=scaling,
      max_positions=theirs.max_position_embeddings,
      tied_embeddings=theirs.tie_word_embeddings,
      attention_bias=theirs.attention_bias,
      sliding_window=theirs.sliding_window,
      dtype=str(theirs.dtype).removeprefix("torch."),
  )


class ReadTest(parameterized.TestCase):

  def test_the_published_config_loads(self):
    self.assertEqual(
        hf_config.from_hf(_PUBLISHED),
        config_lib.DecoderConfig(
            vocab_size=151936,
            embed=2048,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            hidden=6144,
            expert_hidden=768,
            num_experts=128,
            top_k=8,
            normalize_gates=True,
            sparse_layers=tuple(range(48)),
            norm_epsilon=1e-6,
            rope_theta=1e6,
            max_positions=40960,
            dtype="bfloat16",
        ),
    )

  def test_a_variant_that_states_what_it_does_not_use_loads(self):
    self.assertEqual(
        _from(
            qkv_bias=False,
            use_qk_norm=True,
            shared_expert_intermediate_size=0,
            quantization_config=None,
        ),
        hf_config.from_hf(_PUBLISHED),
    )

  @parameterized.parameters(
      {},
      {"norm_topk_prob": False, "tie_word_embeddings": True},
      {"attention_bias": True, "rms_norm_eps": 1e-5},
      {"use_sliding_window": True},
      {"use_sliding_window": True, "sliding_window": 7},
      {"use_sliding_window": True, "sliding_window": None},
      {"use_sliding_window": False, "sliding_window": 7},
      {"decoder_sparse_step": 2, "num_hidden_layers": 7},
      {"mlp_only_layers": [0, 3], "num_hidden_layers": 5},
      {"mlp_only_layers": [3], "decoder_sparse_step": 2,
       "num_hidden_layers": 6},
      {"mlp_only_layers": None},
      {"rope_theta": 5e5},
      {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}},
      {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 77.0},
      {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
      {"rope_parameters": {**_YARN, "rope_theta": 1e6}},
      {"rope_scaling": _YARN, "rope_theta": 1e6},
      {"rope_scaling": {"type": "yarn", "factor": 2.0}},
      {"rope_parameters": {**_YARN, "truncate": False, "beta_fast": 16,
                           "beta_slow": 2, "mscale": 0.7,
                           "mscale_all_dim": 1.0}},
      {"rope_parameters": {**_YARN, "truncate": None, "beta_fast": 0,
                           "beta_slow": None, "mscale": None}},
      {"rope_parameters": {**_YARN, "attention_factor": 1.25}},
  )
  def test_a_config_that_transformers_writes_is_read_as_it_meant_it(
      self, **changes
  ):
    theirs = tiny_models.config(dtype="bfloat16", **changes)
    expected = _values(theirs)
    for use_diff in (True, False):
      written = json.loads(theirs.to_json_string(use_diff=use_diff))
      self.assertEqual(hf_config.from_hf(written), expected)

  @parameterized.parameters(
      {},
      {"num_local_experts": 128},
      {"rope_scaling": {"type": "yarn", "factor": 2.0}},
      {"rope_scaling": {"rope_type": "linear", "factor": 3}},
      {"rope_scaling": {"rope_type": "default"}},
      {"rope_scaling": {"rope_type": "default", "factor": None}},
      {"rope_scaling": {}},
      {"rope_scaling": {}, "rope_parameters": {"rope_theta": 1e6}},
      {"rope_parameters": {"rope_type": "default"}},
      {"use_sliding_window": True, "sliding_window": 8},
      {"mlp_only_layers": [1, 5, 99]},
      {"num_experts": 0, "decoder_sparse_step": 3},
      {"rope_theta": 10000000},
      {"head_dim": 64},
  )
  def test_a_classic_config_is_read_as_transformers_reads_it(self, **changes):
    fields = {**_PUBLISHED, **changes}
    ours = hf_config.from_hf(fields)
    self.assertEqual(ours, _values(transformers.Qwen3MoeConfig(**fields)))

  @parameterized.parameters(
      "attention_bias",
      "decoder_sparse_step",
      "hidden_act",
      "max_position_embeddings",
      "mlp_only_layers",
      "norm_topk_prob",
      "rms_norm_eps",
      "rope_theta",
      "sliding_window",
      "tie_word_embeddings",
      "use_sliding_window",
  )
  def test_a_missing_field_has_the_default_of_transformers(self, name):
    for changes in ({}, {"use_sliding_window": True}, {"sliding_window": 7}):
      fields = {**_PUBLISHED, **changes}
      fields.pop(name, None)
      self.assertEqual(
          hf_config.from_hf(fields),
          _values(transformers.Qwen3MoeConfig(**fields)),
      )

  def test_a_missing_head_width_is_the_share_of_a_head(self):
    fields = {k: v for k, v in _PUBLISHED.items() if k != "head_dim"}
    self.assertEqual(_from(head_dim=None), hf_config.from_hf(fields))
    self.assertEqual(hf_config.from_hf(fields).head_dim, 2048 // 32)

  def test_a_null_yarn_factor_is_the_ratio_of_the_contexts(self):
    rope = {"rope_type": "yarn", "factor": None,
            "original_max_position_embeddings": 10240}
    self.assertEqual(_from(rope_scaling=rope).rope_scaling.factor, 4.0)

  @parameterized.parameters(
      ({}, 1.138629436),
      ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
      ({"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}, 0.921042355),
  )
  def test_the_yarn_attention_factor_is_the_published_one(
      self, changes, expected
  ):
    config = _from(rope_scaling={**_YARN, **changes})
    self.assertAlmostEqual(
        rotary.attention_factor(config.rope_scaling), expected, places=9
    )


class WriteTest(parameterized.TestCase):

  @parameterized.parameters(
      {},
      {"sparse_layers": (0, 5, 7)},
      {"sparse_layers": (), "num_experts": 0},
      {"tied_embeddings": True, "attention_bias": True, "dtype": "float32"},
      {"sliding_window": 9, "normalize_gates": False},
      {"rope_scaling": config_lib.RopeScaling("linear", factor=2.0)},
      {"rope_scaling": config_lib.RopeScaling(
          "yarn", factor=4.0, original_positions=16)},
      {"rope_scaling": config_lib.RopeScaling(
          "yarn", factor=4.0, original_positions=16, beta_fast=8.0,
          beta_slow=2.0, mscale=0.5, mscale_all_dim=0.25,
          attention_factor=1.5, truncate=False)},
  )
  def test_transformers_and_we_read_back_what_is_written(self, **changes):
    config = dataclasses.replace(hf_config.from_hf(_PUBLISHED), **changes)
    written = json.loads(json.dumps(hf_config.to_hf(config)))
    self.assertEqual(hf_config.from_hf(written), config)
    self.assertEqual(_values(transformers.Qwen3MoeConfig(**written)), config)


if __name__ == "__main__":
  absltest.main()
