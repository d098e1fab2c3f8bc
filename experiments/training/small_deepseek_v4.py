"""The small DeepSeek-V4: its shape and how it is trained.

4.1 million parameters over 6,144 tokens. Eight layers hold every kind of
attention with both kinds of route; a sequence of 256 tokens passes the window,
sixteen entries of an HCA layer and four times what an indexer selects:

  layer   0    1    2    3    4    5    6    7
  mixes   SWA  CSA  HCA  CSA  HCA  CSA  HCA  SWA
  route   hash hash top  top  top  top  top  top

Layer: experiments.
"""

from moejax.modules import config as base_config
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.training import recipe

NAME = "small_deepseek_v4"

_SWA, _CSA, _HCA = config_lib.ATTENTIONS


def config(vocab_size: int) -> config_lib.DeepseekV4Config:
  """The shape over a vocabulary of that size."""
  return config_lib.DeepseekV4Config(
      vocab_size=vocab_size,
      embed=128,
      attentions=(_SWA, _CSA, _HCA, _CSA, _HCA, _CSA, _HCA, _SWA),
      hash_layers=(0, 1),
      num_heads=4,
      head_dim=64,
      rotary_dim=16,
      query_rank=64,
      window=64,
      csa_rate=4,
      hca_rate=16,
      output_groups=2,
      output_rank=32,
      index_heads=4,
      index_dim=32,
      index_top_k=16,
      num_experts=16,
      top_k=6,
      expert_hidden=32,
      gate_scale=1.5,
      swiglu_limit=10.0,
      compress_scaling=base_config.RopeScaling(
          "yarn", factor=4.0, original_positions=256, attention_factor=1.0
      ),
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
    # The release's speed, 0.001, is for a hundred times as many steps.
    bias_speed=0.002,
)
