"""Our DeepSeek-V4 decoder against unmodified transformers, tap by tap.

In portable arithmetic every operation of both sides has one right answer, so
all of them are compared by their bits.

Needs no accelerator.
"""

import pathlib
import re
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import torch

from moejax.contracts import deepseek_v4 as contract_lib
from moejax.contracts import named_combines
from moejax.modules import config as shapes
from moejax.modules import decoder as nest_lib
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import decoder as decoder_lib
from moejax.modules.deepseek_v4 import parameters
from moejax.modules.deepseek_v4 import state as state_lib
from moejax.numerics import reference_ops
from moejax.protocols import capture
from moejax.protocols import deepseek_v4_layout
from moejax.protocols import taps
from moejax.protocols import trajectory
from tests import bits
from tests.torch_bridge import tiny_deepseek_v4
from torch_bridge import tensor_bits
from torch_bridge import torch_reference

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_NAMES = (  # transformers' names, by regular expression, to ours.
    (r"^model\.", ""),
    (r"embed_tokens\.weight", "embedding"),
    (r"lm_head\.weight", "lm_head"),
    (r"^norm\.weight", "final_norm"),
    (r"hc_head\.hc_", "head_hc."),
    (r"attn_hc", "attention_hc"),
    (r"ffn_hc", "moe_hc"),
    (r"input_layernorm\.weight", "input_norm"),
    (r"post_attention_layernorm\.weight", "mlp_norm"),
    (r"self_attn\.compressor\.indexer\.(q_b_proj)\.weight",
     r"attention.indexer.\1"),
    (r"self_attn\.compressor\.indexer\.scorer\.weights_proj\.weight",
     "attention.indexer.weights_proj"),
    (r"self_attn\.compressor\.indexer\.", "attention.indexer.compressor."),
    (r"self_attn", "attention"),
    (r"compressor\.kv_norm\.weight", "compressor.norm"),
    (r"mlp\.gate\.weight", "moe.router"),
    (r"mlp\.gate\.e_score_correction_bias", "moe.bias"),
    (r"mlp\.gate\.tid2eid", "moe.table"),
    (r"mlp\.experts\.gate_up_proj", "moe.gate_up"),
    (r"mlp\.experts\.down_proj", "moe.down"),
    (r"mlp\.shared_experts", "moe.shared"),
    (r"\.weight$", ""),
)


def _config(hf, dtype: str) -> config_lib.DeepseekV4Config:
  kinds = {
      "sliding_attention": config_lib.SWA,
      "compressed_sparse_attention": config_lib.CSA,
      "heavily_compressed_attention": config_lib.HCA,
  }
  yarn = hf.rope_parameters["compress"]
  return config_lib.DeepseekV4Config(
      vocab_size=hf.vocab_size,
      embed=hf.hidden_size,
      attentions=tuple(kinds[t] for t in hf.layer_types),
      hash_layers=tuple(
          i for i, t in enumerate(hf.mlp_layer_types) if t == "hash_moe"
      ),
      num_heads=hf.num_attention_heads,
      head_dim=hf.head_dim,
      rotary_dim=hf.qk_rope_head_dim,
      query_rank=hf.q_lora_rank,
      window=hf.sliding_window,
      csa_rate=hf.compress_rates["compressed_sparse_attention"],
      hca_rate=hf.compress_rates["heavily_compressed_attention"],
      output_groups=hf.o_groups,
      output_rank=hf.o_lora_rank,
      index_heads=hf.index_n_heads,
      index_dim=hf.index_head_dim,
      index_top_k=hf.index_topk,
      num_experts=hf.n_routed_experts,
      top_k=hf.num_experts_per_tok,
      expert_hidden=hf.moe_intermediate_size,
      gate_scale=hf.routed_scaling_factor,
      swiglu_limit=hf.swiglu_limit,
      compress_scaling=shapes.RopeScaling(
          "yarn",
          factor=yarn["factor"],
          original_positions=yarn["original_max_position_embeddings"],
          attention_factor=1.0,
      ),
      max_positions=hf.max_position_embeddings,
      dtype=dtype,
  )


def _parameters(model, config) -> dict:
  found = {}
  for name, tensor in model.state_dict().items():
    for pattern, ours in _NAMES:
      name = re.sub(pattern, ours, name)
    found[name] = tensor_bits.to_numpy(tensor)
  out = {}
  for path, (shape, dtype) in parameters.leaves(config).items():
    array = found.pop(path)
    if dtype == "int32":
      array = array.astype(np.int32)
    assert (array.shape, array.dtype.name) == (shape, dtype), path
    out[path] = jnp.asarray(array)
  assert not found, sorted(found)
  return nest_lib.nest(out)


def _ours(decoder, feeds, capacity):
  """[{tap: value}] of one sequence, cut as a run that grows shows them."""
  state = state_lib.empty(decoder.config, 1, capacity)
  steps, seen = [], 0
  for tokens in feeds:
    recorder = capture.BatchRecorder(trajectory.keep_all)
    _, state = decoder(jnp.int32([tokens]), state, tap=recorder)
    step = {}
    for name, value in recorder.seen.items():
      value = np.asarray(jax.device_get(value))
      if {"token", "window"} & {*taps.axes(name)}:
        value = value if ".moe." in name else value[0]
        at = deepseek_v4_layout.region(
            name, decoder.config, len(tokens), 0, seen, capacity
        )
        value = value[at]
      if value.size:
        step[name] = value
    steps.append(step)
    seen += len(tokens)
  return steps, state


class DeepseekV4Test(parameterized.TestCase):

  # Each compiles some hundred programs, which is most of its time.
  @parameterized.parameters(
      ("bfloat16", "grouped_mm"), ("float32", "eager")
  )
  def test_every_tap_has_the_reference_s_bits(self, dtype, implementation):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    tiny_deepseek_v4.save(folder, _DTYPES[dtype])
    reference = torch_reference.TransformersReference(folder, implementation)
    config = _config(reference.model.config, dtype)
    combine = named_combines.at_dtype(
        named_combines.named(f"transformers_{implementation}"), dtype
    )
    contract = contract_lib.of(
        "portable", config_lib.router_contract(config), combine
    )
    decoder = decoder_lib.Decoder(
        config,
        _parameters(reference.model, config),
        contract,
        reference_ops.operations(contract),
    )
    random = np.random.default_rng(3)
    prompt = trajectory.Prompt("p", tuple(random.integers(2, 256, 21).tolist()))
    theirs = reference.run([prompt], 4, arithmetic="portable")[0]
    feeds = [s.tokens for s in theirs.steps]
    ours, _ = _ours(decoder, feeds, 48)
    for mine, step in zip(ours, theirs.steps, strict=True):
      self.assertEqual(set(mine), set(step.taps))
      for name, value in mine.items():
        with self.subTest(name):
          bits.assert_same_bits(value, step.taps[name])


if __name__ == "__main__":
  absltest.main()
