"""The expert MLP with experts on several devices, in the bits of one device.

Device d holds experts [d E_l, (d + 1) E_l) and a part of the tokens, in order.
Every slot becomes a row of its own and travels to its expert's device, twice if
a token has the expert twice; an expert sees its rows in the order of
(device, token, slot), which is that of one device. Each device adds the slots
of its tokens in slot order. No sum depends on which rows arrive together.

Buffers have room for the worst case, all slots of a device to one other: what
moves is then `devices` times what is used. Sizes are static.

Layer: numerics. Contract: contracts/grouped_mlp.py.
"""

import jax
from jax import lax
import jax.numpy as jnp

from moejax.contracts import grouped_mlp
from moejax.numerics.grouped import mlp
from moejax.numerics.grouped import row_moves
from moejax.numerics.grouped import row_plan


def moe_mlp(
    x: jax.Array,
    gates: jax.Array,
    gate_up: mlp.Fc1,
    down: jax.Array,
    ids: jax.Array,
    contract: grouped_mlp.GroupedMlpContract,
    axis_name: str,
) -> jax.Array:
  """`mlp.moe_mlp` inside `jax.shard_map`: tokens and experts are split.

  Args:
    x: [token of this device, embed].
    gates: [token, slot] of the same tokens.
    gate_up: Of the experts of this device.
    down: Likewise; every device has as many.
    ids: [token, slot] int32, over all experts; their number says "no expert".
    contract: Every field matters. With a declared chain, y and every gradient
      have the bits of one device.
    axis_name: The mesh axis over which both are split.

  Returns:
    [token of this device, embed].
  """
  devices, local = lax.axis_size(axis_name), down.shape[0]
  plan = dispatch_plan(ids, devices, local)
  owner = jnp.concatenate(
      [(ids % local).reshape(-1), jnp.full((1,), local, ids.dtype)]
  )

  def exchange(rows):
    parts = rows.reshape(devices, -1, *rows.shape[1:])
    return lax.all_to_all(parts, axis_name, 0, 0).reshape(rows.shape)

  out = mlp.moe_mlp(
      exchange(row_moves.moe_scatter(x, plan)),
      exchange(row_moves.moe_gate_rows(gates, plan))[:, None],
      gate_up,
      down,
      exchange(owner[plan.slot_of_row])[:, None],
      contract,
  )
  return row_moves.moe_gather(exchange(out), plan)


def dispatch_plan(
    ids: jax.Array, devices: int, local: int
) -> row_plan.RowPlan:
  """Returns the send buffer of one device, as rows.

  Args:
    ids: [token, slot] int32 over devices * local experts.
    devices: Devices.
    local: Experts of each.

  Returns:
    A plan of devices * ids.size rows: block d goes to device d and holds its
    slots in flat order, then nothing. `counts` are the rows sent to each.
  """
  device = jnp.where(
      (ids >= 0) & (ids < devices * local), ids // local, devices
  )
  counts = row_plan.expert_histogram(device, devices)
  ends = jnp.cumsum(counts, dtype=jnp.int32)
  rank = row_plan.scatter_index(device, devices) - jnp.take(
      ends - counts, device, mode="clip"
  )
  room = ids.size
  pos = jnp.where(device < devices, device * room + rank, devices * room)
  slots = jnp.full((devices * room,), room, jnp.int32)
  slots = slots.at[pos.reshape(-1)].set(
      jnp.arange(room, dtype=jnp.int32), mode="drop"
  )
  return row_plan.RowPlan(pos, slots, counts, ends)
