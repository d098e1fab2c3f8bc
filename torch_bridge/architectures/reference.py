"""What `torch_reference` must know of each architecture, one table row each.

Layer: torch_bridge.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import pathlib
import re
from typing import Any

import numpy as np

from moejax.contracts import refusal
from moejax.protocols.state import layout as layout_lib
from moejax.protocols.state import working_state
from moejax.protocols import taps as taps_lib
from torch_bridge.architectures import deepseek_v4_cache
from torch_bridge.graphs import deepseek_v4_graph
from torch_bridge.graphs import qwen3_moe_graph
from torch_bridge.hf.deepseek_v4 import config as deepseek_v4_config
from torch_bridge import operation_trace
from torch_bridge import tensor_bits

Taps = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
  """One `model_type` of transformers.

  Attributes:
    taps_of: (events of a forward pass, experts implementation, config) to
      taps; raises UnsupportedError for another graph.
    frequencies: {tap: buffer of the rotary module} of inverse frequencies.
    selections: (taps of a step, config) to the indices of each `topk` of a
      forward pass in order of execution, each [token, at least k].
    state_reader: (model, folder) to what turns a cache of one sequence into
      {"layers.N.component": array}.
    first_version: The first release of transformers whose numbers are right.
    before: What is wrong with those before it.
  """

  taps_of: Callable[[Sequence[operation_trace.Event], str, Any], Taps]
  frequencies: Mapping[str, str]
  selections: Callable[[Mapping[str, np.ndarray], Any], list[np.ndarray]]
  state_reader: Callable[[Any, str | pathlib.Path], Callable[[Any], Taps]]
  first_version: tuple[int, ...] = ()
  before: str = ""


def of(model_type: str, version: str) -> Architecture:
  """Returns the row of an architecture.

  Args:
    model_type: As in config.json.
    version: Of transformers, such as "5.24.0".

  Raises:
    UnsupportedError: the architecture is not known here, or this version of
      transformers computes it wrongly.
  """
  found = _TABLE.get(model_type)
  if found is None:
    raise refusal.UnsupportedError(
        f"model_type={model_type!r} is not one of {', '.join(_TABLE)}."
    )
  if _numbers(version) < found.first_version:
    raise refusal.UnsupportedError(
        f"transformers {version} is no reference for {model_type}:"
        f" {found.before} Use"
        f" {'.'.join(map(str, found.first_version))} or later."
    )
  return found


def _numbers(version: str) -> tuple[int, ...]:
  """The leading numbers of a version: "5.8.0.dev1" is (5, 8, 0)."""
  found = re.match(r"\d+(\.\d+)*", version)
  return tuple(map(int, found[0].split("."))) if found else ()


def _layers(taps: Mapping[str, np.ndarray], tap: str) -> Taps:
  """{layer: value} of one tap."""
  return {
      taps_lib.split(name)[0]: value
      for name, value in taps.items()
      if taps_lib.split(name)[1] == tap
  }


def _qwen3_moe_taps(events, implementation, config) -> Taps:
  del config
  return qwen3_moe_graph.taps_of(events, implementation)


def _routers(taps, config) -> list[np.ndarray]:
  del config
  found = _layers(taps, taps_lib.ROUTE_IDS)
  return [found[layer] for layer in sorted(found)]


def _keys_and_values(model, folder) -> Callable[[Any], Taps]:
  """Reads {"layers.0.keys": [key, kv_head, head_dim], ...}."""
  del model, folder

  def read(cache) -> Taps:
    out = {}
    for index, layer in enumerate(cache.layers):
      for name, tensor in (("keys", layer.keys), ("values", layer.values)):
        array = np.swapaxes(tensor_bits.to_numpy(tensor)[0], 0, 1)
        out[f"layers.{index}.{name}"] = np.ascontiguousarray(array)
    return out

  return read


def _indexers_and_routers(taps, config) -> list[np.ndarray]:
  """An indexer selects in the attention of its layer, before the router."""
  visible = _layers(taps, taps_lib.VISIBLE)
  routes = _layers(taps, taps_lib.ROUTE_IDS)
  out = []
  for layer, kind in enumerate(config.mlp_layer_types):
    if layer in visible:
      # Visible entries first; where there are too few, ones that are too late
      # to be seen follow, as they do in the model.
      out.append(np.argsort(-visible[layer], axis=-1, kind="stable"))
    if kind != "hash_moe":
      out.append(routes[layer])
  return out


def _persistent_state(model, folder) -> Callable[[Any], Taps]:
  """Reads {"layers.N.component": float32 array}, the layout "carried"."""
  config = deepseek_v4_config.read(folder)
  biases = deepseek_v4_cache.position_biases(model)

  def read(cache) -> Taps:
    length = cache.layers[0].cumulative_length
    working = deepseek_v4_cache.from_cache(config, cache, length)
    state = working_state.capture(
        config, working, biases, (), layout_lib.CARRIED
    )
    return dict(state.arrays)

  return read


_TABLE = {
    "qwen3_moe": Architecture(
        taps_of=_qwen3_moe_taps,
        frequencies={"rotary.inverse_frequencies": "inv_freq"},
        selections=_routers,
        state_reader=_keys_and_values,
    ),
    "deepseek_v4": Architecture(
        taps_of=deepseek_v4_graph.taps_of,
        frequencies={
            "rotary.main.inverse_frequencies": "main_inv_freq",
            "rotary.compress.inverse_frequencies": "compress_inv_freq",
        },
        selections=_indexers_and_routers,
        state_reader=_persistent_state,
        first_version=(5, 8, 1),
        before=(
            "it lacks the factor 2 of the stream weights, mixes streams"
            " untransposed and lets queries see later compressed entries."
        ),
    ),
}
