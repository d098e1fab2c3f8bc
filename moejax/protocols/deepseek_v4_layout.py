"""Which part of a DeepSeek-V4 decoder's taps belongs to one sequence.

The decoder's buffers have fixed sizes; a tap shows rows that hold nothing yet.
What is cut out here is what a run of the sequence on its own, with buffers that
grow, would show.

Layer: protocols.
"""

import numpy as np

from moejax.modules.deepseek_v4 import config as config_lib
from moejax.protocols import taps as taps_lib

Region = tuple[slice | np.ndarray, ...]


def region(
    name: str,
    config: config_lib.DeepseekV4Config,
    tokens: int,
    padding: int,
    before: int,
    capacity: int,
) -> Region:
  """Returns the index of a sequence's part, behind the batch axis.

  Args:
    name: Of the tap.
    config: The decoder.
    tokens: Columns of the step.
    padding: Columns of it that are padding, on the left.
    before: Tokens the sequence had seen.
    capacity: Tokens the state is made for.
  """
  after = before + tokens - padding
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
