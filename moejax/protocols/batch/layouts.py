"""How one sequence of a left-padded batch lies in a decoder's taps and state.

A trajectory runs decoders of several architectures. What it must know of each
is one class with the methods of `Layout`; `of` is the table.

Layer: protocols.
"""

from typing import Any, Protocol

import numpy as np

from moejax.modules.deepseek_v4 import config as deepseek_v4_config
from moejax.protocols.batch import deepseek_v4
from moejax.protocols.batch import place as place_lib
from moejax.protocols.batch import qwen3_moe

Place = place_lib.Place


class Layout(Protocol):
  """One decoder, with a state for a given number of tokens."""

  def empty(self, batch: int) -> Any:
    """A state that has seen nothing."""

  def region(self, name: str, place: Place) -> tuple | None:
    """The index of a sequence's part of a tap, behind the batch axis.

    None for a tap that belongs to no sequence.
    """

  def state(self, state: Any, row: int, place: Place) -> dict[str, np.ndarray]:
    """{"layers.N.COMPONENT": array} of a sequence: what can be read again."""


def of(decoder: Any, capacity: int) -> Layout:
  """Returns the layout of a decoder.

  Args:
    decoder: Of any architecture.
    capacity: Tokens that the longest sequence may reach, padding included.
  """
  if isinstance(decoder.config, deepseek_v4_config.DeepseekV4Config):
    return deepseek_v4.DeepseekV4Layout(decoder, capacity)
  return qwen3_moe.Qwen3MoeLayout(decoder, capacity)
