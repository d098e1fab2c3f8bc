"""The operations of transformers' DeepSeek-V4, by module, and their tap names.

As in `qwen3_moe_graph.py`, the traced events of each module must be exactly
the listed ones. The lists are made from the model's config and from the
positions of the step: which layers compress, which windows complete, how often
a mixing matrix is normalised. A tap that several events show (rotary tables,
the keys that are values) must have the same bits in all of them.

Layer: torch_bridge. Names: moejax/protocols/deepseek_v4_taps.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from moejax.contracts import refusal
from moejax.protocols import deepseek_v4_taps
from moejax.protocols import taps as taps_lib
from torch_bridge.graphs import expert_events
from torch_bridge.graphs import graph_match
from torch_bridge import operation_trace

_PRODUCT = ("mm", "addmm")
_CSA = "compressed_sparse_attention"
_SLIDING = "sliding_attention"
# transformers computes these with heads ahead of tokens.
_HEADS_FIRST = ("q_b_norm", "q_turn", "output_turn")
_ORDER = {tap: index for index, tap in enumerate(deepseek_v4_taps.TAPS)}
_FIRST_IN_LAYER = _ORDER["attention_hc.norm.square"]

_Steps = tuple[graph_match.Step, ...]


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
  out = {
      name: _one(name, [_canonical(name, value, len(positions)) for value in
                        values])
      for name, values in found.items()
  }
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
      out[name] = _visible(out[name], scores, positions, _rate(config, layer))
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


def _rate(config, layer: int) -> int:
  return config.compress_rates[config.layer_types[layer]]


def _place_in_table(item):
  layer, tap = taps_lib.split(item[0])
  place = _ORDER[tap]
  if layer is None:
    return (0 if place < _FIRST_IN_LAYER else 2), 0, place
  return 1, layer, place


# What every module runs.


def _places(config, positions: np.ndarray) -> dict[str, _Steps]:
  """{module: its steps, with full tap names} for one step of a model."""
  places = {
      "model.embed_tokens": (("embedding", "embed", False),),
      "model.rotary_emb": (
          ("from_int", "positions", False),
          *_tables("rotary.main"),
          ("from_int", "positions", False),
          *_tables("rotary.compress"),
      ),
      "model.hc_head.input_norm": _bare_norm("head_hc.norm"),
      "model.hc_head": (
          ("mm", "head_hc.mixes", False),
          *_weights("head_hc.pre", "add", "head_hc.pre"),
          *_collapse("head_hc"),
      ),
      "model.norm": _norm("final_norm"),
      "lm_head": _projection("logits"),
  }
  for layer in range(config.num_hidden_layers):
    at, prefix = f"model.layers.{layer}", f"layers.{layer}"
    places[f"{at}.attn_hc.input_norm"] = _bare_norm(
        f"{prefix}.attention_hc.norm"
    )
    places[f"{at}.attn_hc"] = _hyper(f"{prefix}.attention_hc", config)
    places[f"{at}.input_layernorm"] = _norm(f"{prefix}.input_norm")
    places |= _attention(
        f"{at}.self_attn", f"{prefix}.attention", config, layer, positions
    )
    places[f"{at}.ffn_hc.input_norm"] = _bare_norm(f"{prefix}.moe_hc.norm")
    places[f"{at}.ffn_hc"] = _hyper(f"{prefix}.moe_hc", config)
    places[f"{at}.post_attention_layernorm"] = _norm(f"{prefix}.mlp_norm")
    places |= _mlp(f"{at}.mlp", f"{prefix}.moe", config, layer)
    places[at] = (
        *_mix(f"{prefix}.attention_mix"),
        ("add", f"{prefix}.streams_after_attention", False),
        *_mix(f"{prefix}.moe_mix"),
        ("add", f"{prefix}.streams", False),
    )
  return places


def _named(prefix: str, *steps: tuple[str, str]) -> _Steps:
  """Steps from (operation, tap); a cast may be absent."""
  return tuple(
      (operation, f"{prefix}.{tap}", operation == "cast")
      for operation, tap in steps
  )


def _projection(name: str) -> _Steps:
  return ((_PRODUCT, name, False),)


def _variance(prefix: str) -> _Steps:
  return _named(
      prefix,
      ("pow", "square"),
      ("mean", "mean"),
      ("add", "plus_epsilon"),
      ("rsqrt", "rsqrt"),
  )


def _norm(prefix: str) -> _Steps:
  return (
      *_variance(prefix),
      *_named(
          prefix, ("mul", "normalized"), ("mul", "weighted"), ("cast", "output")
      ),
  )


def _bare_norm(prefix: str) -> _Steps:
  return (
      *_variance(prefix),
      *_named(prefix, ("cast", "rounded"), ("mul", "output")),
  )


def _turn(prefix: str) -> _Steps:
  return _named(
      prefix,
      ("mul", "times_cos"),
      ("mul", "times_sin"),
      ("add", "sum"),
      ("cast", "rounded"),
  )


def _tables(prefix: str) -> _Steps:
  return (
      # Up to 5.17 a product over a contracting axis of length one.
      (("mul", "bmm"), f"{prefix}.angle", False),
      *_named(
          prefix,
          ("cos", "cosine"),
          ("mul", "cosine_scaled"),
          ("sin", "sine"),
          ("mul", "sine_scaled"),
          ("cast", "cos"),
          ("cast", "sin"),
      ),
  )


def _weights(prefix: str, last: str, result: str) -> _Steps:
  """One layer of a perceptron: scale, shift, sigmoid, and one more."""
  return (
      ("mul", f"{prefix}_scaled", False),
      ("add", f"{prefix}_shifted", False),
      ("sigmoid", f"{prefix}_sigmoid", False),
      (last, result, False),
  )


def _collapse(prefix: str) -> _Steps:
  return _named(
      prefix, ("mul", "weighted"), ("sum", "summed"), ("cast", "collapsed")
  )


def _hyper(prefix: str, config) -> _Steps:
  rounds = 2 * config.hc_sinkhorn_iters - 1
  normalisation = (
      ("sum", None, False),
      ("add", None, False),
      ("div", f"{prefix}.sinkhorn", False),
  )
  return (
      ("mm", f"{prefix}.mixes", False),
      *_weights(f"{prefix}.pre", "add", f"{prefix}.pre"),
      *_weights(f"{prefix}.post", "mul", f"{prefix}.post"),
      *_named(
          prefix,
          ("mul", "comb_scaled"),
          ("add", "comb_shifted"),
          ("_softmax", "comb_softmax"),
          ("add", "comb_plus_epsilon"),
      ),
      *normalisation * rounds,
      *_collapse(prefix),
  )


def _mix(prefix: str) -> _Steps:
  return _named(
      prefix,
      ("cast", "post"),
      ("mul", "expanded"),
      ("cast", "comb"),
      ("bmm", "mixed"),
  )


def _attention(at, prefix, config, layer, positions) -> dict[str, _Steps]:
  kind = config.layer_types[layer]
  append = ("append", f"{prefix}.state_kv", False)
  places = {
      f"{at}.q_a_proj": _projection(f"{prefix}.q_a_proj"),
      f"{at}.q_a_norm": _norm(f"{prefix}.q_a_norm"),
      f"{at}.q_b_proj": _projection(f"{prefix}.q_b_proj"),
      f"{at}.q_b_norm": _bare_norm(f"{prefix}.q_b_norm"),
      f"{at}.kv_proj": _projection(f"{prefix}.kv_proj"),
      f"{at}.kv_norm": _norm(f"{prefix}.kv_norm"),
      at: (
          *_turn(f"{prefix}.q_turn"),
          *_turn(f"{prefix}.kv_turn"),
          # Keys and values are one; a sliding layer appends them apart.
          *(append,) * (2 if kind == _SLIDING else 1),
          *_named(
              prefix,
              ("bmm", "scores"),
              ("mul", "scaled"),
              ("add", "masked"),
              ("sub", "shifted"),
              ("_softmax", "softmax_with_sink"),
              ("cast", "probabilities"),
              ("bmm", "values"),
          ),
          *_turn(f"{prefix}.output_turn"),
      ),
      f"{at}.o_a_proj": (("bmm", f"{prefix}.o_a_proj", False),),
      f"{at}.o_b_proj": _projection(f"{prefix}.o_b_proj"),
  }
  if kind == _SLIDING:
    return places
  rate = _rate(config, layer)
  start, end = int(positions[0]), int(positions[-1]) + 1
  completes = end // rate > start // rate
  compressor = f"{at}.compressor"
  places |= _compressor(compressor, f"{prefix}.compressor", completes)
  if kind == _CSA:
    places |= _indexer(f"{compressor}.indexer", f"{prefix}.indexer", completes)
  return places


def _compressor(at, prefix, completes: bool) -> dict[str, _Steps]:
  places: dict[str, _Steps] = {
      f"{at}.kv_proj": _projection(f"{prefix}.kv_proj"),
      f"{at}.gate_proj": _projection(f"{prefix}.gate_proj"),
      f"{at}.kv_norm": (),
      f"{at}.rotary_emb": (),
      at: (),
  }
  if completes:
    places[f"{at}.kv_norm"] = _norm(f"{prefix}.norm")
    places[f"{at}.rotary_emb"] = (
        ("from_int", None, False),
        *_tables(f"{prefix}.rotary"),
    )
    places[at] = (
        *_named(
            prefix,
            ("add", "scores"),
            ("_softmax", "softmax"),
            ("cast", "weights"),
            ("mul", "products"),
            ("sum", "pooled"),
        ),
        *_turn(f"{prefix}.turn"),
    )
  return places


def _indexer(at, prefix, completes: bool) -> dict[str, _Steps]:
  places = _compressor(at, f"{prefix}.compressor", completes)
  # The queries turn by tables of their own, which are the model's.
  places[f"{at}.rotary_emb"] += (
      ("from_int", "positions", False),
      *_tables("rotary.compress"),
  )
  places[at] += (
      *_turn(f"{prefix}.q_turn"),
      ("topk", f"{prefix}.visible", False),
  )
  return places | {
      f"{at}.q_b_proj": _projection(f"{prefix}.q_b_proj"),
      f"{at}.scorer.weights_proj": _projection(f"{prefix}.weights_proj"),
      f"{at}.scorer": _named(
          prefix,
          ("bmm", "scores"),
          ("mul", "scaled"),
          ("mul", "weights"),
          ("mul", "weighted"),
          ("sum", "index_scores"),
      ),
  }


def _mlp(at, prefix, config, layer: int) -> dict[str, _Steps]:
  choice = (("add", "biased"), ("topk", "ids"))
  if config.mlp_layer_types[layer] == "hash_moe":
    choice = (("lookup", "ids"),)
  shared = f"{at}.shared_experts"
  return {
      f"{at}.gate": _named(
          f"{prefix}.router",
          ("mm", "logits"),
          ("softplus", "softplus"),
          ("sqrt", "scores"),
          *choice,
          ("sum", "gate_sum"),
          ("add", "gate_sum_shifted"),
          ("div", "normalized"),
          ("mul", "gates"),
      ),
      f"{shared}.gate_proj": _projection(f"{prefix}.shared.gate_proj"),
      f"{shared}.up_proj": _projection(f"{prefix}.shared.up_proj"),
      shared: _named(
          f"{prefix}.shared", ("silu", "silu"), ("mul", "activation")
      ),
      f"{shared}.down_proj": _projection(f"{prefix}.shared.down_proj"),
      at: (("add", f"{prefix}.sum", False),),
  }


# What becomes of the values.


def _canonical(name: str, value: np.ndarray, tokens: int) -> np.ndarray:
  """Brings a value to the axes of the table."""
  if name == "positions":
    return value.reshape(-1).astype(np.int32)
  tap = taps_lib.split(name)[1]
  if tap == "moe.router.ids":
    return value.astype(np.int32)
  axes = [a for a in taps_lib.axes(name) if a != "round"]
  while value.ndim > len(axes) and value.shape[0] == 1:
    value = value[0]
  if value.ndim != len(axes):
    raise refusal.UnsupportedError(
        f"tap {name!r} has shape {value.shape}; its axes are {axes}."
    )
  if tap == "attention.values" or any(p in _HEADS_FIRST for p in
                                      tap.split(".")):
    return np.swapaxes(value, 0, 1)
  # The cache is appended to as a whole; a tap holds this step's rows.
  return value[-tokens:] if tap == "attention.state_kv" else value


def _one(name: str, values: list[np.ndarray]) -> np.ndarray:
  """The value of a tap that several events may have shown."""
  if name.endswith(".sinkhorn"):
    return np.stack(values, 1)
  for other in values[1:]:
    if other.dtype != values[0].dtype or other.tobytes() != values[0].tobytes():
      raise refusal.UnsupportedError(
          f"tap {name!r} is shown several times, with different bits."
      )
  return values[0]


def _visible(chosen, scores, positions, rate: int) -> np.ndarray:
  """[token, entry] int32 from the chosen entries [token, k] of an indexer."""
  seen = np.zeros(scores.shape, np.int32)
  np.put_along_axis(seen, chosen, 1, -1)
  complete = (positions[:, None] + 1) // rate
  return seen * (np.arange(scores.shape[1]) < complete).astype(np.int32)
