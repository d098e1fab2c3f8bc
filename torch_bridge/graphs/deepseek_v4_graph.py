"""The operations of transformers' DeepSeek-V4, by module, and their tap names.

As in `qwen3_moe_graph.py`, the traced events of each module must be exactly
the listed ones. The lists are made from the model's config and from the
positions of the step: which layers compress, which windows complete, how often
a mixing matrix is normalised. A tap that several events show (rotary tables,
the keys that are values) must have the same bits in all of them.

The lists lie in `deepseek_v4`, a file for each part of the model; here they are
put together.

Layer: torch_bridge. Names: moejax/protocols/deepseek_v4_taps.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from moejax.contracts import refusal
from moejax.protocols import deepseek_v4_taps
from moejax.protocols import taps as taps_lib
from torch_bridge.graphs.deepseek_v4 import attention
from torch_bridge.graphs.deepseek_v4 import compressor
from torch_bridge.graphs.deepseek_v4 import hyper
from torch_bridge.graphs.deepseek_v4 import moe
from torch_bridge.graphs.deepseek_v4 import steps as steps_lib
from torch_bridge.graphs.deepseek_v4 import values as values_lib
from torch_bridge.graphs import expert_events
from torch_bridge.graphs import graph_match
from torch_bridge import operation_trace

_ORDER = {tap: index for index, tap in enumerate(deepseek_v4_taps.TAPS)}
_FIRST_IN_LAYER = _ORDER["attention_hc.norm.square"]


def taps_of(
    events: Sequence[operation_trace.Event], implementation: str, config: Any
) -> dict[str, np.ndarray]:
  """Turns the events of one forward pass of one sequence into named taps.

  Args:
    events: From `OperationTrace.take`.
    implementation: The experts implementation that ran.
    config: The model's config.

  Returns:
    {tap name: value} in the table's order, axes as in `deepseek_v4_taps.TAPS`,
    without a batch axis. A compressor's taps are absent in a layer where the
    step completes no window; casts are absent where nothing is narrowed. Where
    no compressed entry exists yet, the axis "entry" has length zero.

  Raises:
    UnsupportedError: a module ran other operations than this file lists, or
      none.
  """
  scopes = graph_match.by_scope(events)
  positions = _positions(scopes)
  places = _places(config, positions)
  found: dict[str, list[np.ndarray]] = {}
  for scope, steps in places.items():
    if scope not in scopes and any(not step[2] for step in steps):
      raise refusal.UnsupportedError(f"module {scope!r} runs nothing.")
    pairs = graph_match.match(scope, scopes.pop(scope, []), steps)
    for name, value in pairs:
      found.setdefault(name, []).append(value)
  out = {}
  for name, values in found.items():
    values = [values_lib.canonical(name, v, len(positions)) for v in values]
    out[name] = values_lib.one(name, values)
  for layer in range(config.num_hidden_layers):
    scope, prefix = f"model.layers.{layer}.mlp.experts", f"layers.{layer}.moe"
    taps = expert_events.taps_of(
        scope,
        scopes.pop(scope, []),
        out[f"{prefix}.router.ids"],
        implementation,
    )
    out |= {f"{prefix}.experts.{tap}": value for tap, value in taps.items()}
    name = f"layers.{layer}.{taps_lib.VISIBLE}"
    if name in out:
      scores = out[name.replace("visible", "index_scores")]
      rate = compressor.rate(config, layer)
      out[name] = values_lib.visible(out[name], scores, positions, rate)
  for scope, rest in scopes.items():
    graph_match.refuse_arithmetic(scope, rest)
  return dict(sorted(out.items(), key=_place_in_table))


def _positions(scopes) -> np.ndarray:
  for event in scopes.get("model.rotary_emb", ()):
    if event.operation == "from_int":
      return event.value.reshape(-1).astype(np.int32)
  raise refusal.UnsupportedError(
      "module 'model.rotary_emb' turns no positions into floats."
  )


def _place_in_table(item):
  layer, tap = taps_lib.split(item[0])
  place = _ORDER[tap]
  if layer is None:
    return (0 if place < _FIRST_IN_LAYER else 2), 0, place
  return 1, layer, place


def _places(config, positions: np.ndarray) -> dict[str, steps_lib.Steps]:
  """{module: its steps, with full tap names} for one step of a model."""
  places = {
      "model.embed_tokens": (("embedding", "embed", False),),
      "model.rotary_emb": (
          ("from_int", "positions", False),
          *steps_lib.tables("rotary.main"),
          ("from_int", "positions", False),
          *steps_lib.tables("rotary.compress"),
      ),
      "model.hc_head.input_norm": steps_lib.bare_norm("head_hc.norm"),
      "model.hc_head": hyper.head("head_hc"),
      "model.norm": steps_lib.norm("final_norm"),
      "lm_head": steps_lib.projection("logits"),
  }
  for layer in range(config.num_hidden_layers):
    places |= _layer(config, layer, positions)
  return places


def _layer(
    config, layer: int, positions: np.ndarray
) -> dict[str, steps_lib.Steps]:
  """The same for one layer."""
  at, prefix = f"model.layers.{layer}", f"layers.{layer}"
  return {
      **_before_block(f"{at}.attn_hc", f"{prefix}.attention_hc", config),
      f"{at}.input_layernorm": steps_lib.norm(f"{prefix}.input_norm"),
      **attention.places(
          f"{at}.self_attn", f"{prefix}.attention", config, layer, positions
      ),
      **_before_block(f"{at}.ffn_hc", f"{prefix}.moe_hc", config),
      f"{at}.post_attention_layernorm": steps_lib.norm(f"{prefix}.mlp_norm"),
      **moe.places(f"{at}.mlp", f"{prefix}.moe", config, layer),
      at: (
          *hyper.after_block(f"{prefix}.attention_mix"),
          ("add", f"{prefix}.streams_after_attention", False),
          *hyper.after_block(f"{prefix}.moe_mix"),
          ("add", f"{prefix}.streams", False),
      ),
  }


def _before_block(at: str, prefix: str, config) -> dict[str, steps_lib.Steps]:
  return {
      f"{at}.input_norm": steps_lib.bare_norm(f"{prefix}.norm"),
      at: hyper.before_block(prefix, config),
  }
