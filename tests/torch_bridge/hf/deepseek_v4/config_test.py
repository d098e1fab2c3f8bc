"""Configs of DeepSeek-V4: both dialects, as transformers reads them."""

import dataclasses
import json

from absl.testing import absltest
from absl.testing import parameterized
import transformers

from moejax.contracts import refusal
from moejax.modules import config as base_config
from moejax.modules.deepseek_v4 import config as config_lib
from tests.torch_bridge.hf.deepseek_v4 import flash_config
from torch_bridge.hf.deepseek_v4 import config as lib

_FLASH, _SAVED = flash_config.FLASH, flash_config.SAVED
_EXPECTED = config_lib.FLASH
_SMALL = dataclasses.replace(
    _EXPECTED,
    attentions=("hca", "csa", "swa"),
    hash_layers=(1,),
    csa_rate=2,
    hca_rate=16,
    gate_scale=2.5,
    swiglu_limit=7.0,
    streams=3,
    sinkhorn_iterations=7,
    hyper_epsilon=1e-5,
    norm_epsilon=1e-4,
    rope_theta=5000.0,
    compress_theta=40000.0,
    max_positions=4096,
    dtype="float32",
)


def _theirs(fields):
  """What transformers understood: our fields of one of its configs."""
  c = transformers.DeepseekV4Config(**json.loads(json.dumps(fields)))
  main, rope = c.rope_parameters["main"], c.rope_parameters["compress"]
  assert main["rope_type"] == "default"
  scaling = base_config.RopeScaling()
  if rope["rope_type"] == "yarn":
    scaling = base_config.RopeScaling(
        "yarn",
        factor=rope["factor"],
        original_positions=rope["original_max_position_embeddings"],
        beta_fast=rope.get("beta_fast") or 32,
        beta_slow=rope.get("beta_slow") or 1,
        attention_factor=rope.get("attention_factor"),
    )
  kinds = {
      "sliding_attention": "swa",
      "compressed_sparse_attention": "csa",
      "heavily_compressed_attention": "hca",
  }
  return config_lib.DeepseekV4Config(
      vocab_size=c.vocab_size,
      embed=c.hidden_size,
      attentions=tuple(kinds[t] for t in c.layer_types),
      hash_layers=tuple(
          i for i, t in enumerate(c.mlp_layer_types) if t == "hash_moe"
      ),
      num_heads=c.num_attention_heads,
      head_dim=c.head_dim,
      rotary_dim=c.qk_rope_head_dim,
      query_rank=c.q_lora_rank,
      window=c.sliding_window,
      csa_rate=c.compress_rates["compressed_sparse_attention"],
      hca_rate=c.compress_rates["heavily_compressed_attention"],
      output_groups=c.o_groups,
      output_rank=c.o_lora_rank,
      index_heads=c.index_n_heads,
      index_dim=c.index_head_dim,
      index_top_k=c.index_topk,
      num_experts=c.n_routed_experts,
      top_k=c.num_experts_per_tok,
      expert_hidden=c.moe_intermediate_size,
      gate_scale=c.routed_scaling_factor,
      swiglu_limit=c.swiglu_limit,
      streams=c.hc_mult,
      sinkhorn_iterations=c.hc_sinkhorn_iters,
      hyper_epsilon=c.hc_eps,
      norm_epsilon=c.rms_norm_eps,
      rope_theta=main["rope_theta"],
      compress_theta=rope["rope_theta"],
      compress_scaling=scaling,
      max_positions=c.max_position_embeddings,
      dtype=str(c.dtype).removeprefix("torch."),
  )


