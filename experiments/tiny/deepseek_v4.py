"""A small DeepSeek-V4 checkpoint made from a seed and a text.

Eight layers hold every kind of attention with both kinds of route, and the
window, the compression rates and the indexer's choice are so small that a
sentence passes all of them:

  layer   0    1    2    3    4    5    6    7
  mixes   SWA  CSA  HCA  CSA  HCA  CSA  HCA  SWA
  route   hash hash top  top  top  top  top  top

transformers starts hash tables, biases and sinks at zero and scales at one;
here all are drawn, so that an implementation that leaves one out shows it. How
weights are drawn is in `tiny/seeded_weights.py`, how the folder is made in
`tiny/checkpoint_folder.py`. The tensors have the names of the release and,
unpacked, its shapes; every one but a hash table is bfloat16.

Layer: experiments.
"""

from collections.abc import Iterator
import dataclasses
import pathlib

import numpy as np

from experiments.tiny import checkpoint_folder
from experiments.tiny import qwen3_moe as tiny_qwen3_moe
from experiments.tiny import seeded_weights
from experiments.tiny import tokenizer
from moejax.modules import config as base_config
from moejax.modules.deepseek_v4 import config as config_lib
from torch_bridge.hf.deepseek_v4 import config as hf_config
from torch_bridge.hf.deepseek_v4 import names

# The first from 20261130 on with which the six shipped prompts go on without an
# exact tie of the two best tokens, with eager and with grouped_mm experts.
SEED = 20261136
SHIPPED = pathlib.Path(__file__).parents[1] / "checkpoints" / "tiny_deepseek_v4"

# Written by hand. They live in the shipped folder and are copied from there.
SOURCES = ("README.md", "prompts_by_length.json")
DTYPES = ("bfloat16", "float32")

_SWA, _CSA, _HCA = config_lib.ATTENTIONS

CONFIG = config_lib.DeepseekV4Config(
    vocab_size=tokenizer.VOCAB_SIZE,
    embed=64,
    attentions=(_SWA, _CSA, _HCA, _CSA, _HCA, _CSA, _HCA, _SWA),
    hash_layers=(0, 1),
    num_heads=4,
    head_dim=32,
    rotary_dim=8,
    query_rank=32,
    window=8,
    csa_rate=4,
    hca_rate=8,
    output_groups=2,
    output_rank=16,
    index_heads=4,
    index_dim=16,
    index_top_k=4,
    num_experts=16,
    top_k=6,
    expert_hidden=32,
    gate_scale=1.5,
    # The release has 10, which projections of spread 1.5 never reach.
    swiglu_limit=3.0,
    compress_scaling=base_config.RopeScaling(
        "yarn", factor=16.0, original_positions=64, attention_factor=1.0
    ),
    max_positions=1024,
)

# (centre, multiplier) by the last parts of a parameter's path; a multiplier of
# 111 means a standard deviation of about one. Inputs of a projection are
# normalised, so a projection from 64 channels has 8 times its own spread.
_LAWS = {
    # Small against what the layers add, so that the whole context and not only
    # the last token decides the next one.
    "embedding": (0.0, 53),
    # Logits of spread four.
    "lm_head": (0.0, 56),
    "input_norm": (1.0, 11),
    "mlp_norm": (1.0, 11),
    "final_norm": (1.0, 11),
    "q_a_norm": (1.0, 11),
    # Queries are normalised per head, so this decides how sharp attention is.
    "kv_norm": (1.5, 11),
    "compressor.norm": (1.5, 11),
    "q_a_proj": (0.0, 14),
    "q_b_proj": (0.0, 20),
    "kv_proj": (0.0, 14),
    "gate_proj": (0.0, 14),
    "o_a_proj": (0.0, 14),
    "o_b_proj": (0.0, 20),
    "weights_proj": (0.0, 14),
    "sinks": (0.0, 56),
    "position_bias": (0.0, 56),
    # Mixes of spread one from 256 channels of four streams.
    "hc.fn": (0.0, 7),
    "hc.base": (0.0, 56),
    "hc.scale": (1.0, 22),
    # The router: logits of spread 1.2, so that all experts have their tokens.
    # A bias of spread 0.1 changes five to seven selections in ten.
    "router": (0.0, 17),
    "bias": (0.0, 11),
    # Projections of spread 1.5: two gates in a hundred and five other values
    # meet the limit of SwiGLU.
    "gate_up": (0.0, 21),
    "down": (0.0, 33),
    "shared.gate_proj": (0.0, 21),
    "shared.up_proj": (0.0, 21),
    "shared.down_proj": (0.0, 33),
}


def config(dtype: str = "bfloat16") -> dict[str, object]:
  """Builds what config.json says: `CONFIG` and the special tokens."""
  return {
      **hf_config.to_hf(dataclasses.replace(CONFIG, dtype=dtype)),
      "bos_token_id": tokenizer.END_OF_TEXT_ID,
      "eos_token_id": tokenizer.END_OF_TEXT_ID,
      "pad_token_id": tokenizer.PAD_ID,
  }


def tensors(seed: int) -> dict[str, np.ndarray]:
  """Draws every tensor of model.safetensors.

  Args:
    seed: The checkpoint's seed, not negative.

  Returns:
    {name: tensor}, bfloat16, and int64[vocab, slot] for hash tables, whose
    rows are distinct experts.
  """
  return dict(_draw(seed))


def make(
    out: pathlib.Path, seed: int = SEED, dtype: str = "bfloat16"
) -> dict[str, object]:
  """Makes the checkpoint folder, whole or not at all.

  Args:
    out: The folder to make. It may be absent, empty, or an earlier result.
    seed: The seed of the weights, not negative.
    dtype: In which the model computes; one of `DTYPES`. The weights are the
      same numbers in both.

  Returns:
    The summary of `checkpoint_folder.make`.

  Raises:
    ValueError: If the folder holds anything that this function did not write.
  """
  # One text for both checkpoints gives them one vocabulary.
  return checkpoint_folder.make(
      out,
      [SHIPPED / name for name in SOURCES],
      config(dtype),
      {
          name: t if t.dtype.kind in "iu" else t.astype(dtype)
          for name, t in tensors(seed).items()
      },
      tiny_qwen3_moe.CORPUS,
  )


def _draw(seed: int) -> Iterator[tuple[str, np.ndarray]]:
  for row in names.table(CONFIG, names.UPSTREAM):
    for name in row.names:
      if row.dtype == "int32":
        yield name, seeded_weights.draw_choices(
            name, *row.shape, CONFIG.num_experts, seed
        )
      else:
        yield name, seeded_weights.draw(
            name, row.source_shape, seed, _law(row.path)
        )


def _law(path: str) -> tuple[float, int]:
  """The law of a parameter; the longest ending that is listed."""
  return _LAWS[max((e for e in _LAWS if path.endswith(e)), key=len)]
