"""The state of a DeepSeek-V4 decoder to and from transformers' cache.

A cache holds what the next token reads and nothing else. Against our working
state (`contracts/deepseek_v4_state.py`):

  keys         the last W - 1 positions in order, not W in a ring
  buffer_*     the open window alone; its gate has no position bias, as ours
  overlap_*    the first half of the last complete window; its gate has the
               bias, and is float32
  entry_count  entries, as a number beside them

So a state made from a cache equals the decoder's in the layout "carried"; the
row of position T - W, which the next token overwrites, is zero in it. Tested
with transformers 5.17.0 and 5.24.0.

Layer: torch_bridge.
"""

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from moejax.contracts import deepseek_v4_state as contract
from moejax.contracts import refusal
from moejax.modules.deepseek_v4 import config as config_lib
from torch_bridge import tensor_bits

_NAMES = ("compressor", "indexer")


def position_biases(model: torch.nn.Module) -> dict[str, np.ndarray]:
  """Returns {our parameter path: array} of a transformers model's biases."""
  end = "compressor.position_bias"
  inner = "compressor.indexer.position_bias"
  found = {}
  for name, value in model.named_parameters():
    if name.endswith("position_bias"):
      layer = name.split("layers.")[1].split(".")[0]
      ours = "indexer." + end if name.endswith(inner) else end
      found[f"layers.{layer}.attention.{ours}"] = tensor_bits.to_numpy(value)
  return found


def from_cache(
    config: config_lib.DeepseekV4Config, cache: Any, capacity: int
) -> contract.DeepseekV4State:
  """Returns the working state, as NumPy arrays, that a cache holds.

  Args:
    config: Our form of the model's configuration.
    cache: A `DynamicCache` that has seen at least one token, without padding.
    capacity: Rows of the buffers of entries.

  Returns:
    Every sequence of the batch; rows that the cache does not hold are 0 and,
    in previous scores, minus infinity.

  Raises:
    HarnessError: the cache is empty, of another configuration, or its layers
      contradict each other.
  """
  layers = cache.layers
  if len(layers) != config.num_layers or not layers[0].is_initialized:
    raise refusal.HarnessError(
        f"a cache of {len(layers)} layers, which may be empty, is none of"
        f" {config.num_layers}."
    )
  length = layers[0].cumulative_length
  found = []
  for i, layer in enumerate(layers):
    if layer.cumulative_length != length:
      raise refusal.HarnessError(
          f"layer {i} has seen {layer.cumulative_length} tokens, layer 0"
          f" {length}."
      )
    found.append(_layer_from(config, layer, i, length, capacity))
  batch = found[0].window.shape[0]
  lengths = np.full((batch,), length, np.int32)
  return contract.DeepseekV4State(tuple(found), lengths)


def _layer_from(c, layer, i, length, capacity) -> contract.LayerState:
  kind = c.attentions[i]
  names = {config_lib.SWA: 0, config_lib.HCA: 1, config_lib.CSA: 2}[kind]
  held = set(getattr(layer, "buffer_kv", ()))
  if held != {*_NAMES[:names]}:
    raise refusal.HarnessError(
        f"layer {i} of the cache keeps {sorted(held)}, which is no {kind}."
    )
  keys = tensor_bits.to_numpy(layer.keys)
  batch = keys.shape[0]
  rows = min(length, c.window - 1)
  _check(f"layer {i} keys", keys, (batch, 1, rows, c.head_dim))
  window = np.zeros((batch, c.window, c.head_dim), keys.dtype)
  window[:, np.arange(length - rows, length) % c.window] = keys[:, 0]
  compressors = [
      _compressor_from(
          layer, name, f"layer {i} {name}", length, c.rate(i), dim,
          2 if kind == config_lib.CSA else 1, capacity, window,
      )
      for name, dim in zip(_NAMES[:names], (c.head_dim, c.index_dim))
  ]
  return contract.LayerState(window, *compressors, *[None] * (2 - names))


