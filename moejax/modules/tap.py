"""Observation points of a decoder.

A module passes every value it computes through its tap, by name, and goes on
with what the tap returns. The default tap returns the value and does nothing
else. A recorder keeps it; a replay returns another backend's value instead, so
that the next operation runs on that backend's input. This is why taps are an
argument and not `sow`: a sown value cannot be replaced.

Layer: modules.
"""

from typing import Any


class Tap:
  """Does nothing. Subclasses override `observe`."""

  def __init__(self, path: str = ""):
    self.path = path

  def within(self, name: str) -> "Tap":
    """Returns the same tap for a part of the model."""
    child = object.__new__(type(self))
    child.__dict__.update(self.__dict__)
    child.path = f"{self.path}.{name}" if self.path else name
    return child

  def __call__(self, name: str, value: Any) -> Any:
    """Shows a value under this path; returns what the model goes on with."""
    return self.observe(f"{self.path}.{name}" if self.path else name, value)

  def observe(self, name: str, value: Any) -> Any:
    """Receives every value with its full name."""
    del name
    return value


SILENT = Tap()