class ReadTest(parameterized.TestCase):

  def test_both_dialects_are_the_flash_model(self):
    self.assertEqual(lib.from_hf(_FLASH), _EXPECTED)
    self.assertEqual(lib.from_hf(_SAVED), _EXPECTED)
    self.assertEqual(lib.from_hf({**_SAVED, **_FLASH}), _EXPECTED)

  @parameterized.parameters(
      {},
      {"compress_rate_csa": 2, "compress_rate_hca": 16},
      {"compress_rates": {"compressed_sparse_attention": 8,
                          "heavily_compressed_attention": 64}},
      {"num_hash_layers": 0},
      {"compress_ratios": [128, 128] + [4, 128] * 21},
      {"rope_scaling": None},
      {"rope_scaling": {**_FLASH["rope_scaling"], "attention_factor": 1.0}},
      {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                        "original_max_position_embeddings": 262144}},
      {"qk_rope_head_dim": 32, "compress_rope_theta": 40000.5},
      {"routed_scaling_factor": 2.5, "swiglu_limit": 7.0, "hc_mult": 2},
  )
  def test_upstream_is_read_as_transformers_reads_it(self, **changes):
    fields = {**_FLASH, **changes}
    self.assertEqual(lib.from_hf(fields), _theirs(fields))

  def test_what_transformers_saves_is_read_as_the_same_model(self):
    # transformers writes into the objects that it is given.
    copied = json.loads(json.dumps(_FLASH))
    saved = transformers.DeepseekV4Config(**copied).to_dict()
    ours = lib.from_hf(json.loads(json.dumps(saved, default=str)))
    self.assertEqual(ours, _EXPECTED)

  def test_ratios_go_on_for_blocks_that_predict_further(self):
    fields = {**_FLASH, "compress_ratios": _FLASH["compress_ratios"] + [0, 0]}
    self.assertEqual(lib.from_hf(fields), _EXPECTED)


