"""A small DeepSeek-V4 model of transformers with all kinds of layers.

transformers starts hash tables, biases and sinks at zero and scales at one;
then a graph that leaves one of them out goes unnoticed. So all get values.
"""

import pathlib

import torch
import transformers

transformers.utils.logging.disable_progress_bar()

# Window 8, compression rates 4 and 8, four entries seen by an indexer.
_FIELDS = {
    "vocab_size": 256,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "num_experts_per_tok": 6,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "compress_ratios": [0, 4, 128, 4, 0],
    "compress_rate_hca": 8,
    "num_hash_layers": 2,
    "sliding_window": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "max_position_embeddings": 1024,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def save(folder: pathlib.Path, dtype: torch.dtype) -> pathlib.Path:
  """Has transformers write a model whose values are all random."""
  torch.manual_seed(0)
  config = transformers.DeepseekV4Config(**_FIELDS)
  model = transformers.DeepseekV4ForCausalLM(config)
  normal = torch.randn
  with torch.no_grad():
    for name, values in [*model.named_parameters(), *model.named_buffers()]:
      if name.endswith("inv_freq"):
        continue
      if name.endswith("tid2eid"):
        values.copy_(torch.stack([torch.randperm(16)[:6] for _ in values]))
      elif name.endswith("e_score_correction_bias"):
        values.copy_(0.1 * normal(values.shape))
      elif name.endswith(("sinks", "position_bias", "base")):
        values.copy_(0.5 * normal(values.shape))
      elif "norm" in name:
        values.copy_(1 + 0.1 * normal(values.shape))
      elif name.endswith("scale"):
        values.copy_(1 + 0.2 * normal(values.shape))
      else:
        values.mul_(5)
  model.save_pretrained(folder)
  if dtype != torch.float32:
    # As transformers loads it: some parts stay in float32.
    transformers.DeepseekV4ForCausalLM.from_pretrained(
        folder, dtype=dtype
    ).save_pretrained(folder)
  return folder
