"""A plan as the integers that the kernels read.

The planner (`numerics/packed/planner.py`) says which K-tiles of which output
tile belong together. A piece is one program of the GEMM and has one slot of the
partials buffer, in the planner's order; an output tile owns consecutive slots,
ascending in K. Padding keeps the number of array shapes small; a padding piece
has no K-tile.

Layer: pallas_kernels.
"""

from typing import NamedTuple

import numpy as np

from moejax.contracts import packed_gemm
from moejax.numerics.packed import alignment
from moejax.numerics.packed import planner
from pallas_kernels import launch

# Rows of a tensor core's tile that a route block is padded to.
LEAST_ROWS = 16


class WorkList(NamedTuple):
  """The planned work of one GEMM.

  Attributes:
    pieces: [piece, 4] int32: block, n tile, first K-tile, K-tiles.
    tiles: [tile, 2] int32: first slot of the partials, number of slots; tile =
      block * num_n_tiles + n_tile.
    block_experts: [block] int32.
    block_rows: [block, row] int32: the row of x that a route reads. The row
      axis is a power of two; rows without a route repeat row 0 of x.
    places: [route] int32: block * rows + row of the route, or -1 for a route
      in no block; padding routes are in none.
  """

  pieces: np.ndarray
  tiles: np.ndarray
  block_experts: np.ndarray
  block_rows: np.ndarray
  places: np.ndarray


def work_list(
    blocks: alignment.RouteBlocks,
    n: int,
    k: int,
    per_row: int,
    contract: packed_gemm.PackedGemmContract,
    num_places: int,
) -> WorkList:
  """Returns the work of a GEMM, padded.

  Args:
    blocks: The alignment plan.
    n: Columns.
    k: Rows of the weight.
    per_row: Routes that read the same row of x: top_k (W13) or 1 (W2).
    contract: What the planner needs.
    num_places: Routes of the output; at least those of the plan.

  Raises:
    ValueError: a size does not divide.
  """
  plan = planner.plan(blocks.num_blocks, n, k, contract)
  counts = [len(pieces) for pieces in plan.tiles]
  flat = [
      (*divmod(tile, plan.num_n_tiles), piece.k_start, piece.k_len)
      for tile, pieces in enumerate(plan.tiles)
      for piece in pieces
  ]
  pieces = np.zeros((launch.padded(len(flat), 64), 4), np.int32)
  pieces[: len(flat)] = np.array(flat, np.int32).reshape(-1, 4)
  num_blocks = launch.padded(blocks.num_blocks, 4)
  tiles = np.zeros((num_blocks * plan.num_n_tiles, 2), np.int32)
  tiles[: len(counts), 0] = np.cumsum([0, *counts])[:-1]
  tiles[: len(counts), 1] = counts
  experts = np.zeros(num_blocks, np.int32)
  experts[: blocks.num_blocks] = blocks.block_experts
  rows = max(1 << (blocks.block_rows - 1).bit_length(), LEAST_ROWS)
  routes = np.full((num_blocks, rows), blocks.num_routes, np.int64)
  routes[: blocks.num_blocks, : blocks.block_rows] = blocks.sorted_routes
  valid = routes < blocks.num_routes
  places = np.full(num_places, -1, np.int32)
  places[routes[valid]] = np.flatnonzero(valid)
  block_rows = np.where(valid, routes // per_row, 0).astype(np.int32)
  return WorkList(pieces, tiles, experts, block_rows, places)
