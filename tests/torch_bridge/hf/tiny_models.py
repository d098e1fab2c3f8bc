"""Small Qwen3-MoE models of transformers, and the folders it writes of them.

Every parameter gets random values: transformers starts norms at one and biases
at zero, and then a loader that swaps two of them goes unnoticed.
"""

import pathlib

import torch
import transformers

transformers.utils.logging.disable_progress_bar()

# 2 * 12 and 12 differ from 16, so that shapes tell the axes apart.
_FIELDS = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "max_position_embeddings": 64,
}


def config(**changes) -> transformers.Qwen3MoeConfig:
  """Returns a config of three layers, the middle one dense."""
  return transformers.Qwen3MoeConfig(**{**_FIELDS, **changes})


def model(
    seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes
) -> transformers.Qwen3MoeForCausalLM:
  """Returns a model whose parameters are all random."""
  made = transformers.Qwen3MoeForCausalLM(config(**changes)).to(dtype).eval()
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for parameter in made.parameters():
      values = torch.randn(parameter.shape, generator=generator)
      parameter.copy_(values * 0.3 + 0.05)
  return made


def save(
    made: transformers.Qwen3MoeForCausalLM, folder: pathlib.Path, **options
) -> pathlib.Path:
  """Has transformers write a model; returns the folder."""
  made.save_pretrained(folder, **options)
  return folder
