"""Where a DeepSeek-V4 decoder simulates its quantisation.

Layer: modules. Contract: contracts/deepseek_v4.py.
"""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import deepseek_v4 as contract_lib
from moejax.contracts import ops as ops_lib
from moejax.modules import tap as tap_lib
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.numerics import moves


def check(
    config: config_lib.DeepseekV4Config,
    contract: contract_lib.QuantizationContract,
) -> None:
  """Refuses a decoder whose widths are no whole blocks.

  Raises:
    ValueError: a width is no multiple of its block, or the indexer's is no
      power of two; the message has both.
    NotImplementedError: a float16 decoder.
  """
  widths = []
  if contract.activations:
    widths += [
        (name, getattr(config, name), "activation_block")
        for name in ("embed", "query_rank", "expert_hidden")
    ]
    projected = config.output_groups * config.output_rank
    widths.append(
        ("output_groups * output_rank", projected, "activation_block")
    )
  if contract.entries:
    still = config.head_dim - config.rotary_dim
    widths.append(("head_dim - rotary_dim", still, "entry_block"))
  if contract.indexer:
    widths.append(("index_dim", config.index_dim, "indexer_block"))
    if config.index_dim & (config.index_dim - 1):
      raise ValueError(
          f"index_dim={config.index_dim} is no power of two: it has no Hadamard"
          " transform."
      )
  for name, width, block in widths:
    if width % getattr(contract, block):
      raise ValueError(
          f"{name}={width} is no multiple of {block}="
          f"{getattr(contract, block)}."
      )
  if widths and config.dtype == "float16":
    raise NotImplementedError(
        "quantisation is simulated in bfloat16 and float32, not in float16."
    )


def activation(
    x: jax.Array,
    contract: contract_lib.QuantizationContract,
    name: str,
    ops: ops_lib.Operations,
    tap: tap_lib.Tap,
) -> jax.Array:
  """The input [..., k] of a GEMM through E4M3, or as it is."""
  if not contract.activations:
    return x
  block = contract.activation_block
  return tap(name, ops.simulate_quantization(x, "e4m3", block))


def entry(
    x: jax.Array,
    rotary_dim: int,
    contract: contract_lib.QuantizationContract,
    name: str,
    ops: ops_lib.Operations,
    tap: tap_lib.Tap,
) -> jax.Array:
  """Window rows or entries [..., head_dim]: what does not turn, by E4M3."""
  if not contract.entries:
    return x
  still = ops.simulate_quantization(
      x[..., :-rotary_dim], "e4m3", contract.entry_block
  )
  return tap(name, moves.concatenate([still, x[..., -rotary_dim:]], -1))


def index(
    x: jax.Array,
    contract: contract_lib.QuantizationContract,
    ops: ops_lib.Operations,
    tap: tap_lib.Tap,
) -> jax.Array:
  """Queries or keys of an indexer [..., index_dim]: Hadamard, then E2M1.

  h = R(R_FP32(R_FP32(sum_j (-1)**popcount(i & j) * x_j) * dim**-0.5)).
  """
  if not contract.indexer:
    return x
  dim = x.shape[-1]
  mixed = ops.linear(
      ops.cast(x, "float32"), jnp.asarray(hadamard(dim)), "indexer_hadamard"
  )
  mixed = tap("hadamard_sum", mixed)
  mixed = tap("hadamard_scaled", ops.scale(mixed, dim**-0.5))
  if x.dtype != mixed.dtype:
    mixed = tap("hadamard", ops.cast(mixed, x.dtype.name))
  block = contract.indexer_block
  return tap("quantized", ops.simulate_quantization(mixed, "e2m1", block))


def hadamard(dim: int) -> np.ndarray:
  """[dim, dim] float32 of (-1)**popcount(i & j); dim is a power of two."""
  matrix = np.ones((1, 1), np.float32)
  while len(matrix) < dim:
    matrix = np.block([[matrix, matrix], [matrix, -matrix]])
  return matrix
