"""Where one sequence of a left-padded batch stands in one step.

Layer: protocols. Imports nothing from this project.
"""

from typing import NamedTuple


class Place(NamedTuple):
  """One sequence in one step.

  Attributes:
    tokens: Columns of the step.
    padding: Columns of it that are padding, on the left.
    before: Tokens that the sequence had seen.
    first: Columns of padding in its first step.
  """

  tokens: int
  padding: int
  before: int
  first: int

  @property
  def after(self) -> int:
    """Tokens that the sequence has seen after the step."""
    return self.before + self.tokens - self.padding
