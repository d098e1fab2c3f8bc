"""Which row of the grouped buffer each (token, slot) gets.

Slots with one expert become neighbouring rows, experts ascend, and inside one
expert the rows ascend in token * top_k + slot, so that a sum over rows has one
order. A slot whose id is the number of experts has no expert; such slots come
last and count as no rows.

Layer: numerics. Integers only.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BLOCK_IDS = 128  # Of the order that `reserved_order` imitates.


class RowPlan(NamedTuple):
  """Where rows lie; made once, given to forward and backward alike.

  Attributes:
    pos: [token, slot] int32, the row of each slot.
    slot_of_row: [row] int32, token * top_k + slot of each row; the number of
      slots where a row has none. A slot has a row if that row has the slot.
    counts: [expert] int32, rows of each expert.
    ends: [expert] int32, inclusive cumulative sum of `counts`.
  """

  pos: jax.Array
  slot_of_row: jax.Array
  counts: jax.Array
  ends: jax.Array


def expert_histogram(ids: jax.Array, num_experts: int) -> jax.Array:
  """Returns how many slots each expert has: [expert] int32.

  Args:
    ids: Any shape of int32. What is no expert counts nowhere; whether it is
      legal is the business of `checks.check_ids`.
    num_experts: E.
  """
  bins = jnp.zeros((num_experts + 1,), jnp.int32)
  return bins.at[_known(ids, num_experts).reshape(-1)].add(1)[:num_experts]


def scatter_index(ids: jax.Array, num_experts: int) -> jax.Array:
  """Returns the row of every slot, stable: ids' shape, int32.

  A permutation of range(ids.size); rows of e lie in [ends[e-1], ends[e]) and
  ascend in the flat index; slots without an expert come last.
  """
  flat = _known(ids, num_experts).reshape(-1)
  return _inverse(jnp.argsort(flat, stable=True)).reshape(ids.shape)


def row_plan(ids: jax.Array, num_experts: int) -> RowPlan:
  """Returns the plan of ids [token, slot] int32, with a row for every slot."""
  return of_positions(
      scatter_index(ids, num_experts), expert_histogram(ids, num_experts)
  )


def of_positions(pos: jax.Array, counts: jax.Array) -> RowPlan:
  """Returns the plan with given rows: a bijection, grouped by expert."""
  ends = jnp.cumsum(counts, dtype=jnp.int32)
  slots = _inverse(pos.reshape(-1))
  if pos.size:
    rows = jnp.arange(pos.size, dtype=jnp.int32)
    slots = jnp.where(rows < ends[-1], slots, jnp.int32(pos.size))
  return RowPlan(pos, slots, counts, ends)


def expert_histogram_oracle(ids: np.ndarray, num_experts: int) -> np.ndarray:
  """The definition: one count at a time."""
  counts = np.zeros(num_experts, np.int32)
  for expert in np.asarray(ids).reshape(-1).tolist():
    if 0 <= expert < num_experts:
      counts[expert] += 1
  return counts


def scatter_index_oracle(ids: np.ndarray, num_experts: int) -> np.ndarray:
  """The definition: the next free row of the slot's expert, slot by slot."""
  counts = expert_histogram_oracle(ids, num_experts)
  free = [0, *np.cumsum(counts).tolist()]
  pos = np.zeros(ids.size, np.int32)
  for slot, expert in enumerate(ids.reshape(-1).tolist()):
    group = expert if 0 <= expert < num_experts else num_experts
    pos[slot] = free[group]
    free[group] += 1
  return pos.reshape(ids.shape)


def reserved_order(
    ids: np.ndarray, num_experts: int, blocks: list[int]
) -> np.ndarray:
  """Returns rows as blocks that race for space would give them.

  Each block of 128 flat ids reserves, for every expert, a range counted down
  from the end of the expert's rows, and keeps its own order inside. Grouped
  and a bijection, but not stable; which block comes first is the machine's
  choice. A comparator: nothing here computes with it.

  Args:
    ids: [token, slot] int, each in range(num_experts).
    num_experts: E.
    blocks: The blocks in the order in which they reserve.

  Source: the specification of VeOmni's moe_index_compute.
  """
  flat = np.asarray(ids).reshape(-1)
  free = np.cumsum(expert_histogram_oracle(flat, num_experts)).tolist()
  pos = np.zeros(flat.size, np.int32)
  for block in blocks:
    slots = range(
        block * BLOCK_IDS, min((block + 1) * BLOCK_IDS, flat.size)
    )
    for expert in range(num_experts):
      mine = [slot for slot in slots if flat[slot] == expert]
      free[expert] -= len(mine)
      pos[mine] = np.arange(free[expert], free[expert] + len(mine))
  return pos.reshape(np.shape(ids))


def _known(ids, num_experts: int):
  """Ids with everything that is no expert as `num_experts`."""
  known = (ids >= 0) & (ids < num_experts)
  return jnp.where(known, ids, num_experts).astype(jnp.int32)


def _inverse(order):
  """The inverse permutation, int32."""
  ranks = jnp.arange(order.shape[0], dtype=jnp.int32)
  return jnp.zeros(order.shape, jnp.int32).at[order].set(
      ranks, unique_indices=True
  )
