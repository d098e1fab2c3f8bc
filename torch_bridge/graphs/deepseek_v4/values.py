"""What becomes of the traced values: axes of the table, one value a tap.

Layer: torch_bridge.
"""

import numpy as np

from moejax.contracts import refusal
from moejax.protocols import taps as taps_lib

# transformers computes these with heads ahead of tokens.
_HEADS_FIRST = ("q_b_norm", "q_turn", "output_turn")


def canonical(name: str, value: np.ndarray, tokens: int) -> np.ndarray:
  """Brings a value to the axes of the table.

  Args:
    name: The tap's full name.
    value: As traced, with a batch axis of one or without.
    tokens: Tokens of the step.

  Raises:
    UnsupportedError: the value has other axes than the table's.
  """
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


def one(name: str, values: list[np.ndarray]) -> np.ndarray:
  """The value of a tap that several events may have shown.

  The rounds of a normalisation are stacked along axis 1.

  Raises:
    UnsupportedError: the events show different bits.
  """
  if name.endswith(".sinkhorn"):
    return np.stack(values, 1)
  for other in values[1:]:
    if other.dtype != values[0].dtype or other.tobytes() != values[0].tobytes():
      raise refusal.UnsupportedError(
          f"tap {name!r} is shown several times, with different bits."
      )
  return values[0]


def visible(chosen, scores, positions, rate: int) -> np.ndarray:
  """[token, entry] int32 from the chosen entries [token, k] of an indexer."""
  seen = np.zeros(scores.shape, np.int32)
  np.put_along_axis(seen, chosen, 1, -1)
  complete = (positions[:, None] + 1) // rate
  return seen * (np.arange(scores.shape[1]) < complete).astype(np.int32)
