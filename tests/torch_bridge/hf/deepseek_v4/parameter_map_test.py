"""Parameter map of DeepSeek-V4 against transformers' own models."""

import re

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import torch
import transformers

from moejax.modules.deepseek_v4 import parameters
from tests import bits
from tests.torch_bridge.hf.deepseek_v4 import tiny_models
from torch_bridge.hf.deepseek_v4 import config as config_lib
from torch_bridge.hf.deepseek_v4 import names
from torch_bridge.hf.deepseek_v4 import parameter_map

# Our last segments -> what transformers' modules call them. Apart from the map
# that is tested, and written by module and not by dialect.
_MODULES = (
    (r"^embedding$", "model.embed_tokens.weight"),
    (r"^lm_head$", "lm_head.weight"),
    (r"^final_norm$", "model.norm.weight"),
    (r"^head_hc\.(.*)$", r"model.hc_head.hc_\1"),
    (r"^layers\.", "model.layers."),
    (r"\.attention_hc\.", ".attn_hc."),
    (r"\.moe_hc\.", ".ffn_hc."),
    (r"\.input_norm$", ".input_layernorm.weight"),
    (r"\.mlp_norm$", ".post_attention_layernorm.weight"),
    (r"\.attention\.indexer\.weights_proj$",
     ".attention.indexer.scorer.weights_proj"),
    (r"\.attention\.indexer(\.compressor)?\.",
     ".attention.compressor.indexer."),
    (r"\.norm$", ".kv_norm"),
    (r"\.attention\.", ".self_attn."),
    (r"\.moe\.router$", ".mlp.gate.weight"),
    (r"\.moe\.table$", ".mlp.gate.tid2eid"),
    (r"\.moe\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.moe\.(gate_up|down)$", r".mlp.experts.\1_proj"),
    (r"\.moe\.shared\.", ".mlp.shared_experts."),
    (r"((self_attn|shared_experts)\..*(_proj|_norm))$", r"\1.weight"),
)


def _module_name(path):
  for pattern, name in _MODULES:
    path = re.sub(pattern, name, path)
  return path


class LoadTest(tiny_models.FolderTestCase):

  def _save(self, dtype):
    """Saves a model, reloads it in a dtype; returns its state in memory."""
    made = tiny_models.model()
    made.save_pretrained(self.folder)
    if dtype is not torch.float32:
      made = transformers.DeepseekV4ForCausalLM.from_pretrained(
          self.folder, dtype=dtype, local_files_only=True
      )
      made.save_pretrained(self.folder)
    return tiny_models.state(made)

  def _assert_same_model(self, state, dtype):
    config, params = parameter_map.load(self.folder)
    leaves = parameters.leaves(config)
    self.assertEqual(list(params), list(leaves))
    self.assertEqual(config.dtype, str(dtype).removeprefix("torch."))
    left = dict(state)
    for path, array in params.items():
      self.assertEqual((array.shape, array.dtype.name), leaves[path])
      theirs = left.pop(_module_name(path))
      if path.endswith(".table"):
        theirs = theirs.astype(np.int32)
      bits.assert_same_bits(array, theirs)
    self.assertEmpty(left)

  @parameterized.product(
      dtype=(torch.float32, torch.bfloat16), dialect=names.DIALECTS
  )
  def test_every_parameter_has_the_bits_of_transformers_model(
      self, dtype, dialect
  ):
    state = self._save(dtype)
    config = config_lib.read(self.folder)
    if dialect == names.MEMORY:
      self.write(state)
    elif dialect == names.UPSTREAM:
      self.write(tiny_models.upstream(state, config))
    self.assertEqual(
        names.find_dialect(self.tensors(), config, "folder"), dialect
    )
    self._assert_same_model(state, dtype)

  def test_transformers_loads_the_upstream_names_as_the_same_model(self):
    state = self._save(torch.float32)
    config = config_lib.read(self.folder)
    self.write(tiny_models.upstream(state, config))
    loaded, info = transformers.DeepseekV4ForCausalLM.from_pretrained(
        self.folder,
        config=transformers.DeepseekV4Config(**config_lib.to_hf(config)),
        dtype=torch.float32,
        local_files_only=True,
        output_loading_info=True,
    )
    self.assertEmpty(info["missing_keys"])
    self.assertEmpty(info["unexpected_keys"])
    theirs = tiny_models.state(loaded)
    self.assertEqual(theirs.keys(), state.keys())
    for name, array in state.items():
      bits.assert_same_bits(theirs[name], array)

  def test_a_model_all_in_bfloat16_is_widened_where_we_keep_float32(self):
    made = tiny_models.model()
    made.to(torch.bfloat16).save_pretrained(self.folder)
    state = tiny_models.state(made)
    _, params = parameter_map.load(self.folder)
    for path, array in params.items():
      theirs = state[_module_name(path)]
      if array.dtype == np.float32:
        self.assertEqual(theirs.dtype.name, "bfloat16")
        words = theirs.view(np.uint16).astype(np.uint32) << 16
        bits.assert_same_bits(array, words.view(np.float32))

  def test_gate_rows_come_before_up_rows(self):
    state = self._save(torch.float32)
    self.write(tiny_models.upstream(state, config_lib.read(self.folder)))
    gate_up = parameter_map.load(self.folder)[1]["layers.2.moe.gate_up"]
    for expert in range(16):
      at = f"layers.2.ffn.experts.{expert}"
      bits.assert_same_bits(
          gate_up[expert, :32], self.tensors()[f"{at}.w1.weight"]
      )
      bits.assert_same_bits(
          gate_up[expert, 32:], self.tensors()[f"{at}.w3.weight"]
      )

  def test_shards_give_the_parameters_of_a_single_file(self):
    made = tiny_models.model()
    made.save_pretrained(self.folder, max_shard_size="200KB")
    self.assertGreater(len(list(self.folder.glob("model-*"))), 2)
    self._assert_same_model(tiny_models.state(made), torch.float32)


