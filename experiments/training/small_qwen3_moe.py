"""The small Qwen3-MoE: its shape and how it is trained.

4.3 million parameters over 6,144 tokens; a token meets six experts of sixteen.

Layer: experiments.
"""

from moejax.modules import config as config_lib
from moejax.training import recipe

NAME = "small_qwen3_moe"


def config(vocab_size: int) -> config_lib.DecoderConfig:
  """The shape over a vocabulary of that size."""
  return config_lib.DecoderConfig(
      vocab_size=vocab_size,
      embed=128,
      num_layers=8,
      num_heads=4,
      num_kv_heads=2,
      head_dim=32,
      hidden=256,  # No layer is dense, so nothing has this width.
      expert_hidden=48,
      num_experts=16,
      top_k=6,
      normalize_gates=True,
      sparse_layers=tuple(range(8)),
      max_positions=1024,
  )


# 52 million tokens, nearly fifteen passes over a text of 3.6 million. A larger
# batch would mean fewer steps or more passes, and the text is what is scarce.
RECIPE = recipe.Recipe(
    NAME,
    seed=20261201,
    steps=1600,
    batch=128,
    length=256,
    chunk=20,
    peak=3e-3,
    warm_up=100,
    # transformers' default, 0.001, is for batches of millions of tokens.
    balance=0.01,
)
