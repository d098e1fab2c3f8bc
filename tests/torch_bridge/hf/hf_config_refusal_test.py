"""Configs that are refused, with the file, the field and the value."""

import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import refusal
from tests.torch_bridge.hf import published_config
from torch_bridge.hf import hf_config

_PUBLISHED = published_config.PUBLISHED
_YARN = published_config.YARN
_CASES = pathlib.Path(__file__).parents[2] / "cases" / "files"


def _from(**changes):
  return hf_config.from_hf({**_PUBLISHED, **changes})


def _without(*names):
  return {k: v for k, v in _PUBLISHED.items() if k not in names}


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
      "qwen2_moe", "mixtral", "deepseek_v4", "qwen3", None
  )
  def test_refuses_another_architecture_by_name(self, model_type):
    with self.assertRaisesRegex(
        refusal.HarnessError,
        f"model_type {model_type!r} is not supported; supported: qwen3_moe",
    ):
      _from(model_type=model_type)

  @parameterized.parameters(
      ({"architectures": ["Qwen3MoeForSequenceClassification"]}, "ForSequence"),
      ({"hidden_act": "gelu"}, "hidden_act='gelu'.*supported: 'silu'"),
      ({"quantization_config": {"quant_method": "awq"}},
       "quantization_config={'quant_method': 'awq'}"),
      ({"qkv_bias": True}, "qkv_bias=True"),
      ({"use_qk_norm": False}, "use_qk_norm=False"),
      ({"shared_expert_intermediate_size": 8},
       "shared_expert_intermediate_size=8"),
      ({"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is a field that"),
      ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map="),
      ({"layer_types": ["full_attention"]}, "layer_types="),
      ({"original_max_position_embeddings": 9}, "original_max_position_emb"),
      ({"attn_implementation": "sdpa"}, "attn_implementation='sdpa'"),
      ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
      ({"rope_scaling": {**_YARN, "partial_rotary_factor": 0.5}},
       "partial_rotary_factor=0.5"),
      ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
       "rope_type='dynamic'.*supported: default, linear, yarn"),
      ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "'llama3'"),
      ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
      ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
      ({"rope_scaling": {"rope_type": "yarn"}}, "factor is missing"),
      ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "0.5"),
      ({"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 3}},
       "beta_fast=3 has no meaning here for rope_type 'linear'"),
      ({"rope_scaling": {**_YARN, "short_factor": [1]}}, "short_factor"),
      ({"rope_scaling": {**_YARN, "original_max_position_embeddings": 0}},
       "original_max_position_embeddings=0"),
      ({"rope_scaling": {**_YARN, "truncate": 1}}, "truncate=1"),
      ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}},
       "rope_type='linear' contradicts type='yarn'"),
      ({"rope_scaling": _YARN, "rope_parameters": {"rope_type": "default"}},
       "rope_scaling=.*contradicts rope_parameters="),
      ({"rope_parameters": {"rope_theta": 5.0}},
       "rope_theta=5.0 contradicts rope_theta=1000000.0"),
      ({"rope_scaling": "yarn"}, "'yarn' are not an object"),
      ({"rope_theta": 0}, "rope_theta=0.0 is not above 1"),
      ({"rope_theta": "1e6"}, "rope_theta='1e6' is not a number"),
      ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf is not finite"),
      ({"num_local_experts": 64}, "num_experts=128 but num_local_experts=64"),
      ({"dtype": "float32"}, "dtype='float32' but torch_dtype='bfloat16'"),
      ({"torch_dtype": "float64"}, "dtype='float64'"),
      ({"vocab_size": "151936"}, "vocab_size='151936' is not a whole number"),
      ({"hidden_size": True}, "hidden_size=True is not a whole number"),
      ({"norm_topk_prob": 1}, "norm_topk_prob=1 is not true or false"),
      ({"mlp_only_layers": ["0"]}, "mlp_only_layers="),
      ({"mlp_only_layers": 3}, "mlp_only_layers=3"),
      ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
      ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0"),
      ({"num_experts_per_tok": 129}, "top_k=129.*num_experts=128"),
      ({"num_key_value_heads": 5}, "num_heads=32.*num_kv_heads=5"),
      ({"head_dim": 127}, "head_dim=127"),
  )
  def test_refuses_what_it_does_not_compute(self, changes, pattern):
    with self.assertRaisesRegex(refusal.HarnessError, pattern) as caught:
      _from(**changes)
    self.assertStartsWith(str(caught.exception), "config.json: ")

  @parameterized.parameters(
      "hidden_size",
      "intermediate_size",
      "moe_intermediate_size",
      "num_attention_heads",
      "num_experts",
      "num_experts_per_tok",
      "num_hidden_layers",
      "num_key_value_heads",
      "vocab_size",
  )
  def test_refuses_a_missing_size(self, name):
    with self.assertRaisesRegex(refusal.HarnessError, f"{name} is missing"):
      hf_config.from_hf(_without(name))

  def test_refuses_a_missing_dtype(self):
    with self.assertRaisesRegex(refusal.HarnessError, "dtype is missing"):
      hf_config.from_hf(_without("torch_dtype"))

  def test_a_refused_file_is_named(self):
    with self.assertRaisesRegex(
        refusal.HarnessError,
        r"norm_topk_false.config\.json: model_type 'qwen2_moe'",
    ):
      hf_config.read(_CASES / "norm_topk_false")

  @parameterized.parameters(
      (None, "config.json is absent"),
      ("{", "damaged JSON"),
      ("[1]", "a JSON list"),
      ('{"vocab_size": 1, "vocab_size": 2}', "'vocab_size' occurs twice"),
  )
  def test_refuses_a_damaged_file(self, text, pattern):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    if text is not None:
      (folder / "config.json").write_text(text)
    with self.assertRaisesRegex(refusal.HarnessError, pattern):
      hf_config.read(folder)


if __name__ == "__main__":
  absltest.main()
