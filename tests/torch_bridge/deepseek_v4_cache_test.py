"""transformers' cache as our state and back: the model decodes on, bit for bit.

Needs no accelerator. The model is random and small, float32 and bfloat16.
"""

import copy
import inspect
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import torch
import transformers
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from moejax.contracts import refusal
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.protocols.state import difference
from moejax.protocols.state import layout as layout_lib
from moejax.protocols.state import persistent_state
from moejax.protocols.state import working_state
from tests import bits
from torch_bridge.architectures import deepseek_v4_cache as lib
from torch_bridge import tensor_bits

_CAPACITY = 32
_HF = dict(
    vocab_size=256, hidden_size=64, moe_intermediate_size=32,
    num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=1,
    head_dim=32, q_lora_rank=32, qk_rope_head_dim=8, num_experts_per_tok=6,
    n_routed_experts=16, n_shared_experts=1, compress_ratios=[0, 4, 128, 4, 0],
    compress_rate_hca=8, num_hash_layers=2, sliding_window=8, o_groups=2,
    o_lora_rank=16, index_n_heads=4, index_head_dim=16, index_topk=4,
    hc_mult=4, hc_sinkhorn_iters=20, max_position_embeddings=1024,
    rope_scaling={
        "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    bos_token_id=0, eos_token_id=1,
)
_MODELS = {}


def _model(dtype: str):
  """The model of the specification, section 14, with its weights."""
  if dtype not in _MODELS:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = modeling_deepseek_v4.DeepseekV4ForCausalLM(
        transformers.DeepseekV4Config(**_HF)
    ).eval()
    with torch.no_grad():
      for name, value in [*model.named_parameters(), *model.named_buffers()]:
        leaf = name.rsplit(".", 1)[-1]
        noise = torch.randn(value.shape)
        if leaf == "tid2eid":
          value.copy_(torch.argsort(torch.rand(len(value), 16))[:, :6])
        elif leaf == "e_score_correction_bias":
          value.copy_(0.1 * noise)
        elif leaf in ("sinks", "position_bias", "base", "hc_base"):
          value.copy_(0.5 * noise)
        elif leaf in ("scale", "hc_scale"):
          value.copy_(1 + 0.2 * noise)
        elif "norm" in name:
          value.copy_(1 + 0.1 * noise)
        elif "inv_freq" not in leaf:
          value.mul_(5)
    # The loader decides which parameters stay float32 in a bfloat16 model.
    with tempfile.TemporaryDirectory() as folder:
      model.save_pretrained(folder)
      model = type(model).from_pretrained(folder, dtype=dtype).eval()
    _make_norms_run(model)
    _MODELS[dtype] = model
  return _MODELS[dtype]


def _make_norms_run(model):
  """transformers 5.17 loads float32 norms that no bfloat16 linear can follow.

  Its norm multiplies after narrowing; 5.24's narrows last.
  """
  probe = torch.ones(1, 1, 64, dtype=model.dtype)
  if model.model.norm(probe).dtype != model.dtype:
    for module in model.modules():
      if isinstance(module, modeling_deepseek_v4.DeepseekV4RMSNorm):
        module.to(model.dtype)


def _config(dtype: str) -> config_lib.DeepseekV4Config:
  return config_lib.DeepseekV4Config(
      vocab_size=256, embed=64, attentions=("swa", "csa", "hca", "csa", "swa"),
      hash_layers=(0, 1), num_heads=4, head_dim=32, rotary_dim=8,
      query_rank=32, window=8, csa_rate=4, hca_rate=8, output_groups=2,
      output_rank=16, index_heads=4, index_dim=16, index_top_k=4,
      num_experts=16, top_k=6, expert_hidden=32, gate_scale=1.5,
      swiglu_limit=10.0, dtype=dtype,
  )


@torch.no_grad()
def _feed(model, cache, tokens):
  """The logits of a batch of tokens, after them being cached."""
  forward = inspect.signature(type(model).forward).parameters
  word = "cache" if "cache" in forward else "past_key_values"
  tokens = torch.as_tensor(np.asarray(tokens))
  return model(tokens, **{word: cache}, use_cache=True).logits


def _tokens(length, batch=2, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (batch, length))


def _prefilled(model, length, batch=2):
  cache = transformers.DynamicCache(config=model.config)
  _feed(model, cache, _tokens(length, batch))
  return cache


class CacheTest(parameterized.TestCase):

  @parameterized.product(
      dtype=("float32", "bfloat16"), length=(1, 3, 4, 7, 8, 9, 16, 45)
  )
  def test_the_model_decodes_on_from_our_state(self, dtype, length):
    model, config = _model(dtype), _config(dtype)
    cache = _prefilled(model, length)
    working = lib.from_cache(config, cache, _CAPACITY)
    self.assertEqual(working.layers[0].window.dtype.name, dtype)
    fresh = lib.to_cache(config, working, model.config)
    self._assert_same_steps(model, cache, fresh)

  @parameterized.product(dtype=("float32", "bfloat16"), length=(3, 8, 14))
  def test_so_it_does_from_a_state_that_was_captured(self, dtype, length):
    """Through the canonical state, whose scores hold the position bias."""
    model, config = _model(dtype), _config(dtype)
    cache = _prefilled(model, length, batch=1)
    bias = lib.position_biases(model)
    state = working_state.capture(
        config, lib.from_cache(config, cache, _CAPACITY), bias, (1,),
        layout_lib.CARRIED,
    )
    working = working_state.restore(state, bias, _CAPACITY)
    fresh = lib.to_cache(config, working, model.config)
    self._assert_same_steps(model, cache, fresh, batch=1)

  def _assert_same_steps(self, model, cache, fresh, batch=2):
    for step in range(5):
      tokens = _tokens(1, batch, seed=step + 1)
      bits.assert_same_bits(
          tensor_bits.to_numpy(_feed(model, fresh, tokens)),
          tensor_bits.to_numpy(_feed(model, cache, tokens)),
      )

  @parameterized.parameters(3, 8, 13)
  def test_a_converted_cache_has_the_same_tensors(self, length):
    model, config = _model("bfloat16"), _config("bfloat16")
    cache = _prefilled(model, length)
    working = lib.from_cache(config, cache, _CAPACITY)
    fresh = lib.to_cache(config, working, model.config)
    for ours, theirs in zip(fresh.layers, cache.layers, strict=True):
      self.assertIs(type(ours), type(theirs))
      bits.assert_same_bits(*_pair(ours.keys, theirs.keys))
      bits.assert_same_bits(*_pair(ours.values, theirs.values))
      self.assertEqual(ours.cumulative_length, theirs.cumulative_length)
      for field in ("buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate",
                    "compressed_kv", "entry_count"):
        left, right = getattr(ours, field, {}), getattr(theirs, field, {})
        self.assertEqual(set(left), set(right))
        for name, value in right.items():
          if torch.is_tensor(value):
            bits.assert_same_bits(*_pair(left[name], value))
          else:
            self.assertEqual(left[name], value)

  @parameterized.parameters(6, 7, 8, 13, 24)
  def test_a_cache_keeps_what_the_layout_says(self, length):
    """Against what the model's own projections put out, token by token."""
    model, config = _model("float32"), _config("float32")
    seen = {}
    hooks = [
        module.register_forward_hook(
            lambda _, __, out, name=name: seen.setdefault(name, out)
        )
        for name, module in model.named_modules()
        if name.endswith(("compressor.kv_proj", "compressor.gate_proj",
                          "indexer.kv_proj", "indexer.gate_proj"))
    ]
    cache = _prefilled(model, length, batch=1)
    for hook in hooks:
      hook.remove()
    bias = lib.position_biases(model)
    live = working_state.capture(
        config, lib.from_cache(config, cache, _CAPACITY), bias, (1,),
        layout_lib.LIVE,
    ).arrays
    for layer, rate, inner, component in (
        (1, 4, "", "compressor_state"), (2, 8, "", "compressor_state"),
        (3, 4, "indexer.", "indexer_state"),
    ):
      at = f"model.layers.{layer}.self_attn.compressor.{inner}"
      kv = tensor_bits.to_numpy(seen[f"{at}kv_proj"])[0]
      gate = tensor_bits.to_numpy(seen[f"{at}gate_proj"])[0]
      ape = bias[working_state.bias_name(layer, component)]
      start = length - length % rate
      name = f"layers.{layer}.{component}"
      bits.assert_same_bits(live[f"{name}.kv"], kv[start:])
      bits.assert_same_bits(
          live[f"{name}.score"], gate[start:] + ape[: length % rate]
      )
      if layer != 2:
        half = kv.shape[1] // 2
        before = slice(start - rate, start)
        bits.assert_same_bits(live[f"{name}.previous_kv"], kv[before, :half])
        bits.assert_same_bits(
            live[f"{name}.previous_score"], (gate[before] + ape)[:, :half]
        )

  @parameterized.parameters(5, 7, 8, 13)
  def test_only_the_row_that_leaves_is_missing(self, length):
    """Before: all of it; after one more token the cache drops a row of it."""
    model, config = _model("float32"), _config("float32")
    cache = _prefilled(model, length, batch=1)
    bias = lib.position_biases(model)

    def state(working, layout=layout_lib.LIVE):
      return working_state.capture(config, working, bias, (1,), layout)

    working = lib.from_cache(config, cache, _CAPACITY)
    whole = copy.deepcopy(working)
    first = length - config.window
    if first >= 0:
      for layer in whole.layers:
        layer.window[:, first % config.window] = 3.0
    self.assertIsNone(
        difference.same_live(
            state(whole), state(working), layout_lib.CARRIED
        )
    )
    found = list(difference.rows(state(whole, "raw"), state(working, "raw")))
    self.assertEqual(
        [(r.component, r.layer, r.position, r.status) for r in found],
        [
            (layout_lib.WINDOW, i, first, layout_lib.LEAVING)
            for i in range(5)
            if first >= 0
        ],
    )

  def test_dead_rows_are_zero_or_without_weight(self):
    model, config = _model("float32"), _config("float32")
    cache = _prefilled(model, 3)
    layer = lib.from_cache(config, cache, _CAPACITY).layers[1]
    self.assertTrue(np.isneginf(layer.compressor.previous_score).all())
    self.assertEqual(layer.compressor.previous_score.dtype, np.float32)
    self.assertFalse(layer.compressor.previous_kv.any())
    self.assertFalse(layer.compressor.kv[:, 3:].any())
    self.assertFalse(layer.compressor.entries.any())
    self.assertTrue(layer.compressor.kv[:, :3].all())


def _pair(a, b):
  return tensor_bits.to_numpy(a), tensor_bits.to_numpy(b)


class RefusalTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.model = _model("float32")
    self.config = _config("float32")
    self.cache = copy.deepcopy(_prefilled(self.model, 9))

  def _refused(self, text, capacity=_CAPACITY):
    with self.assertRaisesRegex(refusal.HarnessError, text):
      lib.from_cache(self.config, self.cache, capacity)

  def test_an_empty_cache(self):
    self.cache = transformers.DynamicCache(config=self.model.config)
    self._refused("may be empty")

  def test_layers_that_contradict_each_other(self):
    self.cache.layers[3].cumulative_length = 8
    self._refused("layer 3 has seen 8 tokens, layer 0 9")

  def test_w_rows_instead_of_w_minus_1(self):
    layer = self.cache.layers[0]
    layer.keys = torch.cat([layer.keys[:, :, :1], layer.keys], dim=2)
    self._refused(r"layer 0 keys: shape \(2, 1, 8, 32\), not \(2, 1, 7, 32\)")

  def test_wrong_counts_and_small_buffers(self):
    self._refused("layer 1 compressor: 2 entries", capacity=1)
    self.cache.layers[2].entry_count["compressor"] = 2
    self._refused("layer 2 compressor: 2 entries")

  def test_a_buffer_of_another_length(self):
    layer = self.cache.layers[1]
    layer.buffer_kv["indexer"] = layer.buffer_kv["indexer"][:, :0]
    self._refused("layer 1 indexer buffer_kv")

  def test_an_overlap_gate_of_another_dtype(self):
    layer = self.cache.layers[1]
    narrow = layer.overlap_gate["compressor"].to(torch.bfloat16)
    layer.overlap_gate["compressor"] = narrow
    self._refused("overlap_gate: bfloat16, not float32")

  def test_layers_of_another_kind(self):
    self.cache.layers[1], self.cache.layers[2] = (
        self.cache.layers[2], self.cache.layers[1]
    )
    self._refused("layer 1 of the cache keeps .'compressor'., which is no csa")

  def test_sequences_of_different_lengths(self):
    working = lib.from_cache(self.config, self.cache, _CAPACITY)
    uneven = working._replace(lengths=np.array([9, 8], np.int32))
    with self.assertRaisesRegex(refusal.HarnessError, r"\[9, 8\]"):
      lib.to_cache(self.config, uneven, self.model.config)

  def test_a_model_of_another_depth(self):
    working = lib.from_cache(self.config, self.cache, _CAPACITY)
    other = transformers.DeepseekV4Config(
        **{**_HF, "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 0]}
    )
    with self.assertRaisesRegex(refusal.HarnessError, "4 layers, a state of 5"):
      lib.to_cache(self.config, working, other)

  def test_comparison_with_a_state_from_another_prefix(self):
    bias = lib.position_biases(self.model)
    working = lib.from_cache(self.config, self.cache, _CAPACITY)
    a, b = (
        working_state.capture(
            self.config, working, bias, prompt, layout_lib.CARRIED
        )
        for prompt in ((1, 2), (1, 3))
    )
    with self.assertRaisesRegex(refusal.HarnessError, "prompt"):
      persistent_state.same_bits(a, b)


if __name__ == "__main__":
  absltest.main()
