"""The rows that experts compute, back in [token, slot] order.

Three implementations of the same experts give one set of taps.

Layer: torch_bridge. Names: moejax/protocols/taps.py.
"""

from collections.abc import Callable
from collections.abc import Sequence

import numpy as np

from moejax.contracts import refusal
from torch_bridge.graphs import graph_match
from torch_bridge import operation_trace


def taps_of(
    scope: str,
    events: Sequence[operation_trace.Event],
    ids: np.ndarray,
    implementation: str,
) -> dict[str, np.ndarray]:
  """Turns the events of one experts module into taps.

  Args:
    scope: The module's name, for messages.
    events: Its events.
    ids: [token, slot], the experts that the router chose.
    implementation: One of `IMPLEMENTATIONS`.

  Returns:
    {"gate_up": [token, slot, two_hidden], "silu", "activation": [token, slot,
    hidden], "down", "terms": [token, slot, embed], "combine": [token, embed]}.

  Raises:
    UnsupportedError: the module ran other operations.
  """
  events = [e for e in events if e.operation not in graph_match.BOOKKEEPING]
  return _ROWS[implementation](scope, events, ids)


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
  taps = dict(graph_match.match(scope, events, steps))
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
    one = rest[start : start + len(steps)]
    found = dict(graph_match.match(scope, one, steps))
    slot, token = found.pop("where").T
    taps["combine"] = found.pop("combine")
    for name, rows in found.items():
      if name not in taps:
        taps[name] = np.zeros((tokens, top_k, rows.shape[-1]), rows.dtype)
      taps[name][token, slot] = rows
  return taps


_ROWS: dict[str, Callable] = {
    "eager": _eager,
    "grouped_mm": _grouped,
    "batched_mm": _batched,
}
IMPLEMENTATIONS = tuple(_ROWS)
