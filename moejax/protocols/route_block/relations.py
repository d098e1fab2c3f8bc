"""What the outcomes of a study must be to each other.

Two kinds of statements. Consequences follow from the planner alone: between any
two outcomes, a surface may differ only where a route's tiles are cut
differently, and behind that only where its own inputs differ. Relations are
what the seven arms were declared to show.

Layer: protocols.
"""

from collections.abc import Mapping
import dataclasses
import itertools
from typing import Any

import numpy as np

from moejax.numerics.packed import alignment
from moejax.numerics.packed import oracle
from moejax.numerics.packed import planner
from moejax.protocols.route_block import checks
from moejax.protocols.route_block import record as record_lib
from moejax.protocols.route_block import request as request_lib


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
  """The one outcome of an arm on a history.

  Attributes:
    blocks: The plan.
    grid: Thread blocks.
    surfaces: Of any replicate; all are equal.
    stages: {surface: SHA-256}.
  """

  blocks: alignment.RouteBlocks
  grid: int
  surfaces: oracle.Surfaces
  stages: Mapping[str, str]


Outcomes = Mapping[tuple[str, str], Outcome]  # By (arm, history).


def consequences(
    request: request_lib.StudyRequest, outcomes: Outcomes
) -> None:
  """Checks that no two outcomes differ where the planner forbids it.

  W13 [route, column]: where the cuts of the route's tile differ. Activation:
  where the gate or the up column differs. Routed W2: all columns of a route
  whose activation differs, else where the cuts differ. Final [token, column]:
  where a slot's routed W2 differs.

  Raises:
    Rejected: a difference lies elsewhere.
  """
  numbers = {}
  cuts = {
      key: {
          name: _cuts(o.blocks, plan, numbers)
          for name, plan in record_lib.schedules(
              request, o.blocks, o.grid
          ).items()
      }
      for key, o in outcomes.items()
  }
  for one, other in itertools.combinations(outcomes, 2):
    found = differs(outcomes[one], outcomes[other])
    may = _may_differ(
        request, {g: cuts[one][g] != cuts[other][g] for g in ("w13", "w2")},
        found,
    )
    for name, mask in found.items():
      places = np.argwhere(mask & ~may[name])
      if len(places):
        raise checks.Rejected(
            "consequences",
            f"{' '.join(one)} and {' '.join(other)}: {name} differs in"
            f" {len(places)} elements that the planner leaves alone, first"
            f" {places[0].tolist()}.",
        )


def relations(outcomes: Outcomes) -> None:
  """Checks what each arm was declared to show.

  Raises:
    Rejected: an arm shows something else.
  """
  native = {h: outcomes["native", h] for h in request_lib.HISTORIES}
  first, second = native.values()
  for name in record_lib.SURFACES:
    if first.stages[name] == second.stages[name]:
      _fail("native", f"{name} is the same on both histories.")
  for history, own in native.items():
    other = second if own is first else first
    for arm, wanted in (
        ("own_plan", own),
        ("other_plan", other),
        ("swap_inside", own),
        ("exchange_across", other),
    ):
      found = outcomes[arm, history]
      for name in record_lib.SURFACES:
        if found.stages[name] != wanted.stages[name]:
          _fail(
              arm,
              f"{history}: {name} is not that of native"
              f" {'H0' if wanted is first else 'H1'}.",
          )
  if len({o.stages["w13"] for o in _arm(outcomes, "other_grid")}) != 1:
    _fail("other_grid", "W13 differs between the histories.")
  stable = _arm(outcomes, "stable")
  if stable[0].blocks.identity() != stable[1].blocks.identity():
    _fail("stable", "the histories have two plans.")
  if stable[0].stages != stable[1].stages:
    _fail("stable", "the histories have two trajectories.")
  if stable[0].stages in (first.stages, second.stages):
    _fail("stable", "no third trajectory, but that of a native history.")


def counts(outcomes: Outcomes) -> list[dict[str, Any]]:
  """Returns what differs between the distinct trajectories, row by row."""
  pairs = (
      (("native", "H0"), ("native", "H1")),
      (("stable", "H0"), ("native", "H0")),
      (("stable", "H0"), ("native", "H1")),
      (("other_grid", "H0"), ("other_grid", "H1")),
      (("other_grid", "H0"), ("native", "H0")),
  )
  rows = []
  for one, other in pairs:
    masks = differs(outcomes[one], outcomes[other])
    for name, mask in masks.items():
      a, b = (
          getattr(outcomes[key].surfaces, name).astype(np.float64)
          for key in (one, other)
      )
      rows.append({
          "one": " ".join(one),
          "other": " ".join(other),
          "surface": name,
          "elements": int(mask.sum()),
          "of": mask.size,
          "rows": np.flatnonzero(mask.any(axis=1)).tolist(),
          "max_abs": float(np.abs(a - b)[mask].max(initial=0.0)),
      })
  return rows


def moved_routes(
    one: alignment.RouteBlocks, other: alignment.RouteBlocks
) -> list[int]:
  """Returns the routes that two plans put into different blocks, ascending."""
  return np.flatnonzero(_block_of(one) != _block_of(other)).tolist()


def differs(one: Outcome, other: Outcome) -> dict[str, np.ndarray]:
  """Returns {surface: where its bits differ}."""
  return {
      name: a.view(np.uint16) != b.view(np.uint16)
      for name, a, b in zip(
          record_lib.SURFACES, one.surfaces, other.surfaces, strict=True
      )
  }


def _may_differ(request, cuts, found) -> dict[str, np.ndarray]:
  """{surface: where it may differ}; `cuts` are [route, n tile] masks."""
  columns = {g: np.repeat(m, request.thread_n, axis=1) for g, m in cuts.items()}
  gate, up = np.split(found["w13"], 2, axis=1)
  changed = found["activation"].any(axis=1, keepdims=True)
  slots = found["routed_w2"].reshape(request.tokens, request.top_k, -1)
  return {
      "w13": columns["w13"],
      "activation": gate | up,
      "routed_w2": columns["w2"] | changed,
      "final": slots.any(axis=1),
  }


def _cuts(
    blocks: alignment.RouteBlocks, work: planner.Plan, numbers: dict
) -> np.ndarray:
  """[route, n tile]: which cuts, numbered as they are first met."""
  by_block = np.array([
      [
          numbers.setdefault(planner.cuts(pieces), len(numbers))
          for pieces in work.block(b)
      ]
      for b in range(work.num_blocks)
  ])
  return by_block[_block_of(blocks)]


def _block_of(blocks: alignment.RouteBlocks) -> np.ndarray:
  found = np.full(blocks.num_routes, -1)
  for block in range(blocks.num_blocks):
    found[blocks.routes(block)] = block
  return found


def _arm(outcomes, arm: str) -> list[Outcome]:
  return [outcomes[arm, history] for history in request_lib.HISTORIES]


def _fail(arm: str, detail: str):
  raise checks.Rejected("relation", f"{arm}: {detail}")
