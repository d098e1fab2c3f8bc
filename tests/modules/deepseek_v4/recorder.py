"""A tap that keeps what it sees."""

import numpy as np

from moejax.modules import tap as tap_lib


class Recorder(tap_lib.Tap):
  """Keeps every value, by name, in order."""

  def __init__(self):
    super().__init__()
    self.seen = {}

  def observe(self, name, value):
    self.seen[name] = np.asarray(value)
    return value