class RefusalTest(tiny_models.FolderTestCase):

  def setUp(self):
    super().setUp()
    made = tiny_models.model()
    made.save_pretrained(self.folder)
    config = config_lib.read(self.folder)
    self.saved = tiny_models.upstream(tiny_models.state(made), config)

  def _change(self, name, place, value):
    array = self.saved[name].copy()
    array[place] = value
    self.write({**self.saved, name: array})

  def test_blocks_that_predict_further_are_ignored(self):
    self.write({
        **self.saved,
        "mtp.0.e_proj.weight": np.zeros((2, 2), np.float32),
        "mtp.0.other": np.full(2, np.nan, np.float32),
    })
    self.assertIn("embedding", parameter_map.load(self.folder)[1])

  @parameterized.parameters(
      "norm.weight", "layers.2.ffn.gate.bias", "layers.3.attn.attn_sink",
      "layers.1.ffn.experts.7.w3.weight", "hc_head_scale",
  )
  def test_refuses_a_missing_tensor_by_name(self, name):
    del self.saved[name]
    self.write(self.saved)
    self.assert_refused(rf"missing tensors \(1\): {re.escape(name)}")

  @parameterized.parameters(
      "layers.0.ffn.gate.bias", "layers.5.attn_norm.weight", "extra",
      "layers.0.attn.compressor.ape", "layers.0.attn.wq_a.scale",
  )
  def test_refuses_a_left_over_tensor_by_name(self, name):
    self.write({**self.saved, name: np.zeros(2, np.float32)})
    self.assert_refused(rf"left-over tensors \(1\): {re.escape(name)}")

  @parameterized.parameters(
      ("embed.weight", "model.embed_tokens.weight"),
      ("layers.0.attn.wq_a.weight", "model.layers.0.attn.wq_a.weight"),
      ("layers.0.attn.kv_norm.weight", "model.layers.0.attn.norm.weight"),
      ("layers.0.attn.wq_a.weight", "model.layers.0.self_attn.q_a_proj.weight"),
      ("head.weight", "lm_head.weight"),
  )
  def test_refuses_mixed_dialects(self, name, other):
    self.saved[other] = self.saved.pop(name)
    self.write(self.saved)
    self.assert_refused(
        rf"mixes dialects: {len(self.saved) - 1} tensors have names of"
        rf" upstream, 1 have not: {re.escape(other)}"
    )

  def test_refuses_names_of_no_dialect(self):
    self.write({"w": np.zeros(2, np.float32)})
    self.assert_refused("are of no known dialect")

  @parameterized.parameters(-1, 16, 2**32)
  def test_refuses_a_hash_table_with_other_experts(self, expert):
    self._change("layers.1.ffn.gate.tid2eid", (7, 3), expert)
    self.assert_refused(
        r"layers.1.ffn.gate.tid2eid names 1 experts outside the 16; first in"
        rf" row 7, slot 3: {expert}"
    )

  def test_refuses_a_row_with_an_expert_twice_unless_told_to_keep_it(self):
    name = "layers.0.ffn.gate.tid2eid"
    self._change(name, 9, [3, 1, 4, 1, 5, 9])
    self.assert_refused(
        r"layers.0.ffn.gate.tid2eid names an expert twice in 1 of 256 rows;"
        r" first in row 9: \[3, 1, 4, 1, 5, 9\]"
    )
    _, params = parameter_map.load(self.folder, duplicate_experts="keep")
    self.assertEqual(
        params["layers.0.moe.table"][9].tolist(), [3, 1, 4, 1, 5, 9]
    )
    with self.assertRaisesRegex(ValueError, "'sum' is not one of refuse"):
      parameter_map.load(self.folder, duplicate_experts="sum")

  @parameterized.parameters(
      ("layers.4.ffn.experts.3.w2.weight", (5, 6), np.nan),
      ("layers.2.hc_ffn_scale", (1,), np.inf),
      ("layers.3.attn.indexer.compressor.ape", (2, 30), -np.inf),
  )
  def test_refuses_weights_that_are_not_finite(self, name, place, value):
    self._change(name, place, value)
    self.assert_refused(
        f"tensor {re.escape(name)} holds 1 weights that are not finite; first"
        f" at {re.escape(str(place))}: {value}"
    )

  def test_refuses_wrong_shapes_and_dtypes_together(self):
    self.saved["norm.weight"] = np.zeros(63, np.float32)
    self.saved["layers.0.attn.wkv.weight"] = np.zeros((32, 64), np.float16)
    self.saved["layers.0.ffn.gate.weight"] = np.zeros((16, 64), np.int8)
    self.write(self.saved)
    self.assert_refused(
        r"wrong shapes \(1\): norm.weight is \(63,\), not \(64,\)",
        r"not read for a float32 model \(2\): layers.0.attn.wkv.weight is"
        r" float16, layers.0.ffn.gate.weight is int8",
    )


if __name__ == "__main__":
  absltest.main()
