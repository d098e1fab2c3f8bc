"""Which part of a Qwen3-MoE decoder's taps and state belongs to one sequence.

The decoder writes a step's keys behind those of earlier steps, padding
included, so every sequence of a batch has its rows at the same end.

Layer: protocols.
"""

import jax
import numpy as np

from moejax.modules import decoder as decoder_lib
from moejax.modules import state as state_lib
from moejax.protocols import taps as taps_lib
from moejax.protocols.batch import place as place_lib


class Qwen3MoeLayout:
  """See `layouts.Layout`."""

  def __init__(self, decoder: decoder_lib.Decoder, capacity: int):
    self._decoder = decoder
    self._capacity = capacity
    self._window = decoder.config.sliding_window

  def empty(self, batch: int) -> state_lib.KVState:
    """Buffers of the dtype that this decoder keeps."""
    return decoder_lib.empty_state(
        self._decoder.config,
        batch,
        self._capacity,
        dtype=self._decoder.layers[0].attention.state_dtype,
    )

  def region(self, name: str, place: place_lib.Place) -> tuple | None:
    """Tokens without padding; keys that any query of the step can see."""
    axes = taps_lib.axes(name)
    if "token" not in axes:
      return None
    start = place.first - place.padding + place.before
    keys = slice(self._first(place.first, start), start + place.tokens)
    parts = {"token": slice(place.padding, None), "key": keys}
    return tuple(parts.get(axis, slice(None)) for axis in axes)

  def state(
      self, state: state_lib.KVState, row: int, place: place_lib.Place
  ) -> dict[str, np.ndarray]:
    """Keys and values without padding, and without rows nobody sees again.

    Under a sliding window of W only the last W - 1 rows can be read again.
    """
    end = place.first + place.after
    rows = slice(self._first(place.first, end), end)
    keys, values = jax.device_get((state.keys, state.values))
    out = {}
    for layer, pair in enumerate(zip(keys, values, strict=True)):
      for name, array in zip(("keys", "values"), pair, strict=True):
        out[f"layers.{layer}.{name}"] = np.ascontiguousarray(array[row, rows])
    return out

  def _first(self, first: int, start: int) -> int:
    """The first state row that a query at row `start` can see."""
    if self._window is None:
      return first
    return max(first, start - (self._window - 1))
