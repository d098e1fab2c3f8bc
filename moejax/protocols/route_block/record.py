"""What a study notes of one cell, and how it is computed from the plan.

Layer: protocols.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import numpy as np

from moejax.contracts import document
from moejax.numerics import fingerprint
from moejax.numerics.packed import alignment
from moejax.numerics.packed import oracle
from moejax.numerics.packed import planner
from moejax.protocols.route_block import request as request_lib

SURFACES = oracle.Surfaces._fields


@dataclasses.dataclass(frozen=True, slots=True)
class CellRecord:
  """One line of cells.jsonl.

  Attributes:
    cell: The cell's id.
    treatment: What was declared, see `arms.treatment`.
    grid: Thread blocks that the backend was given.
    block_experts: [block] expert of each block of the plan that was run.
    sorted_routes: [block][row] route ids, padding included.
    membership: [block] (expert, block, routes ascending).
    membership_digest: `RouteBlocks.identity`.
    contract: Digest of the layer's contract.
    schedule: {"w13", "w2": `planner.digest`}.
    stages: {surface: SHA-256 of its bytes}.
    file_sha256: Of the file with the raw tensors.
    source: Digest of the source files.
    binary: Digest of the binary identity.
  """

  cell: str
  treatment: dict
  grid: int
  block_experts: tuple
  sorted_routes: tuple
  membership: tuple
  membership_digest: str
  contract: str
  schedule: dict
  stages: dict
  file_sha256: str
  source: str
  binary: str

  def __post_init__(self):
    document.check_types(self)
    for name in ("treatment", "schedule", "stages"):
      if not isinstance(getattr(self, name), dict):
        raise ValueError(f"CellRecord: {name} is no object.")
    for name in ("block_experts", "sorted_routes", "membership"):
      if not isinstance(getattr(self, name), tuple):
        raise ValueError(f"CellRecord: {name} is no list.")


def of_plan(
    request: request_lib.StudyRequest,
    blocks: alignment.RouteBlocks,
    grid: int,
) -> dict[str, Any]:
  """Returns the fields of a record that follow from a plan and a grid."""
  return {
      "grid": grid,
      "block_experts": tuple(blocks.block_experts.tolist()),
      "sorted_routes": tuple(map(tuple, blocks.sorted_routes.tolist())),
      "membership": blocks.membership(),
      "membership_digest": blocks.identity(),
      "contract": document.digest(request.contract(grid)),
      "schedule": {
          name: planner.digest(work.tiles)
          for name, work in schedules(request, blocks, grid).items()
      },
  }


def schedules(
    request: request_lib.StudyRequest,
    blocks: alignment.RouteBlocks,
    grid: int,
) -> dict[str, planner.Plan]:
  """Returns the planned work of both GEMMs, {"w13", "w2"}."""
  contract, shape = request.contract(grid), request.shape
  return {
      "w13": planner.plan(
          blocks.num_blocks, 2 * shape.hidden, shape.embed, contract.w13
      ),
      "w2": planner.plan(
          blocks.num_blocks, shape.embed, shape.hidden, contract.w2
      ),
  }


def stages(surfaces: Mapping[str, np.ndarray]) -> dict[str, str]:
  """Returns {surface: SHA-256 of its bytes, row-major, little-endian}."""
  return {
      name: fingerprint.payload_digest(surfaces[name]) for name in SURFACES
  }


def shapes(request: request_lib.StudyRequest) -> dict[str, tuple[int, int]]:
  """Returns {surface: its shape}."""
  routes, shape = request.tokens * request.top_k, request.shape
  return {
      "w13": (routes, 2 * shape.hidden),
      "activation": (routes, shape.hidden),
      "routed_w2": (routes, shape.embed),
      "final": (request.tokens, shape.embed),
  }
