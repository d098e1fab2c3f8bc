"""Which part of a DeepSeek-V4 decoder's taps and state belongs to one sequence.

The decoder's buffers have fixed sizes; a tap shows rows that hold nothing yet.
What is cut out here is what a run of the sequence on its own, with buffers that
grow, would show.

Layer: protocols.
"""

import jax
import numpy as np

from moejax.contracts import deepseek_v4_state as state_lib
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import decoder as decoder_lib
from moejax.modules.deepseek_v4 import state as rows_lib
from moejax.protocols.batch import place as place_lib
from moejax.protocols.state import layout as layout_lib
from moejax.protocols.state import working_state
from moejax.protocols import taps as taps_lib

Region = tuple[slice | np.ndarray, ...]


class DeepseekV4Layout:
  """See `layouts.Layout`."""

  def __init__(self, decoder: decoder_lib.Decoder, capacity: int):
    self._config = decoder.config
    self._graph = decoder.graph
    self._capacity = capacity
    self._biases = position_biases(decoder)

  def empty(self, batch: int) -> state_lib.DeepseekV4State:
    """Buffers for `capacity` tokens."""
    return rows_lib.empty(self._config, batch, self._capacity, self._graph)

  def region(self, name: str, place: place_lib.Place) -> Region | None:
    """See `region`; None for what belongs to the model, such as a table."""
    if not {"token", "window"} & {*taps_lib.axes(name)}:
      return None
    return region(name, self._config, place, self._capacity)

  def state(
      self, state: state_lib.DeepseekV4State, row: int, place: place_lib.Place
  ) -> dict[str, np.ndarray]:
    """The layout "carried": what the next token can read, as float32."""
    del place  # The state counts its tokens itself.
    return dict(
        working_state.capture(
            self._config,
            jax.device_get(state),
            self._biases,
            (),
            layout_lib.CARRIED,
            sequence=row,
        ).arrays
    )


def position_biases(decoder: decoder_lib.Decoder) -> dict[str, np.ndarray]:
  """{parameter path: array} of every compressor's position bias."""
  out = {}
  for index, layer in enumerate(decoder.layers):
    for component, owner in (
        (layout_lib.COMPRESSOR, layer.attention),
        (layout_lib.INDEXER, layer.attention.indexer),
    ):
      if owner is not None and owner.compressor is not None:
        bias = np.asarray(owner.compressor.position_bias[...])
        out[working_state.bias_name(index, component)] = bias
  return out


def region(
    name: str,
    config: config_lib.DeepseekV4Config,
    place: place_lib.Place,
    capacity: int,
) -> Region:
  """Returns the index of a sequence's part, behind the batch axis.

  Args:
    name: Of the tap.
    config: The decoder.
    place: The sequence in this step.
    capacity: Tokens the state is made for.
  """
  tokens, padding, before, _ = place
  after = place.after
  layer = taps_lib.split(name)[0]
  rate = config.rate(layer) if layer is not None else 0
  out = []
  for axis in taps_lib.axes(name):
    if axis == "token":
      out.append(slice(padding, None))
    elif axis == "window":
      out.append(slice(0, after // rate - before // rate))
    elif axis == "entry":
      out.append(slice(0, after // rate))
    elif axis in ("key", "key_and_sink"):
      kept = min(before, config.window - 1)
      keys = [
          np.arange(config.window - kept, config.window),
          config.window + np.arange(padding, tokens),
      ]
      end = config.window + tokens
      if rate:
        keys.append(end + np.arange(after // rate))
        end += -(-capacity // rate)
      if axis == "key_and_sink":
        keys.append(np.array([end]))
      out.append(np.concatenate(keys))
    else:
      out.append(slice(None))
  return tuple(out)
