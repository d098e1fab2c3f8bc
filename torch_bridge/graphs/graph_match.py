"""Pairs the traced operations of a module with the operations it should run.

A step is (operation or a tuple of them, tap or None, whether it may be
absent). The events of a module must be its steps, in order; anything else is
refused by the module's name.

Layer: torch_bridge.
"""

from collections.abc import Iterator
from collections.abc import Sequence

import numpy as np

from moejax.contracts import refusal
from torch_bridge import operation_trace

Step = tuple[str | tuple[str, ...], str | None, bool]
# Count rows, build masks and look up ids; they compute no value of the model.
BOOKKEEPING = ("histc", "from_int", "lookup")
# Modules inside a module whose one operation is a step of the outer one.
_FUNCTIONS = (".act_fn", ".score_fn")


def by_scope(
    events: Sequence[operation_trace.Event],
) -> dict[str, list[operation_trace.Event]]:
  """Sorts events by module, in order; activations belong to the outer one."""
  out: dict[str, list] = {}
  for event in events:
    scope = event.scope
    for function in _FUNCTIONS:
      scope = scope.removesuffix(function)
    out.setdefault(scope, []).append(event)
  return out


def refuse_arithmetic(
    scope: str, events: Sequence[operation_trace.Event]
) -> None:
  """Scopes without a place (the model's own) may prepare masks, no more.

  Raises:
    UnsupportedError: one of the events computes.
  """
  names = [e.operation for e in events if e.operation not in BOOKKEEPING]
  if names:
    raise refusal.UnsupportedError(
        f"module {scope!r} runs {names}, which this project has no place for."
    )


def match(
    scope: str, events: Sequence[operation_trace.Event], steps: Sequence[Step]
) -> Iterator[tuple[str, np.ndarray]]:
  """Pairs events with steps, in order; yields (tap, value) of named steps.

  Raises:
    UnsupportedError: the events are not the steps.
  """
  wanted = list(steps)
  for event in events:
    if event.operation in BOOKKEEPING and not any(
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
    if tap is None:
      continue
    if tap.endswith("angle") and event.operation == "bmm":
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
