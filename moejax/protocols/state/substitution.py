"""Putting chosen parts of one state into another, with the proof.

A substitution says what it takes (components, layers, positions), and its
proof is made from the finished result: which bits changed against the state
before, whether they are the other state's, and whether anything changed that
was not asked for.

Layer: protocols.
"""

from collections.abc import Collection
import dataclasses

import numpy as np

from moejax.contracts import refusal
from moejax.protocols.state import digests
from moejax.protocols.state import layout as layout_lib
from moejax.protocols.state import persistent_state


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
  """What is taken; None takes all.

  Attributes:
    components: Of `layout.COMPONENTS`.
    layers: Indices.
    positions: Token positions; a row is taken if it belongs to one of them.
  """

  components: Collection[str] | None = None
  layers: Collection[int] | None = None
  positions: Collection[int] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
  """What a substitution did.

  Attributes:
    before: Root digest of the state that was changed.
    source: Root digest of the state that values were taken from.
    after: Root digest of the result.
    changed: {array name: (digest before, digest after)} where they differ.
    values_asked: Values that were to be taken.
    values_to_change: Of those, how many differ between the two states.
    values_changed: Values whose bits the substitution changed.
    foreign: Values that it changed though nobody asked.
    unlike_source: Values asked for that have not the source's bits.
  """

  before: str
  source: str
  after: str
  changed: dict[str, tuple[str, str]]
  values_asked: int
  values_to_change: int
  values_changed: int
  foreign: int
  unlike_source: int

  @property
  def holds(self) -> bool:
    """Whether exactly what was asked for changed, and to the source's bits."""
    return (
        not self.foreign
        and not self.unlike_source
        and self.values_changed == self.values_to_change
    )


def substitute(
    into: persistent_state.PersistentState,
    source: persistent_state.PersistentState,
    selection: Selection = Selection(),
) -> tuple[persistent_state.PersistentState, Proof]:
  """Returns `into` with the selected values of `source`, and the proof.

  Raises:
    HarnessError: the states belong to another configuration, prompt, position,
      layout or checkpoint; the selection names something that the state does
      not hold or selects nothing; or the proof does not hold.
  """
  persistent_state.check_same_subject(into, source)
  asked = selected_values(into, selection)
  arrays = {
      name: np.where(mask, source.arrays[name], into.arrays[name])
      for name, mask in asked.items()
  }
  result = dataclasses.replace(into, arrays=arrays)
  evidence = prove(into, source, result, asked)
  if not evidence.holds:
    raise refusal.HarnessError(f"the substitution is not proven: {evidence}.")
  return result, evidence


def selected_values(
    state: persistent_state.PersistentState, selection: Selection
) -> dict[str, np.ndarray]:
  """Returns {array name: bool [row, channel]}, true where selected.

  Raises:
    HarnessError: the selection names something the state does not hold, or
      selects nothing.
  """
  known = {
      "components": layout_lib.COMPONENTS,
      "layers": range(state.config.num_layers),
      "positions": range(state.identity.length),
  }
  for field, allowed in known.items():
    wrong = [v for v in getattr(selection, field) or () if v not in allowed]
    if wrong:
      raise refusal.HarnessError(
          f"{field} {wrong} are not in a state of {len(allowed)} {field}."
      )
  found = {}
  for part in state.parts():
    mask = np.zeros(part.shape, bool)
    if _takes(selection.components, part.component) and _takes(
        selection.layers, part.layer
    ):
      rows = [_takes(selection.positions, p) for p in part.positions]
      mask[np.array(rows, bool)] = True
    found[part.name] = mask
  if not any(mask.any() for mask in found.values()):
    raise refusal.HarnessError(f"{selection} selects nothing.")
  return found


def _takes(chosen: Collection | None, value) -> bool:
  return chosen is None or value in chosen


def prove(
    before: persistent_state.PersistentState,
    source: persistent_state.PersistentState,
    after: persistent_state.PersistentState,
    asked: dict[str, np.ndarray],
) -> Proof:
  """Measures what a change did, from the three states and what was asked."""
  counts = dict.fromkeys(
      ("values_asked", "values_to_change", "values_changed", "foreign",
       "unlike_source"),
      0,
  )
  changed = {}
  for part in before.parts():
    name, mask = part.name, asked[part.name]
    old, new = before.arrays[name], after.arrays[name]
    moved = persistent_state.differing(old, new)
    other = persistent_state.differing(old, source.arrays[name])
    unlike = persistent_state.differing(new, source.arrays[name])
    counts["values_asked"] += int(mask.sum())
    counts["values_to_change"] += int((mask & other).sum())
    counts["values_changed"] += int(moved.sum())
    counts["foreign"] += int((moved & ~mask).sum())
    counts["unlike_source"] += int((mask & unlike).sum())
    if moved.any():
      changed[name] = (
          persistent_state.part_digest(before, part),
          persistent_state.part_digest(after, part),
      )
  return Proof(
      digests.root(before), digests.root(source), digests.root(after),
      changed, **counts,
  )
