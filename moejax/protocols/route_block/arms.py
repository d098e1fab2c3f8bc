"""The seven arms of a study: which plan and which grid a cell runs.

  native           the history's own plan
  own_plan         the same plan, injected through the kernel's buffers
  other_plan       the other history's plan, injected
  swap_inside      two routes of the studied first block change rows
  exchange_across  one route of each studied block changes place with the other
  other_grid       the history's own plan on the grid that cuts both alike
  stable           routes in ascending order inside each expert

Layer: protocols.
"""

from typing import Any

import numpy as np

from moejax.numerics.packed import alignment
from moejax.protocols.route_block import fixture as fixture_lib
from moejax.protocols.route_block import request as request_lib


def treatment(
    request: request_lib.StudyRequest,
    made: fixture_lib.Fixture,
    cell: request_lib.Cell,
) -> dict[str, Any]:
  """Returns what is declared to be done in a cell, as JSON values.

  Keys: "arm"; "plan_of", the history whose plan is the base, or "stable";
  "injected", whether the plan is given to the backend; "changed_places", the
  two routes that change places, or null; "grid".
  """
  other = next(h for h in request_lib.HISTORIES if h != cell.history)
  pairs = {"swap_inside": made.swapped, "exchange_across": made.exchanged}
  pair = pairs.get(cell.arm)
  return {
      "arm": cell.arm,
      "plan_of": {"other_plan": other, "stable": "stable"}.get(
          cell.arm, cell.history
      ),
      "injected": cell.arm not in ("native", "other_grid"),
      "changed_places": None if pair is None else list(pair),
      "grid": request.other_grid if cell.arm == "other_grid" else request.grid,
  }


def plan(
    request: request_lib.StudyRequest,
    made: fixture_lib.Fixture,
    declared: dict[str, Any],
) -> alignment.RouteBlocks:
  """Returns the plan that a treatment asks for."""
  ids = made.inputs.expert_ids
  if declared["plan_of"] == "stable":
    base = alignment.route_blocks(
        ids, request.shape.experts, request.block_rows
    )
  else:
    base = made.histories[declared["plan_of"]]
  if declared["changed_places"] is not None:
    base = with_places_changed(base, *declared["changed_places"])
  if not declared["injected"]:
    return base
  rows, experts = base.buffers(request.shape.experts)
  return alignment.from_buffers(
      rows, experts, base.padded_length, request.block_rows, ids
  )


def with_places_changed(
    blocks: alignment.RouteBlocks, route: int, other: int
) -> alignment.RouteBlocks:
  """Returns the plan in which two routes stand in each other's place.

  Raises:
    ValueError: a route is not in the plan, or the two belong to two experts.
  """
  rows = blocks.sorted_routes.copy()
  places = [tuple(np.argwhere(rows == r).reshape(-1)) for r in (route, other)]
  if route == other or any(len(place) != 2 for place in places):
    raise ValueError(f"routes {route}, {other} have no two places in the plan.")
  owners = {int(blocks.block_experts[place[0]]) for place in places}
  if len(owners) != 1:
    raise ValueError(f"routes {route}, {other} are of experts {owners}.")
  rows[places[0]], rows[places[1]] = other, route
  return alignment.RouteBlocks(rows, blocks.block_experts, blocks.num_routes)
