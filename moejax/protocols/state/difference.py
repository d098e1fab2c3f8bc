"""What differs between two states: values, places, reasons.

Layer: protocols.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses

import numpy as np

from moejax.contracts import refusal
from moejax.protocols.state import layout as layout_lib
from moejax.protocols.state import persistent_state


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
  """One state minus another.

  Attributes:
    arrays: {array name: float32 or float64 [row, channel]}; 0 exactly where
      the bits are equal, infinities and NaNs included.
    counts: {(component, layer): values whose bits differ}, every pair present.
  """

  arrays: Mapping[str, np.ndarray]
  counts: Mapping[tuple[str, int], int]

  @property
  def differing(self) -> int:
    """Values whose bits differ, in all."""
    return sum(self.counts.values())


def delta(
    branch: persistent_state.PersistentState,
    production: persistent_state.PersistentState,
    dtype: str = "float32",
) -> Delta:
  """Returns branch - production, rounded once to `dtype`.

  A float32 difference can lose the bits that bring the branch back when it is
  added; a float64 difference of float32 values seldom does.

  Args:
    branch: The state that differs.
    production: The state it is compared with, of the same subject.
    dtype: "float32" or "float64".

  Raises:
    HarnessError: the states belong to different things.

  Source: the reduction-order paper, 2.4.3.
  """
  persistent_state.check_same_subject(branch, production)
  arrays, counts = {}, {}
  for part in branch.parts():
    b, p = branch.arrays[part.name], production.arrays[part.name]
    differs = persistent_state.differing(b, p)
    with np.errstate(invalid="ignore", over="ignore"):
      gap = np.subtract(b, p, dtype=dtype)
    arrays[part.name] = np.where(differs, gap, np.zeros((), dtype))
    place = (part.component, part.layer)
    counts[place] = counts.get(place, 0) + int(differs.sum())
  return Delta(arrays, counts)


def add(
    production: persistent_state.PersistentState, difference: Delta
) -> persistent_state.PersistentState:
  """Adds a delta in its own dtype and rounds once to float32.

  Where the delta is 0 the bits stay. Whether the result is the branch is for
  the caller to compare: a difference of signed zeros, an infinity or a lost
  bit does not come back.
  """
  arrays = {}
  for name, value in production.arrays.items():
    step = difference.arrays[name]
    with np.errstate(invalid="ignore", over="ignore"):
      moved = (value.astype(step.dtype) + step).astype(np.float32)
    arrays[name] = np.where(step == 0, value, moved)
  return dataclasses.replace(production, arrays=arrays)


@dataclasses.dataclass(frozen=True, slots=True)
class RowDifference:
  """One row in which two states differ.

  Attributes:
    component: One of `layout.COMPONENTS`.
    layer: Index.
    array: Its name inside component and layer.
    row: Index in the array.
    position: The token position that the row belongs to; -1 if unwritten.
    channel: The first channel that differs.
    ours: Our value there.
    theirs: The other's.
    differing: Differing values of the row, or of one half of its channels.
    status: In the raw layout, a word of `layout.REASONS`; else "live".
  """

  component: str
  layer: int
  array: str
  row: int
  position: int
  channel: int
  ours: float
  theirs: float
  differing: int
  status: str

  @property
  def why(self) -> str:
    """What the row is to later tokens, in words."""
    return layout_lib.REASONS[self.status]


def rows(
    ours: persistent_state.PersistentState,
    theirs: persistent_state.PersistentState,
) -> Iterator[RowDifference]:
  """Yields every differing row in canonical order, with its reason.

  In the raw layout a row of a CSA compressor is told apart by halves, because
  the halves of a complete window have different reasons.

  Raises:
    HarnessError: the states belong to different things.
  """
  persistent_state.check_same_subject(ours, theirs)
  identity = ours.identity
  raw = identity.layout == layout_lib.RAW
  marks = layout_lib.status(ours.config, identity.length) if raw else {}
  for part in ours.parts():
    a, b = ours.arrays[part.name], theirs.arrays[part.name]
    differs = persistent_state.differing(a, b)
    mark = marks.get(part.name)
    halves = 1 if mark is None else mark.shape[1]
    half_width = part.width // halves
    for row in np.flatnonzero(differs.any(axis=1)):
      for half in range(halves):
        channels = half * half_width + np.flatnonzero(
            differs[row, half * half_width : (half + 1) * half_width]
        )
        if channels.size:
          yield RowDifference(
              part.component,
              part.layer,
              part.array,
              int(row),
              int(part.positions[row]),
              int(channels[0]),
              float(a[row, channels[0]]),
              float(b[row, channels[0]]),
              int(channels.size),
              layout_lib.IN_USE if mark is None else str(mark[row, half]),
          )


def same_live(
    ours: persistent_state.PersistentState,
    theirs: persistent_state.PersistentState,
    layout: str = layout_lib.LIVE,
) -> RowDifference | None:
  """Returns the first live row whose bits differ, or None where none does.

  Args:
    ours: Raw or live state, or carried where the layout is.
    theirs: The same for the other side; the two need not have one layout.
    layout: "live", or "carried" where a side comes from a transformers cache.

  Raises:
    HarnessError: the states belong to different things, or hold less than the
      layout asks for.
  """
  if layout == layout_lib.RAW:
    raise refusal.HarnessError("raw rows depend on the path; use rows().")
  pair = [persistent_state.narrow(state, layout) for state in (ours, theirs)]
  return next(rows(*pair), None)
