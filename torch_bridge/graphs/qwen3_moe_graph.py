"""The operations of transformers' Qwen3-MoE, by module, and their tap names.

The traced events of each module must be exactly the listed ones, in order. So
the graph is verified operation by operation every time it runs: a version of
transformers that computes something else in between is reported as such and
never compared by position. The rows that experts compute are put back into
[token, slot] order here, whichever experts implementation ran.

Layer: torch_bridge. Names: moejax/protocols/taps.py.
"""

import re

import numpy as np

from torch_bridge.graphs import expert_events
from torch_bridge.graphs import graph_match
from torch_bridge import operation_trace

# (operation, tap or None, whether it may be absent).
_NORM = (
    ("pow", "square", False),
    ("mean", "mean", False),
    ("add", "plus_epsilon", False),
    ("rsqrt", "rsqrt", False),
    ("mul", "normalized", False),
    ("cast", "rounded", True),
    ("mul", "output", False),
)
_ROTARY = (
    ("from_int", "positions", False),
    # Up to transformers 5.17 a product over a contracting axis of length one.
    (("mul", "bmm"), "rotary.angle", False),
    ("cos", "rotary.cosine", False),
    ("mul", "rotary.cosine_scaled", False),
    ("sin", "rotary.sine", False),
    ("mul", "rotary.sine_scaled", False),
    ("cast", "rotary.cos", True),
    ("cast", "rotary.sin", True),
)
_ATTENTION = (
    ("mul", "q_rotary.times_cos", False),
    ("mul", "q_rotary.times_sin", False),
    ("add", "q_rotary.rotated", False),
    ("mul", "k_rotary.times_cos", False),
    ("mul", "k_rotary.times_sin", False),
    ("add", "k_rotary.rotated", False),
    ("append", "state_keys", False),
    ("append", "state_values", False),
    ("bmm", "scores", False),
    ("mul", "scaled", False),
    ("add", "masked", False),
    ("_softmax", "softmax", False),
    ("cast", "probabilities", True),
    ("bmm", "values", False),
)
_ROUTER = (
    ("mm", "logits", False),
    ("_softmax", "scores", False),
    ("topk", "ids", False),
    ("sum", "gate_sum", True),
    ("div_", "normalized", True),
    ("cast", "gates", True),
)
_PROJECTION = ((("mm", "addmm"), "", False),)

_LAYER = r"model\.layers\.(\d+)"
_PLACES: tuple[tuple[str, str, tuple], ...] = (
    (r"model\.embed_tokens", "embed", (("embedding", "", False),)),
    (r"model\.rotary_emb", "", _ROTARY),
    (rf"{_LAYER}\.input_layernorm", "layers.{}.input_norm", _NORM),
    (rf"{_LAYER}\.self_attn\.q_proj", "layers.{}.attention.q_proj",
     _PROJECTION),
    (rf"{_LAYER}\.self_attn\.k_proj", "layers.{}.attention.k_proj",
     _PROJECTION),
    (rf"{_LAYER}\.self_attn\.v_proj", "layers.{}.attention.v_proj",
     _PROJECTION),
    (rf"{_LAYER}\.self_attn\.o_proj", "layers.{}.attention.o_proj",
     _PROJECTION),
    (rf"{_LAYER}\.self_attn\.q_norm", "layers.{}.attention.q_norm", _NORM),
    (rf"{_LAYER}\.self_attn\.k_norm", "layers.{}.attention.k_norm", _NORM),
    (rf"{_LAYER}\.self_attn", "layers.{}.attention", _ATTENTION),
    (rf"{_LAYER}\.post_attention_layernorm", "layers.{}.mlp_norm", _NORM),
    (rf"{_LAYER}\.mlp\.gate", "layers.{}.moe.router", _ROUTER),
    (rf"{_LAYER}\.mlp\.gate_proj", "layers.{}.mlp.gate_proj", _PROJECTION),
    (rf"{_LAYER}\.mlp\.up_proj", "layers.{}.mlp.up_proj", _PROJECTION),
    (rf"{_LAYER}\.mlp\.down_proj", "layers.{}.mlp.down_proj", _PROJECTION),
    (rf"{_LAYER}\.mlp", "layers.{}.mlp",
     (("silu", "silu", False), ("mul", "activation", False))),
    (_LAYER, "layers.{}",
     (("add", "after_attention", False), ("add", "output", False))),
    (r"model\.norm", "final_norm", _NORM),
    (r"lm_head", "logits", _PROJECTION),
)
_EXPERTS = re.compile(rf"{_LAYER}\.mlp\.experts")


def taps_of(
    events: list[operation_trace.Event], implementation: str
) -> dict[str, np.ndarray]:
  """Turns the events of one forward pass of one sequence into named taps.

  Args:
    events: From `OperationTrace.take`.
    implementation: The experts implementation that ran.

  Returns:
    {tap name: value}, axes as in `taps.TAPS`, without a batch axis.

  Raises:
    UnsupportedError: a module ran other operations than this file lists.
  """
  by_scope = graph_match.by_scope(events)
  out: dict[str, np.ndarray] = {}
  routes: dict[str, np.ndarray] = {}
  for scope, found in by_scope.items():
    experts = _EXPERTS.fullmatch(scope)
    if experts:
      continue
    place = _place(scope)
    if place is None:
      graph_match.refuse_arithmetic(scope, found)
      continue
    prefix, steps = place
    for tap, value in graph_match.match(scope, found, steps):
      name = ".".join(part for part in (prefix, tap) if part)
      out[name] = _canonical(name, value)
      if name.endswith("router.ids"):
        routes[name] = out[name]
  for scope, found in by_scope.items():
    experts = _EXPERTS.fullmatch(scope)
    if experts:
      prefix = f"layers.{experts[1]}.moe"
      taps = expert_events.taps_of(
          scope, found, routes[f"{prefix}.router.ids"], implementation
      )
      for tap, value in taps.items():
        out[f"{prefix}.experts.{tap}"] = value
  _keep_new_rows(out)
  return out


def _place(scope: str):
  for pattern, prefix, steps in _PLACES:
    match = re.fullmatch(pattern, scope)
    if match:
      return prefix.format(*match.groups()), steps
  return None


def _canonical(name: str, value: np.ndarray) -> np.ndarray:
  """Drops the batch axis and puts tokens ahead of heads where heads follow."""
  leaf = name.rsplit(".", 1)[-1]
  if leaf == "positions":
    return value.reshape(-1).astype(np.int32)
  if ".attention." in name and leaf in ("scores", "values"):
    return value if leaf == "scores" else np.swapaxes(value, 0, 1)
  if ".attention." in name and leaf in (
      "scaled",
      "masked",
      "softmax",
      "probabilities",
  ):
    return value[0]
  if "_rotary." in name or leaf in ("state_keys", "state_values"):
    return np.swapaxes(value[0], 0, 1)
  if leaf == "ids":
    return value.astype(np.int32)
  projections = ("gate_proj", "up_proj", "down_proj")
  if leaf.endswith("_proj") and leaf not in projections or leaf == "logits":
    return value
  if leaf in projections or ".router." in name:
    return value
  return value[0]


def _keep_new_rows(out: dict[str, np.ndarray]) -> None:
  """The cache is appended to as a whole; a tap holds this step's rows."""
  tokens = len(out["positions"])
  for name in out:
    if name.endswith(("state_keys", "state_values")):
      out[name] = out[name][-tokens:]
