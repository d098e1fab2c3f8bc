"""Decoders of two layers or three that train on a CPU in seconds."""

import dataclasses

import numpy as np

from moejax.modules import config as qwen3_moe
from moejax.training import models
from moejax.training import recipe as recipe_lib
from tests.modules.deepseek_v4 import tiny as tiny_deepseek_v4

QWEN3_MOE = qwen3_moe.DecoderConfig(
    vocab_size=32,
    embed=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    hidden=16,
    expert_hidden=8,
    num_experts=4,
    top_k=2,
    normalize_gates=True,
    sparse_layers=(0,),
    max_positions=64,
)
DEEPSEEK_V4 = dataclasses.replace(
    tiny_deepseek_v4.CONFIG, sinkhorn_iterations=3
)
RECIPE = recipe_lib.Recipe(
    "tiny",
    seed=7,
    steps=8,
    batch=4,
    length=12,
    chunk=4,
    peak=1e-2,
    warm_up=2,
)


def model(name: str, dtype: str = "bfloat16") -> models.Model:
  """A tiny model of "qwen3_moe" or "deepseek_v4"."""
  config = {"qwen3_moe": QWEN3_MOE, "deepseek_v4": DEEPSEEK_V4}[name]
  return models.of(dataclasses.replace(config, dtype=dtype))


def tokens(count: int = 400) -> np.ndarray:
  """A text of 32 words in which the next word is mostly known: uint16."""
  rng = np.random.default_rng(0)
  out = [0]
  for noise in rng.random(count - 1):
    out.append((5 * out[-1] + 1) % 32 if noise < 0.9 else int(noise * 320) % 32)
  return np.array(out, np.uint16)