class WriteTest(parameterized.TestCase):

  @parameterized.parameters(
      _EXPECTED,
      _SMALL,
      dataclasses.replace(_SMALL, compress_scaling=base_config.RopeScaling()),
      dataclasses.replace(_SMALL, head_dim=98, rotary_dim=2),
      dataclasses.replace(_SMALL, head_dim=206, rotary_dim=58),
  )
  def test_transformers_and_we_read_back_what_is_written(self, config):
    written = json.loads(json.dumps(lib.to_hf(config)))
    self.assertEqual(lib.from_hf(written), config)
    self.assertEqual(_theirs(written), config)


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
      "deepseek_v41", "deepseek_v3", "deepseek_v32", "qwen3_moe", None
  )
  def test_refuses_another_architecture_by_name(self, model_type):
    with self.assertRaisesRegex(
        refusal.HarnessError,
        f"config.json: model_type {model_type!r} is not supported; supported:"
        " deepseek_v4",
    ):
      lib.from_hf({**_FLASH, "model_type": model_type})

  @parameterized.parameters(
      ({"architectures": ["DeepseekV41ForCausalLM"]}, "DeepseekV41"),
      ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
      ({"topk_method": "greedy"}, "topk_method='greedy'"),
      ({"norm_topk_prob": False}, "norm_topk_prob=False"),
      ({"norm_topk_prob": 1}, "norm_topk_prob=1"),
      ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
      ({"n_shared_experts": 2}, "n_shared_experts=2"),
      ({"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
      ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
      ({"expert_dtype": "int4"}, "expert_dtype='int4'"),
      ({"n_group": 8}, "n_group=8 is a field that is not known"),
      ({"auto_map": {}}, "auto_map="),
      ({"quantization_config": {"weight_block_size": [32, 32]}},
       r"weight_block_size=\[32, 32\].*\[128, 128\]"),
      ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
      ({"quantization_config": {"bits": 4}}, "bits=4"),
      ({"quantization_config": "fp8"}, "'fp8' is not an object"),
      ({"compress_ratios": None}, "the attention of each layer is missing"),
      ({"compress_ratios": [0, 4]}, "2 entries for num_hidden_layers=43"),
      ({"compress_ratios": [0, 1, 2] * 15}, r"compress_ratios=\[0, 1, 2"),
      ({"compress_ratios": [False] * 44}, "compress_ratios="),
      ({"layer_types": ["full_attention"] * 43}, "'full_attention'"),
      ({"layer_types": ["sliding_attention"] * 42}, "42 entries"),
      ({"layer_types": ["sliding_attention"] * 43},
       "layer_types says .*compress_ratios says"),
      ({"num_hash_layers": None}, "routed by token id is missing"),
      ({"num_hash_layers": 44}, "num_hash_layers=44"),
      ({"mlp_layer_types": ["moe"] * 43},
       r"mlp_layer_types says \(\), but num_hash_layers says \(0, 1, 2\)"),
      ({"mlp_layer_types": ["dense"] * 43}, "'dense'"),
      ({"qk_rope_head_dim": None}, "the rotary width is missing"),
      ({"partial_rotary_factor": 0.25},
       "qk_rope_head_dim says 64, but partial_rotary_factor says 128"),
      ({"qk_rope_head_dim": 63}, "rotary_dim=63"),
      ({"compress_rates": {"compressed_sparse_attention": 8},
        "compress_rate_csa": 4}, "says 8, but compress_rate_csa says 4"),
      ({"compress_rates": {"csa": 4}}, "compress_rates="),
      ({"compress_rate_csa": "4"}, "compress_rate_csa='4'"),
      ({"compress_rope_theta": None}, "embedding 'compress' is missing"),
      ({"rope_theta": None}, "embedding 'main' is missing"),
      ({"rope_scaling": {**_FLASH["rope_scaling"], "attention_factor": 1.2}},
       "attention_factor=1.2"),
      ({"rope_scaling": {**_FLASH["rope_scaling"], "rope_theta": 9.0}},
       "has a base beside compress_rope_theta"),
      ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic'"),
      ({"rope_scaling": "yarn"}, "'yarn' is not an object"),
      ({"rope_parameters": {"rope_type": "yarn"}}, "main and compress"),
      ({"swiglu_limit": None}, "swiglu_limit=None"),
      ({"swiglu_limit": 0.0}, "swiglu_limit=0.0"),
      ({"torch_dtype": "float64"}, "float64"),
      ({"dtype": "float32"}, "dtype='float32' but torch_dtype='bfloat16'"),
  )
  def test_refuses_what_it_does_not_compute(self, changes, pattern):
    with self.assertRaisesRegex(refusal.HarnessError, pattern) as caught:
      lib.from_hf({**_FLASH, **changes})
    self.assertStartsWith(str(caught.exception), "config.json: ")

  @parameterized.parameters(
      ("main", {"rope_type": "yarn", "factor": 4, "attention_factor": 1.0},
       "main has rope_type='yarn'"),
      ("main", {"rope_theta": 9.0}, r"rope_theta says \(10000.0.*says \(9.0"),
      ("main", {"partial_rotary_factor": 0.5}, "rotary width.*says 256"),
      ("compress", {"rope_theta": 9.0}, "compress_rope_theta says"),
      ("compress", {"attention_factor": None}, "attention_factor=None of yarn"),
      ("compress", {"factor": 8, "type": "linear"}, "contradicts"),
  )
  def test_refuses_nested_rope_parameters(self, label, changes, pattern):
    ropes = {**_SAVED["rope_parameters"]}
    ropes[label] = {**ropes[label], **changes}
    with self.assertRaisesRegex(refusal.HarnessError, pattern):
      lib.from_hf({**_SAVED, "rope_parameters": ropes})

  def test_flat_and_nested_scaling_must_agree(self):
    fields = {**_SAVED, "rope_scaling": {**_FLASH["rope_scaling"], "factor": 8}}
    with self.assertRaisesRegex(
        refusal.HarnessError, "'compress': compress_rope_theta says .*factor=8"
    ):
      lib.from_hf(fields)

  @parameterized.parameters(
      "hidden_size", "swiglu_limit", "routed_scaling_factor", "hc_eps",
      "head_dim", "max_position_embeddings", "num_hidden_layers",
  )
  def test_refuses_a_missing_size(self, name):
    fields = {k: v for k, v in _FLASH.items() if k != name}
    with self.assertRaisesRegex(refusal.HarnessError, f"{name} is missing"):
      lib.from_hf(fields)


if __name__ == "__main__":
  absltest.main()
