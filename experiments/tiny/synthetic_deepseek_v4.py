"""A DeepSeek-V4 checkpoint in the release's format, of random bits.

Every tensor of `inventory.decoder` and of one block that predicts further, with
the release's names, dtypes and shapes. All bits are random but for those that
would make a weight infinite or NaN, and hash tables, whose rows hold distinct
experts. The weights mean nothing; a loader cannot tell.

Layer: experiments.
"""

from collections.abc import Mapping
import json
import math
import pathlib

import ml_dtypes
import numpy as np
import safetensors.numpy

from moejax.modules.deepseek_v4 import config as config_lib
from torch_bridge.hf import checkpoint
from torch_bridge.hf.deepseek_v4 import config as hf_config
from torch_bridge.hf.deepseek_v4 import inventory
from torch_bridge.hf.deepseek_v4 import names

_QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
# A shard is held in memory until it is written.
_SHARD_BYTES = 1 << 29
_WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}


def write(
    folder: pathlib.Path,
    config: config_lib.DeepseekV4Config,
    seed: int = 0,
    experts: str = names.FP4,
    shard_bytes: int = _SHARD_BYTES,
) -> int:
  """Writes config.json, shards and their index; returns the shards' bytes.

  Args:
    folder: Where; it exists.
    config: The decoder.
    seed: Of the bits.
    experts: "fp4" or "fp8".
    shard_bytes: A shard ends with the tensor that reaches this.
  """
  rng = np.random.default_rng(seed)
  tensors = inventory.decoder(config, experts)
  tensors |= inventory.further_block(config)
  shards = _split(tensors, shard_bytes)
  weight_map = {}
  for number, shard in enumerate(shards, start=1):
    name = f"model-{number:05}-of-{len(shards):05}.safetensors"
    arrays = {
        tensor: _random(rng, *tensors[tensor], config.num_experts)
        for tensor in shard
    }
    safetensors.numpy.save_file(
        arrays, folder / name, metadata={"format": "pt"}
    )
    weight_map |= dict.fromkeys(shard, name)
  index = {"metadata": {}, "weight_map": weight_map}
  (folder / checkpoint.INDEX).write_text(json.dumps(index), "utf-8")
  fields = {
      **hf_config.to_hf(config),
      "expert_dtype": experts,
      "num_nextn_predict_layers": 1,
      "quantization_config": _QUANTIZATION,
  }
  (folder / hf_config.FILE).write_text(json.dumps(fields, indent=1), "utf-8")
  return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def _split(
    tensors: Mapping[str, inventory.Tensor], shard_bytes: int
) -> list[list[str]]:
  shards, held = [[]], 0
  for name, (dtype, shape) in tensors.items():
    if held >= shard_bytes:
      shards.append([])
      held = 0
    shards[-1].append(name)
    held += math.prod(shape) * _WIDTHS.get(dtype, 1)
  return shards


def _random(
    rng: np.random.Generator, dtype: str, shape: tuple, num_experts: int
) -> np.ndarray:
  """Returns a tensor of random bits that are finite numbers."""
  if dtype == "int64":
    orders = rng.random((shape[0], num_experts), np.float32).argsort(axis=1)
    return np.ascontiguousarray(orders[:, : shape[1]])
  if dtype == inventory.E8M0:
    # With the largest code, 448, still finite in every dtype that we load.
    scales = rng.integers(100, 135, shape, np.uint8)
    return scales.view(ml_dtypes.float8_e8m0fnu)
  if dtype == "int8":
    return rng.integers(-128, 128, shape, np.int8)
  if dtype == inventory.E4M3:
    codes = rng.integers(0, 256, shape, np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    return codes.view(ml_dtypes.float8_e4m3fn)
  # Without the exponent's first bit a number is below 2.
  word = np.dtype(f"u{_WIDTHS[dtype]}")
  mask = ~(1 << (8 * word.itemsize - 2)) & np.iinfo(word).max
  bits = rng.integers(0, np.iinfo(word).max, shape, word, endpoint=True)
  return (bits & word.type(mask)).view(dtype)
