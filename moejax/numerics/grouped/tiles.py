"""The tiles of a grouped GEMM: which rows of which expert a program owns.

Two ways to make them. A flattened list holds exactly the tiles that exist; its
length is static and needs no bound per expert:

  L = floor((R + min(E, R) (BM - 1)) / BM) >= sum over e of ceil(n_e / BM)

A launch grid has ceil(max_M / BM) programs for every expert. If that is too few
for one of them, its last rows belong to no program, and memory keeps what it
held. The grid is here to show exactly that.

Layer: numerics. Integers only.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.contracts import grouped_mlp
from moejax.numerics.grouped import row_plan


class Tiles(NamedTuple):
  """Tiles; those without rows have first == end.

  Attributes:
    expert: [tile] int32.
    first: [tile] int32, the first row.
    end: [tile] int32, behind the last row: at most first + block_rows.
  """

  expert: jax.Array
  first: jax.Array
  end: jax.Array


def list_length(rows: int, num_experts: int, block_rows: int) -> int:
  """Returns L: tiles that suffice for every distribution of the rows."""
  return (rows + min(num_experts, rows) * (block_rows - 1)) // block_rows


def flattened(plan: row_plan.RowPlan, block_rows: int) -> Tiles:
  """Returns the list of all tiles, experts and rows ascending."""
  num_experts = plan.counts.shape[0]
  length = list_length(plan.slot_of_row.shape[0], num_experts, block_rows)
  per_expert = (plan.counts + jnp.int32(block_rows - 1)) // block_rows
  ends = jnp.cumsum(per_expert, dtype=jnp.int32)
  number = jnp.arange(length, dtype=jnp.int32)
  expert = jnp.searchsorted(ends, number, side="right").astype(jnp.int32)
  expert = jnp.minimum(expert, jnp.int32(num_experts - 1))
  block = number - (ends - per_expert)[expert]
  return _tiles(plan, expert, block, block_rows)


def launch_grid(
    plan: row_plan.RowPlan, max_rows: int, block_rows: int
) -> Tiles:
  """Returns the tiles of a grid of ceil(max_rows / block_rows) an expert."""
  shape = (plan.counts.shape[0], -(-max_rows // block_rows))
  expert, block = (
      jnp.broadcast_to(
          jnp.arange(shape[axis], dtype=jnp.int32).reshape(
              (-1, 1) if axis == 0 else (1, -1)
          ),
          shape,
      ).reshape(-1)
      for axis in (0, 1)
  )
  return _tiles(plan, expert, block, block_rows)


def of_contract(
    plan: row_plan.RowPlan, contract: grouped_mlp.GroupGemmContract
) -> Tiles:
  """Returns the tiles that a contract's bound launches."""
  reach = contract.reach(plan.slot_of_row.shape[0], plan.pos.shape[0])
  if reach is None:
    return flattened(plan, contract.block_rows)
  return launch_grid(plan, reach, contract.block_rows)


def written_rows(
    plan: row_plan.RowPlan, contract: grouped_mlp.GroupGemmContract
) -> jax.Array:
  """Returns rows that a launch reaches, by expert: [expert] int32.

  min(n_e, ceil(max_M / BM) BM).
  """
  reach = contract.reach(plan.slot_of_row.shape[0], plan.pos.shape[0])
  if reach is None:
    return plan.counts
  block = contract.block_rows
  return jnp.minimum(plan.counts, jnp.int32(-(-reach // block) * block))


def coverage(tiles: Tiles, rows: int, block_rows: int) -> jax.Array:
  """Returns how often each row is written: [row] int32."""
  index, inside = tile_rows(tiles, block_rows)
  index = jnp.where(inside, index, jnp.int32(rows))
  return jnp.zeros((rows,), jnp.int32).at[index.reshape(-1)].add(
      1, mode="drop"
  )


def tile_rows(tiles: Tiles, block_rows: int) -> tuple[jax.Array, jax.Array]:
  """Returns the rows of each tile and which of them are its own.

  Both [tile, block_rows]: int32 and bool.
  """
  index = tiles.first[:, None] + jnp.arange(block_rows, dtype=jnp.int32)
  return index, index < tiles.end[:, None]


def _tiles(plan, expert, block, block_rows: int) -> Tiles:
  end = plan.ends[expert]
  first = jnp.minimum(end - plan.counts[expert] + block * block_rows, end)
  return Tiles(expert, first, jnp.minimum(first + block_rows, end))
