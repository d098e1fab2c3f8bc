"""The fixture of a route-block study: routes, two histories, two route pairs.

One expert owns two neighbouring blocks of given ordinals. A few experts with
small numbers own two blocks as well; all others own one. The two histories
order each expert's routes differently, and exchange chosen pairs of routes
between the two blocks of an expert: one pair of the studied expert, the others
where the planner cuts both blocks alike.

Layer: protocols.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from moejax.contracts import refusal
from moejax.numerics import fingerprint
from moejax.numerics.packed import alignment
from moejax.numerics.packed import awq_format
from moejax.protocols import packed_fixture
from moejax.protocols.route_block import request as request_lib


@dataclasses.dataclass(frozen=True, eq=False)
class Fixture:
  """What every cell of a study shares.

  Attributes:
    inputs: Activations, routes and gates.
    histories: {"H0", "H1": the alignment plan of that history}.
    exchanged: (r, r'): a route of the studied expert's first block and one of
      its second block on H0; the other way round on H1.
    swapped: Two routes of its first block on both histories.
  """

  inputs: packed_fixture.Request
  histories: dict[str, alignment.RouteBlocks]
  exchanged: tuple[int, int]
  swapped: tuple[int, int]


def make(request: request_lib.StudyRequest) -> Fixture:
  """Makes the fixture of a request.

  Raises:
    HarnessError: no routing has the structure that the request names.
  """
  rng = np.random.default_rng([request.seed, 106])
  counts = _counts(request, rng)
  inputs = dataclasses.replace(
      packed_fixture.request(
          request.seed, request.tokens, request.top_k, request.shape,
          request.dtype,
      ),
      expert_ids=_routing(request, counts, rng),
  )
  stable = _aligned(request, inputs.expert_ids, {})
  first, second = request.first_block, request.first_block + 1
  while True:
    h0, h1, exchanged = _histories(request, inputs.expert_ids, rng)
    plans = [_aligned(request, inputs.expert_ids, h) for h in (h0, h1)]
    studied = {p.membership()[first][2] for p in (*plans, stable)}
    if len(studied) == 3:  # Neither history is the stable plan there.
      break
  for plan in plans:
    owners = plan.block_experts[[first, second]].tolist()
    if plan.num_blocks != request.num_blocks or owners != (
        [request.split_expert] * 2
    ):
      raise RuntimeError(f"fixture: {plan.num_blocks} blocks, {owners=}.")
  both = sorted(
      set(plans[0].routes(first).tolist())
      & set(plans[1].routes(first).tolist())
  )
  swapped = tuple(map(int, rng.choice(both, 2, replace=False)))
  return Fixture(
      inputs, dict(zip(request_lib.HISTORIES, plans, strict=True)), exchanged,
      swapped,
  )


def weights_digest(
    w13: Sequence[awq_format.PackedOperand],
    w2: Sequence[awq_format.PackedOperand],
) -> str:
  """Returns one digest of all codes, zero points and scales of a layer."""
  parts = [
      (f"{name}/{expert}/{part}",
       fingerprint.fingerprint(getattr(operand, part), part))
      for name, operands in (("w13", w13), ("w2", w2))
      for expert, operand in enumerate(operands)
      for part in ("codes", "zeros", "scales")
  ]
  return fingerprint.composite("packed_layer", parts)


def _aligned(request, expert_ids, orders) -> alignment.RouteBlocks:
  return alignment.route_blocks(
      expert_ids, request.shape.experts, request.block_rows, orders=orders
  )


def _counts(request, rng) -> dict[int, int]:
  """{expert: its routes}: two blocks for some, one for the others."""
  rows, others = request.block_rows, request.other_experts
  two_blocks = rows + rows // 2
  below = request.first_block - others
  above = request.num_blocks - request.first_block - 2
  limit = request.low_blocks - others
  routes = request.tokens * request.top_k
  rest = routes - (others + 1) * two_blocks
  ones = below - others + above
  if (
      rows < 4
      or two_blocks > request.tokens
      or min(below - others, above, limit - others) < 0
      or request.split_expert >= request.shape.experts
      or below > request.split_expert
      or above > request.shape.experts - request.split_expert - 1
      or not ones <= rest <= ones * min(rows, request.tokens)
      or request.moved_pairs - 1 > others * (rows // 2)
      or (request.moved_pairs > 1 and not others)
  ):
    raise refusal.HarnessError(
        f"no fixture: {routes} routes of {request.tokens} tokens in"
        f" {request.num_blocks} blocks of {rows} rows, {others + 1} experts of"
        f" {two_blocks} routes, expert {request.split_expert} of"
        f" {request.shape.experts} at block {request.first_block},"
        f" low_blocks={request.low_blocks}, moved_pairs="
        f"{request.moved_pairs}."
    )
  lower = sorted(_choose(rng, range(request.split_expert), below))
  upper = _choose(
      rng, range(request.split_expert + 1, request.shape.experts), above
  )
  doubles = _choose(rng, lower[:limit], others)
  counts = dict.fromkeys((*lower, *upper), 1)
  singles = sorted(set(counts) - set(doubles))
  for _ in range(rest - ones):
    most = min(rows, request.tokens)
    counts[int(rng.choice([e for e in singles if counts[e] < most]))] += 1
  for expert in (*doubles, request.split_expert):
    counts[expert] = two_blocks
  return counts


def _choose(rng, values, number: int) -> list[int]:
  return [int(v) for v in rng.choice(list(values), number, replace=False)] if (
      number
  ) else []


def _routing(request, counts, rng) -> np.ndarray:
  """[token, slot]: experts with the given counts, distinct in a token.

  The largest expert first, each to the tokens with most free slots: that finds
  a routing whenever there is one (Gale and Ryser).
  """
  free = np.full(request.tokens, request.top_k)
  chosen = [[] for _ in range(request.tokens)]
  for expert in sorted(counts, key=lambda e: (-counts[e], e)):
    order = np.lexsort((rng.random(request.tokens), -free))
    for token in order[: counts[expert]]:
      chosen[token].append(expert)
      free[token] -= 1
  if free.any():
    raise refusal.HarnessError(
        f"no fixture: {request.tokens} tokens of {request.top_k} slots cannot"
        f" hold experts of {sorted(counts.values())} routes."
    )
  return np.array([rng.permutation(row) for row in chosen], np.int64)


def _histories(request, expert_ids, rng):
  """Two orders of each expert's routes, and the studied expert's pair."""
  flat, rows = expert_ids.reshape(-1), request.block_rows
  first = {
      int(e): rng.permutation(np.flatnonzero(flat == e))
      for e in np.unique(flat)
  }
  doubles = [
      e for e, r in first.items()
      if len(r) > rows and e != request.split_expert
  ]
  pairs = {request.split_expert: 1}
  for number in range(request.moved_pairs - 1):
    expert = doubles[number % len(doubles)]
    pairs[expert] = pairs.get(expert, 0) + 1
  second, exchanged = {}, None
  for expert, order in first.items():
    other = order.copy()
    for i in range(pairs.get(expert, 0)):
      other[[i, rows + i]] = other[[rows + i, i]]
    if expert == request.split_expert:
      exchanged = int(order[0]), int(order[rows])
    second[expert] = np.concatenate([
        rng.permutation(other[start : start + rows])
        for start in range(0, len(other), rows)
    ])
  return first, second, exchanged
