"""Two optimisation steps of one model, place by place.

Layer: protocols.
"""

from collections.abc import Sequence

import numpy as np

from moejax.contracts import refusal
from moejax.numerics import formats
from moejax.numerics import ulp
from moejax.protocols.gradients import our_step
from moejax.protocols.gradients import places as places_lib

_UPDATE_RULE = "the optimiser's step (contracts/gradients/optimizer.py)"


def with_updates(
    places: Sequence[places_lib.Place],
) -> tuple[places_lib.Place, ...]:
  """Adds, behind all gradients, the parameters after the step."""
  return (
      *places,
      *(
          places_lib.Place(places_lib.UPDATED, place.name, _UPDATE_RULE)
          for place in places
          if place.kind == places_lib.GRADIENT
      ),
  )


def compare(
    ours: our_step.Record,
    reference: our_step.Record,
    places: Sequence[places_lib.Place],
) -> list[dict]:
  """Returns one row a place, in order, as JSON values.

  Raises:
    HarnessError: a side did not show a place, a parameter has no place, or
      the shapes do not hold the same number of values.
  """
  covered = {p.name for p in places if p.kind == places_lib.GRADIENT}
  for side, record in (("ours", ours), ("the reference", reference)):
    if set(record.gradients) != covered:
      raise refusal.HarnessError(
          f"gradients of {side} and places to compare do not match:"
          f" {sorted(set(record.gradients) ^ covered)}."
      )
  return [_row(place, ours.at(place), reference.at(place)) for place in places]


def first_difference(rows: Sequence[dict]) -> dict | None:
  """Returns the first row whose bits differ, or None."""
  return next((row for row in rows if row["differing"]), None)


def _row(place, ours, reference):
  for side, value in (("ours", ours), ("the reference", reference)):
    if value is None:
      raise refusal.HarnessError(
          f"{side} did not show the {place.kind} of {place.name}."
      )
  if ours.dtype != reference.dtype or ours.size != reference.size:
    raise refusal.HarnessError(
        f"{place.kind} of {place.name}: {ours.dtype}{ours.shape} against"
        f" {reference.dtype}{reference.shape}."
    )
  reference = reference.reshape(ours.shape)
  word = formats.of(ours.dtype).uint
  differs = np.ascontiguousarray(ours).view(word) != (
      np.ascontiguousarray(reference).view(word)
  )
  row = {
      "kind": place.kind,
      "name": place.name,
      "layer": place.layer,
      "rules": place.rules,
      "elements": int(ours.size),
      "differing": int(differs.sum()),
      "max_ulp": int(ulp.distance_ulp(ours, reference).max(initial=0)),
      "first": None,
  }
  if row["differing"]:
    at = tuple(int(i) for i in np.argwhere(differs)[0])
    row["first"] = {
        "at": list(at),
        "ours": _hex(ours[at]),
        "reference": _hex(reference[at]),
    }
  return row


def _hex(x) -> str:
  fmt = formats.of(x.dtype)
  return f"0x{int(np.asarray(x).view(fmt.uint)):0{fmt.bits // 4}x}"
