"""What every loader refuses: names that do not fit, weights that are no number.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Collection
from collections.abc import Sequence
import pathlib

import numpy as np

from moejax.contracts import refusal

# As many names as a message lists; a small model fits, a large one is cut.
_SHOWN = 200


def check_names(
    folder: pathlib.Path, needed: Sequence[str], held: Collection[str]
) -> None:
  """Refuses a checkpoint with a missing or a left-over tensor.

  Raises:
    refusal.HarnessError: names are needed and not held, or held and not needed.
  """
  missing = [name for name in needed if name not in held]
  left_over = sorted(set(held) - set(needed))
  refuse(folder, {"missing tensors": missing, "left-over tensors": left_over})


def refuse(
    folder: pathlib.Path, faults: dict[str, list[str]], shown: int = _SHOWN
) -> None:
  """Refuses a folder if any list of faults has an entry.

  Args:
    folder: The checkpoint.
    faults: {heading: faults}.
    shown: How many of each list the message has.

  Raises:
    refusal.HarnessError: so; it lists the entries under their headings.
  """
  listed = [
      f"{heading} ({len(items)}): {listing(items, shown)}"
      for heading, items in faults.items()
      if items
  ]
  if listed:
    raise refusal.HarnessError(f"{folder}: {'; '.join(listed)}.")


def check_finite(folder: pathlib.Path, name: str, array: np.ndarray) -> None:
  """Refuses weights that are not finite.

  Raises:
    refusal.HarnessError: some are not; it says how many and where the first.
  """
  finite = np.isfinite(array)
  if not finite.all():
    first = np.unravel_index(int(finite.argmin()), array.shape)
    raise refusal.HarnessError(
        f"{folder}: tensor {name} holds {int((~finite).sum())} weights that are"
        f" not finite; first at {tuple(map(int, first))}: {array[first]}."
    )


def listing(items: Sequence[str], shown: int = _SHOWN) -> str:
  """Joins the first items; says how many more there are."""
  more = len(items) - shown
  return ", ".join(items[:shown]) + (f" and {more} more" if more > 0 else "")
