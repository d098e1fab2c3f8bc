"""A small decoder whose experts are packed, without a folder and without torch.

Its sizes fall into Marlin's tiles of 64 by 64, and its groups of 64 leave
K-tiles that a grid can cut.
"""

import jax.numpy as jnp
import numpy as np

from moejax.contracts import decoder as decoder_contract
from moejax.contracts import named_combines
from moejax.contracts import packed_moe
from moejax.modules import config as config_lib
from moejax.modules import decoder as decoder_lib
from moejax.numerics.packed import awq_format
from moejax.numerics.packed import packed_ops
from moejax.protocols import packed_fixture
from moejax.protocols import trajectory

CONFIG = config_lib.DecoderConfig(
    vocab_size=32,
    embed=128,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    hidden=64,
    expert_hidden=64,
    num_experts=5,
    top_k=2,
    normalize_gates=True,
    sparse_layers=(0, 1),
)
PROMPTS = (
    trajectory.Prompt("long", (3, 1, 4, 1, 5)),
    trajectory.Prompt("short", (9, 2)),
)
STEPS = 2
LEAVES = ("qweight", "qzeros", "scales")
_GROUP = 64


def params() -> dict:
  """Returns {dotted path: array}, the same for every caller."""
  rng = np.random.default_rng(20261130)
  out = {}
  for path, shape in decoder_lib.parameter_shapes(CONFIG).items():
    if path.endswith((".gate_up", ".down")):
      continue
    values = rng.standard_normal(shape) * 0.3 + (len(shape) == 1)
    out[path] = jnp.asarray(values, CONFIG.dtype)
  shape = packed_fixture.LayerShape(
      CONFIG.num_experts, CONFIG.embed, CONFIG.expert_hidden, _GROUP
  )
  for layer in CONFIG.sparse_layers:
    gemms = packed_fixture.layer(layer, shape, CONFIG.dtype)
    for name, operands in zip(("gate_up", "down"), gemms, strict=True):
      tensors = zip(*map(awq_format.to_checkpoint, operands), strict=True)
      for leaf, arrays in zip(LEAVES, tensors, strict=True):
        path = f"layers.{layer}.moe.{name}.{leaf}"
        out[path] = jnp.asarray(np.stack(arrays))
  return out


def plain(arithmetic: str) -> decoder_contract.DecoderContract:
  """Returns the contract of all but the packed experts."""
  return getattr(decoder_contract, arithmetic)(
      config_lib.router_contract(CONFIG),
      named_combines.named("transformers_grouped_mm"),
  )


def dequantized(arithmetic: str) -> packed_moe.PackedDecoderContract:
  """Returns the contract of dequantised experts."""
  return packed_moe.dequantized_decoder(
      plain(arithmetic), dtype=CONFIG.dtype, group_size=_GROUP
  )


def marlin(
    arithmetic: str, thread_n: int = 64, grid: int = 7
) -> packed_moe.PackedDecoderContract:
  """Returns the contract of Marlin's experts."""
  experts = packed_moe.marlin(
      dtype=CONFIG.dtype, thread_k=64, thread_n=thread_n, grid=grid,
      group_size=_GROUP,
  )
  return packed_moe.marlin_decoder(plain(arithmetic), experts)


def decoder(contract, held, layer=packed_ops.OracleLayer()):
  """Returns a decoder over `params` that are held already."""
  return decoder_lib.Decoder(
      CONFIG,
      decoder_lib.nest(held),
      contract,
      packed_ops.operations(contract, layer=layer),
  )
