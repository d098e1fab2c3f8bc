"""Which routes share a block: the alignment plan of a routed batch.

A packed GEMM works on blocks of `block_rows` routes of one expert. Route
r = token * top_k + slot. Each expert's routes fill as many blocks as they need,
the last one padded with the sentinel `num_routes`; experts ascend. Counts,
starts and block experts follow from the routing. The order inside an expert
does not: a kernel that hands out slots by atomics may return any, and an order
that carries a route into another block may change its bits. So the plan's
identity is its membership: which routes, as a set, each block holds.

Layer: numerics.
"""

from collections.abc import Mapping
import dataclasses
import hashlib
import math

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class RouteBlocks:
  """An alignment plan. Valid by construction: a partition of the routes.

  Attributes:
    sorted_routes: [block, row] int32 route ids; `num_routes` is padding, and
      stands only behind a block's routes.
    block_experts: [block] int32, ascending.
    num_routes: tokens * top_k.
  """

  sorted_routes: np.ndarray
  block_experts: np.ndarray
  num_routes: int

  @property
  def num_blocks(self) -> int:
    """Active blocks."""
    return len(self.block_experts)

  @property
  def block_rows(self) -> int:
    """Rows of a block."""
    return self.sorted_routes.shape[1]

  @property
  def padded_length(self) -> int:
    """Aligned rows, padding included (num_tokens_post_padded)."""
    return self.sorted_routes.size

  def routes(self, block: int) -> np.ndarray:
    """Returns the valid routes of a block in their order."""
    row = self.sorted_routes[block]
    return row[row < self.num_routes]

  def membership(self) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Returns (expert, global block, its routes ascending) of each block."""
    return tuple(
        (int(expert), j, tuple(sorted(map(int, self.routes(j)))))
        for j, expert in enumerate(self.block_experts)
    )

  def identity(self) -> str:
    """Returns the SHA-256 of the membership, "e:j:r0,r1,..." a line."""
    lines = (
        f"{e}:{j}:" + ",".join(map(str, routes))
        for e, j, routes in self.membership()
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()

  def buffers(self, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the kernel's (sorted_token_ids, expert_ids), int32, with tails.

    The tail holds padding and expert -1; a kernel must not read it.
    """
    length = buffer_length(self.num_routes, num_experts, self.block_rows)
    ids = np.full(length, self.num_routes, np.int32)
    ids[: self.padded_length] = self.sorted_routes.reshape(-1)
    experts = np.full(-(-length // self.block_rows), -1, np.int32)
    experts[: self.num_blocks] = self.block_experts
    return ids, experts


def buffer_length(num_routes: int, num_experts: int, block_rows: int) -> int:
  """Returns the length of sorted_token_ids: enough for any routing."""
  length = num_routes + num_experts * (block_rows - 1)
  if num_routes < num_experts:
    length = min(length, num_routes * block_rows)
  return length


def block_rows_for(num_routes: int, num_experts: int) -> int:
  """Returns vLLM's choice: first of 8, 16, 32, 48, 64 filled to under 0.9.

  Raises:
    ValueError: there is no expert.
  """
  if num_experts < 1:
    raise ValueError(f"{num_experts=} leaves nothing to route to.")
  fits = (
      rows for rows in (8, 16, 32, 48)
      if num_routes / num_experts / rows < 0.9
  )
  return next(fits, 64)


def route_blocks(
    expert_ids: np.ndarray,
    num_experts: int,
    block_rows: int,
    expert_map: np.ndarray | None = None,
    orders: Mapping[int, np.ndarray] | None = None,
) -> RouteBlocks:
  """Aligns routes to blocks; inside an expert by ascending route id.

  Args:
    expert_ids: [token, slot] ints in 0..num_experts-1.
    num_experts: Experts of the router.
    block_rows: Rows of a block.
    expert_map: [num_experts] ints, an expert's local id or -1. Routes of an
      expert without one are dropped. Blocks then name local ids.
    orders: {expert (local): its routes in another order}. Any order is a
      legal history of the large path, see `small_path_orders` for the other.

  Raises:
    ValueError: an id, the map or an order does not fit.

  Source: specification of the packed-AWQ MoE, sections 3 and 6.
  """
  ids = np.asarray(expert_ids)
  if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
    raise ValueError(
        f"expert_ids must be [token, slot] ints, got {ids.dtype}{ids.shape}."
    )
  if block_rows < 1:
    raise ValueError(f"{block_rows=} is no number of rows.")
  wrong = np.argwhere((ids < 0) | (ids >= num_experts))
  if wrong.size:
    token, slot = map(int, wrong[0])
    raise ValueError(
        f"expert_ids[{token}, {slot}]={ids[token, slot]} is not in"
        f" 0..{num_experts - 1}."
    )
  local = ids.reshape(-1).astype(np.int64)
  if expert_map is not None:
    local = _checked_map(expert_map, num_experts)[local]
  orders = dict(orders or {})
  rows, experts = [], []
  for expert in sorted(set(local[local >= 0].tolist()) | set(orders)):
    routes = np.flatnonzero(local == expert)
    if expert in orders:
      order = np.asarray(orders[expert])
      if sorted(order.tolist()) != routes.tolist():
        raise ValueError(
            f"orders[{expert}]={order.tolist()} is no order of that expert's"
            f" routes {routes.tolist()}."
        )
      routes = order
    padded = np.full(-(-len(routes) // block_rows) * block_rows, local.size)
    padded[: len(routes)] = routes
    rows.append(padded.reshape(-1, block_rows))
    experts += [expert] * len(rows[-1])
  return RouteBlocks(
      np.concatenate([np.zeros((0, block_rows)), *rows]).astype(np.int32),
      np.array(experts, np.int32),
      local.size,
  )


def from_buffers(
    sorted_token_ids: np.ndarray,
    block_experts: np.ndarray,
    padded_length: int,
    block_rows: int,
    expert_ids: np.ndarray,
    expert_map: np.ndarray | None = None,
) -> RouteBlocks:
  """Reads the plan that a kernel returned, and checks it against the routing.

  Only the first padded_length rows are read.

  Args:
    sorted_token_ids: [row] ints, at least padded_length.
    block_experts: [block] ints.
    padded_length: num_tokens_post_padded.
    block_rows: Rows of a block.
    expert_ids: [token, slot] ints: the routing it was made from.
    expert_map: As in `route_blocks`.

  Raises:
    ValueError: the plan is no partition of the routes, a route lies in another
      expert's block, a pad stands before a route, or the blocks do not ascend.
  """
  local = np.asarray(expert_ids).reshape(-1)
  if expert_map is not None:
    local = _checked_map(expert_map, len(expert_map))[local]
  if padded_length % block_rows:
    raise ValueError(f"{padded_length=} is no multiple of {block_rows=}.")
  rows = np.asarray(sorted_token_ids)[:padded_length].reshape(-1, block_rows)
  experts = np.asarray(block_experts)[: len(rows)]
  if len(experts) != len(rows) or rows.size != padded_length:
    raise ValueError(
        f"{padded_length=} needs more than {rows.size} rows and"
        f" {len(experts)} block experts."
    )
  if (np.diff(experts) < 0).any():
    raise ValueError(f"block experts {experts.tolist()} do not ascend.")
  valid = (rows >= 0) & (rows < local.size)
  foreign = rows[~valid & (rows != local.size)]
  if foreign.size:
    raise ValueError(
        f"{int(foreign[0])} is neither a route of 0..{local.size - 1} nor the"
        f" padding {local.size}."
    )
  if (valid[:, 1:] & ~valid[:, :-1]).any() or not valid.any(axis=1).all():
    raise ValueError("padding stands before a route, or fills a block.")
  want, got = np.flatnonzero(local >= 0), np.sort(rows[valid])
  if not np.array_equal(want, got):
    missing = sorted(set(want.tolist()) - set(got.tolist()))
    raise ValueError(
        f"the plan is no partition of the routes: {got.size} of {want.size}"
        f" routes, missing {missing[:8]}."
    )
  owner = np.broadcast_to(experts[:, None], rows.shape)[valid]
  wrong = np.flatnonzero(owner != local[rows[valid]])
  if wrong.size:
    route = int(rows[valid][wrong[0]])
    raise ValueError(
        f"route {route} of expert {int(local[route])} lies in a block of"
        f" expert {int(owner[wrong[0]])}."
    )
  return RouteBlocks(
      rows.astype(np.int32), experts.astype(np.int32), local.size
  )


def small_path_orders(
    expert_ids: np.ndarray, num_experts: int
) -> dict[int, np.ndarray]:
  """Returns the deterministic orders of the kernel for few routes.

  Thread t of S = max(num_experts, 32) takes the routes t, t + S, t + 2 S, ...;
  an expert's routes are ordered by thread and then by route id.

  Raises:
    NotImplementedError: that kernel takes under 1,024 routes and at most 64
      experts; with more, the order is any.
  """
  local = np.asarray(expert_ids).reshape(-1)
  if local.size >= 1024 or num_experts > 64:
    raise NotImplementedError(
        f"{local.size} routes to {num_experts} experts take the large path,"
        " whose order is not fixed."
    )
  threads = max(num_experts, 32)
  orders = {}
  for expert in sorted(set(local.tolist())):
    routes = np.flatnonzero(local == expert)
    orders[expert] = routes[np.lexsort((routes, routes % threads))]
  return orders


def num_memberships(plan: RouteBlocks) -> int:
  """Returns how many memberships legal histories can reach, this one included.

  The product over experts of n_e! / product(routes of each of its blocks!).
  """
  sizes = {}
  for expert, _, routes in plan.membership():
    sizes.setdefault(expert, []).append(len(routes))
  return math.prod(
      math.factorial(sum(s)) // math.prod(map(math.factorial, s))
      for s in sizes.values()
  )


def _checked_map(expert_map, num_experts: int) -> np.ndarray:
  local = np.asarray(expert_map)
  if local.shape != (num_experts,) or (local < -1).any():
    raise ValueError(
        f"expert_map must hold {num_experts} local ids or -1, got shape"
        f" {local.shape}, least {local.min(initial=0)}."
    )
  named = local[local >= 0]
  if len(set(named.tolist())) != len(named):
    raise ValueError(f"expert_map names a local id twice: {named.tolist()}.")
  return local
