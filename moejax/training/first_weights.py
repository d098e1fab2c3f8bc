"""The weights a training run starts from, drawn by seed and name.

A matrix [output, input] has the spread 1 / sqrt(input); projections that write
into the residual stream are smaller by sqrt(2 * layers). Embedding and output
projection have the spread 0.02. Norms are one; sinks, biases and position
biases zero. Hyper-connections start near plain residual streams: the input of
a block is the streams' mean, each stream keeps nearly to itself, and small
differences in what a block adds to each let them part.

Layer: training.
"""

import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np

from moejax.training import models

_SMALL = ("o_proj", "o_b_proj", "moe.down", "shared.down_proj", "mlp.down_proj")
_ZERO = ("sinks", "position_bias", "moe.bias", "_bias")


def draw(model: models.Model, seed: int) -> dict[str, jax.Array]:
  """Returns {path: float32, or int32 for tables} of every leaf."""
  return {
      path: jnp.asarray(_leaf(model.config, path, shape, dtype, seed))
      for path, (shape, dtype) in model.leaves().items()
  }


def _leaf(config, path, shape, dtype, seed) -> np.ndarray:
  rng = np.random.default_rng(_words(path, seed))
  if dtype == "int32":
    order = rng.random((shape[0], config.num_experts)).argsort(axis=1)
    return np.ascontiguousarray(order[:, : shape[1]], np.int32)
  if path.endswith("_hc.base"):
    return _base(rng, config.streams, shape)
  if path.endswith("_hc.scale"):
    return np.full(shape, 0.1, np.float32)
  if "norm" in path.rsplit(".", 1)[-1]:
    return np.ones(shape, np.float32)
  if path.endswith(_ZERO):
    return np.zeros(shape, np.float32)
  spread = 1 / math.sqrt(shape[-1])
  if path in ("embedding", "lm_head"):
    spread = 0.02
  elif path.endswith(_SMALL):
    spread /= math.sqrt(2 * config.num_layers)
  return (spread * rng.standard_normal(shape)).astype(np.float32)


def _base(rng, streams, shape) -> np.ndarray:
  """sigmoid(pre) = 1 / streams; post about one; comb nearly the identity."""
  base = np.full(shape, math.log(1 / (streams - 1)), np.float32)
  if shape != (streams,):
    base[streams : 2 * streams] = 0.5 * rng.standard_normal(streams)
    base[2 * streams :] = 4 * np.eye(streams, dtype=np.float32).reshape(-1)
  return base


def _words(path: str, seed: int) -> list[int]:
  digest = hashlib.sha256(path.encode()).digest()
  return [seed, int.from_bytes(digest, "big")]