def _compressor_from(
    layer, name, place, length, rate, dim, series, capacity, like
) -> contract.CompressorState:
  batch, dtype = like.shape[0], like.dtype
  count, open_rows = divmod(length, rate)
  wide = (batch, rate, series * dim)
  if layer.entry_count[name] != count or count > capacity:
    raise refusal.HarnessError(
        f"{place}: {layer.entry_count[name]} entries at T={length} and rate"
        f" {rate}, {capacity=}."
    )

  def put(value, shape, rows, what, fill=0.0, dtype=dtype):
    """`value` in the first rows and channels of a buffer."""
    out = np.full(shape, fill, dtype)
    if rows:
      value = tensor_bits.to_numpy(value)
      channels = dim if what.startswith("overlap") else shape[-1]
      _check(f"{place} {what}", value, (batch, rows, channels))
      if value.dtype != out.dtype:
        raise refusal.HarnessError(
            f"{place} {what}: {value.dtype}, not {out.dtype}."
        )
      out[:, :rows, :channels] = value
    return out

  previous_kv = previous_score = None
  if series == 2:
    complete = rate if count else 0
    previous_kv = put(layer.overlap_kv[name], wide, complete, "overlap_kv")
    previous_score = put(
        layer.overlap_gate[name], wide, complete, "overlap_gate", -np.inf,
        np.dtype(np.float32),
    )
  return contract.CompressorState(
      kv=put(layer.buffer_kv[name], wide, open_rows, "buffer_kv"),
      gate=put(layer.buffer_gate[name], wide, open_rows, "buffer_gate"),
      previous_kv=previous_kv,
      previous_score=previous_score,
      entries=put(
          layer.compressed_kv[name], (batch, capacity, dim), count,
          "compressed_kv",
      ),
  )


def _check(place: str, value: np.ndarray, shape: tuple[int, ...]) -> None:
  if value.shape != shape:
    raise refusal.HarnessError(f"{place}: shape {value.shape}, not {shape}.")


def to_cache(
    config: config_lib.DeepseekV4Config,
    state: contract.DeepseekV4State,
    hf_config: Any,
) -> DynamicCache:
  """Returns a fresh transformers cache from which the model decodes on.

  Args:
    config: Our form of the configuration.
    state: The working state; all sequences as long.
    hf_config: The model's own configuration.

  Raises:
    HarnessError: the sequences have different lengths or have seen nothing, or
      the model has another number of layers.
  """
  lengths = np.asarray(state.lengths)
  length = int(lengths[0])
  if length < 1 or (lengths != length).any():
    raise refusal.HarnessError(
        f"lengths {lengths.tolist()}: a cache holds sequences of one length."
    )
  cache = DynamicCache(config=hf_config)
  if len(cache.layers) != config.num_layers:
    raise refusal.HarnessError(
        f"a model of {len(cache.layers)} layers, a state of"
        f" {config.num_layers}."
    )
  for i, (layer, ours) in enumerate(zip(cache.layers, state.layers)):
    rows = min(length, config.window - 1)
    order = np.arange(length - rows, length) % config.window
    keys = tensor_bits.to_torch(np.asarray(ours.window)[:, None, order])
    layer.lazy_initialization(keys, keys)
    layer.keys = layer.values = keys
    layer.cumulative_length = length
    for name, compressor in zip(_NAMES, (ours.compressor, ours.indexer)):
      if compressor is not None:
        _fill(layer, name, compressor, length, config.rate(i))
  return cache


def _fill(layer, name, ours: contract.CompressorState, length, rate) -> None:
  count, open_rows = divmod(length, rate)

  def cut(value, rows, channels=None):
    return tensor_bits.to_torch(np.asarray(value)[:, :rows, :channels])

  layer.buffer_kv[name] = cut(ours.kv, open_rows)
  layer.buffer_gate[name] = cut(ours.gate, open_rows)
  layer.compressed_kv[name] = cut(ours.entries, count)
  layer.entry_count[name] = count
  if ours.previous_kv is not None and count:
    dim = ours.entries.shape[-1]
    layer.overlap_kv[name] = cut(ours.previous_kv, rate, dim)
    layer.overlap_gate[name] = cut(ours.previous_score, rate, dim)
