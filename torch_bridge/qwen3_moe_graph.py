"""The operations of transformers' Qwen3-MoE, by module, and their tap names.

The traced events of each module must be exactly the listed ones, in order. So
the graph is verified operation by operation every time it runs: a version of
transformers that computes something else in between is reported as such and
never compared by position. The rows that experts compute are put back into
[token, slot] order here, whichever experts implementation ran.

Layer: torch_bridge. Names: moejax/protocols/taps.py.
"""

from collections.abc import Callable
import re

import numpy as np

from moejax.contracts import refusal
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
# Count rows and masks; they compute no value of the model.
_BOOKKEEPING = ("histc", "from_int")


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
  by_scope: dict[str, list] = {}
  for event in events:
    scope = event.scope.removesuffix(".act_fn")
    by_scope.setdefault(scope, []).append(event)
  out: dict[str, np.ndarray] = {}
  routes: dict[str, np.ndarray] = {}
  for scope, found in by_scope.items():
    experts = _EXPERTS.fullmatch(scope)
    if experts:
      continue
    place = _place(scope)
    if place is None:
      _refuse_arithmetic(scope, found)
      continue
    prefix, steps = place
    for tap, value in _match(scope, found, steps):
      name = ".".join(part for part in (prefix, tap) if part)
      out[name] = _canonical(name, value)
      if name.endswith("router.ids"):
        routes[name] = out[name]
  for scope, found in by_scope.items():
    experts = _EXPERTS.fullmatch(scope)
    if experts:
      prefix = f"layers.{experts[1]}.moe"
      taps = _EXPERT_ROWS[implementation](
          scope, found, routes[f"{prefix}.router.ids"]
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


def _refuse_arithmetic(scope, events) -> None:
  """Scopes without a place (the model's own) may prepare masks, no more."""
  names = [e.operation for e in events if e.operation not in _BOOKKEEPING]
  if names:
    raise refusal.UnsupportedError(
        f"module {scope!r} runs {names}, which this project has no place for."
    )


def _match(scope: str, events: list, steps: tuple):
  """Pairs events with steps, in order; yields (tap, value)."""
  wanted = list(steps)
  for event in events:
    if event.operation in _BOOKKEEPING and not any(
        _is(event, step) for step in steps
    ):
      continue
    while wanted and not _is(event, wanted[0]) and wanted[0][2]:
      wanted.pop(0)
    if not wanted or not _is(event, wanted[0]):
      raise refusal.UnsupportedError(
          f"module {scope!r} runs {[e.operation for e in events]}; expected"
          f" {[step[0] for step in steps]}."
      )
    tap, value = wanted.pop(0)[1], event.value
    if tap == "rotary.angle" and event.operation == "bmm":
      value = np.swapaxes(value, 1, 2)
    yield tap, value
  missing = [step[0] for step in wanted if not step[2]]
  if missing:
    raise refusal.UnsupportedError(
        f"module {scope!r} runs {[e.operation for e in events]}; {missing} is"
        " missing at the end."
    )


def _is(event, step) -> bool:
  operations = step[0] if isinstance(step[0], tuple) else (step[0],)
  return event.operation in operations


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


# The experts: three implementations, one set of taps.


def _rows_taps(scope, events, product, slots) -> dict[str, np.ndarray]:
  """One pass over all routes at once, rows in the order `slots` says."""
  steps = (
      (product, "gate_up", False),
      ("silu", "silu", False),
      ("mul", "activation", False),
      (product, "down", False),
      ("mul", "terms", False),
      ("sum", "combine", False),
  )
  taps = dict(_match(scope, events, steps))
  tokens, top_k = slots
  for name in ("gate_up", "silu", "activation", "down", "terms"):
    taps[name] = taps[name].reshape(tokens, top_k, -1)
  return taps


def _batched(scope, events, ids):
  return _rows_taps(scope, _without_trailing_ones(events), "bmm", ids.shape)


def _without_trailing_ones(events):
  for event in events:
    if event.operation == "bmm":
      event.value = event.value[..., 0]
  return events


def _grouped(scope, events, ids):
  """Rows come sorted by expert; the sort's indices say from where."""
  sorts = [e for e in events if e.operation == "sort"]
  rest = [e for e in events if e.operation not in ("sort", "cumsum")]
  if len(sorts) != 1:
    raise refusal.UnsupportedError(
        f"module {scope!r} sorts {len(sorts)} times."
    )
  source = sorts[0].value
  product = (
      "_grouped_mm"
      if any(e.operation == "_grouped_mm" for e in rest)
      else "grouped_mm_fallback"
  )
  for event in rest:
    if len(event.value) == len(source) and event.operation != "sum":
      ordered = np.empty_like(event.value)
      ordered[source] = event.value
      event.value = ordered
  return _rows_taps(scope, rest, product, ids.shape)


def _eager(scope, events, ids):
  """One round an expert: rows (slot, token) from `nonzero`, then its MLP."""
  tokens, top_k = ids.shape
  steps = (
      ("nonzero", "where", False),
      ("mm", "gate_up", False),
      ("silu", "silu", False),
      ("mul", "activation", False),
      ("mm", "down", False),
      ("mul", "terms", False),
      ("index_add_", "combine", False),
  )
  # The first `nonzero` lists the experts that have rows.
  hits, rest = events[0], events[1:]
  if hits.operation != "nonzero" or len(rest) != len(hits.value) * len(steps):
    raise refusal.UnsupportedError(
        f"module {scope!r} runs {[e.operation for e in events]}."
    )
  taps: dict[str, np.ndarray] = {}
  for start in range(0, len(rest), len(steps)):
    found = dict(_match(scope, rest[start : start + len(steps)], steps))
    slot, token = found.pop("where").T
    taps["combine"] = found.pop("combine")
    for name, rows in found.items():
      if name not in taps:
        taps[name] = np.zeros((tokens, top_k, rows.shape[-1]), rows.dtype)
      taps[name][token, slot] = rows
  return taps


_EXPERT_ROWS: dict[str, Callable] = {
    "eager": _eager,
    "grouped_mm": _grouped,
    "batched_mm": _batched,
}
IMPLEMENTATIONS = tuple(_EXPERT_ROWS)
