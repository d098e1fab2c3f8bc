"""A small random decoder and its captures, for tests of the protocols."""

import jax.numpy as jnp
import numpy as np

from moejax.contracts import decoder as decoder_contract
from moejax.contracts import named_combines
from moejax.modules import config as config_lib
from moejax.modules import decoder as decoder_lib
from moejax.numerics import reference_ops
from moejax.protocols import trajectory

CONFIG = config_lib.DecoderConfig(
    vocab_size=48,
    embed=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden=20,
    expert_hidden=12,
    num_experts=6,
    top_k=3,
    normalize_gates=True,
    sparse_layers=(1,),
    max_positions=64,
)
PROMPTS = (
    trajectory.Prompt("long", (3, 1, 4, 1, 5, 9, 2)),
    trajectory.Prompt("short", (6, 5, 3)),
)


def decoder(
    arithmetic: str = "portable",
    combine: str = "transformers_grouped_mm",
    config: config_lib.DecoderConfig = CONFIG,
    operations=None,
) -> decoder_lib.Decoder:
  """Returns a decoder with random weights, the same every time."""
  rng = np.random.default_rng(7)
  params = {
      path: jnp.asarray(
          (rng.standard_normal(shape) * 0.5 + path.endswith("norm")).astype(
              config.dtype
          )
      )
      for path, shape in decoder_lib.parameter_shapes(config).items()
  }
  make = getattr(decoder_contract, arithmetic)
  contract = make(
      config_lib.router_contract(config), named_combines.named(combine)
  )
  operations = operations or reference_ops.operations(contract)
  return decoder_lib.Decoder(
      config, decoder_lib.nest(params), contract, operations
  )
