"""The certificate of a portable result.

Portable arithmetic is worth having because its results belong to the model and
not to the machine. The certificate says how that was secured: how many
elements each operation produced, how many lay so near a rounding boundary that
another float64 order could have rounded them differently ("uncertain"), and
how many of those were then computed exactly. It is complete when the last two
numbers agree: then equality and difference are both proven.

Layer: numerics.
"""

import collections


class Certificate:
  """Counts elements by operation. Not thread-safe; one for each run."""

  def __init__(self):
    self._elements = collections.Counter()
    self._uncertain = collections.Counter()
    self._recomputed = collections.Counter()
    self.ties = 0

  def note(self, operation: str, elements: int, uncertain: int = 0) -> None:
    """Adds the elements of one call, and how many of them were uncertain."""
    self._elements[operation] += elements
    if uncertain:
      self._uncertain[operation] += uncertain

  def note_recomputed(self, operation: str, count: int) -> None:
    """Adds elements that were computed exactly."""
    self._recomputed[operation] += count

  def note_ties(self, count: int) -> None:
    """Adds selections in which equal values left a choice to the tie rule."""
    self.ties += count

  @property
  def elements(self) -> int:
    """Elements produced by all operations."""
    return self._elements.total()

  @property
  def uncertain(self) -> int:
    """Elements that another float64 order could have rounded differently."""
    return self._uncertain.total()

  @property
  def unresolved(self) -> int:
    """Uncertain elements that were not computed exactly."""
    return self._uncertain.total() - self._recomputed.total()

  @property
  def complete(self) -> bool:
    """Whether no element depends on the order of float64 operations."""
    return self.unresolved == 0

  def to_dict(self) -> dict:
    """Returns the counts as JSON values, operations in name order."""
    return {
        "complete": self.complete,
        "elements": self.elements,
        "uncertain": self.uncertain,
        "unresolved": self.unresolved,
        "operations": {
            name: {
                "elements": self._elements[name],
                "uncertain": self._uncertain[name],
                "recomputed": self._recomputed[name],
            }
            for name in sorted(self._elements)
        },
    }
