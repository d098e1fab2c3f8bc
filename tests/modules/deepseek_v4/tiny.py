"""A decoder with every kind of layer, small enough to run op by op."""

import jax.numpy as jnp
import numpy as np

from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import parameters
from moejax.modules import config as shapes

CONFIG = config_lib.DeepseekV4Config(
    vocab_size=32,
    embed=32,
    attentions=("swa", "csa", "hca"),
    hash_layers=(0,),
    num_heads=2,
    head_dim=24,
    rotary_dim=8,
    query_rank=16,
    window=4,
    csa_rate=2,
    hca_rate=4,
    output_groups=2,
    output_rank=8,
    index_heads=2,
    index_dim=16,
    index_top_k=2,
    num_experts=8,
    top_k=3,
    expert_hidden=16,
    gate_scale=1.5,
    swiglu_limit=1.0,  # Low enough to be met.
    compress_scaling=shapes.RopeScaling(
        "yarn", factor=4.0, original_positions=32, attention_factor=1.0
    ),
)
# Past two windows; entries of all kinds, more than an indexer selects.
TOKENS = (5, 1, 2, 3, 4, 9, 8, 7, 6, 11)


def params(seed: int = 0, spread: float = 0.0) -> dict:
  """{path: array} of random parameters, none of them zero or one.

  Args:
    seed: Of the values.
    spread: Binades between the outputs of an expert and of the next: terms
      that lie far apart let the order of a float32 sum show.
  """
  rng = np.random.default_rng(seed)
  out = {}
  for path, (shape, dtype) in parameters.leaves(CONFIG).items():
    if dtype == "int32":
      rows = [rng.permutation(CONFIG.num_experts) for _ in range(shape[0])]
      out[path] = jnp.asarray(np.array(rows, np.int32)[:, : shape[1]])
      continue
    values = 0.3 * rng.standard_normal(shape) + ("norm" in path)
    if path.endswith("moe.down"):
      values *= 2.0 ** (-spread * np.arange(shape[0])[:, None, None])
    out[path] = jnp.asarray(values.astype(np.float32)).astype(dtype)
  return out
