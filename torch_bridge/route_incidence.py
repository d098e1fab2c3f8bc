"""How many results does one request have, if an alignment kernel plans it?

vLLM's moe_align_block_size hands out the rows of a block by atomics, so the
same request may be planned in another order at each call. Where an expert fills
several blocks, another order can be another membership, and with it other bits.
The same request is run many times over real kernels; distinct orders,
memberships and outputs are counted, then the same under the stable plan.

Layer: torch_bridge.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import collections
import dataclasses
import hashlib
from typing import Any

import numpy as np

from moejax.contracts import document
from moejax.contracts import packed_moe
from moejax.contracts import refusal
from moejax.numerics.packed import alignment
from moejax.protocols import packed_fixture

_SURFACES = ("w13", "final")


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
  """What is counted; a function of these values and of the device's timing.

  Attributes:
    tokens: M of each request.
    calls: Runs of each request, under the kernel's plans and under the stable
      one.
    top_k: Experts of a token.
    shape: Sizes of the layer.
    configuration: (thread_k, thread_n, blocks a multiprocessor).
    num_sms: Multiprocessors of the device.
    dtype: Of the layer.
    seed: Of layer, requests and preludes.
  """

  tokens: tuple[int, ...] = (8, 21, 64, 256)
  calls: int = 1000
  top_k: int = 8
  shape: packed_fixture.LayerShape = packed_fixture.LayerShape()
  configuration: tuple[int, int, int] = (128, 64, 4)
  num_sms: int = 132
  dtype: str = "float16"
  seed: int = 20260722

  def __post_init__(self):
    document.check_types(self)
    if self.calls < 1 or not self.tokens or min(self.tokens) < 1:
      raise refusal.HarnessError(
          f"nothing to count in calls={self.calls}, tokens={self.tokens}."
      )

  @property
  def contract(self) -> packed_moe.PackedMoeContract:
    """The layer's contract."""
    thread_k, thread_n, per_sm = self.configuration
    return packed_moe.marlin(
        dtype=self.dtype,
        thread_k=thread_k,
        thread_n=thread_n,
        grid=per_sm * self.num_sms,
        group_size=self.shape.group_size,
    )


def run(
    request: Request,
    backend: Any,
    preludes: Mapping[str, Callable[[np.random.Generator], None]],
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> list[dict]:
  """Counts; the backend has its layer loaded.

  Args:
    request: What to count.
    backend: `align` and `surfaces` as in `awq_bits.Backend`.
    preludes: {name: what is done in front of every call}.
    progress: Called as (stage, calls done, of how many).

  Returns:
    One entry for each M and prelude: distinct orders, memberships and outputs
    under the kernel's plans, the share of the most frequent output, how many
    memberships the routing allows, and distinct outputs under the stable plan.
  """
  return [
      _count(request, backend, tokens, name, prelude, progress)
      for tokens in request.tokens
      for name, prelude in preludes.items()
  ]


def _count(request, backend, tokens, name, prelude, progress) -> dict:
  inputs = packed_fixture.request(
      request.seed, tokens, request.top_k, request.shape, request.dtype
  )
  experts = request.shape.experts
  rows = alignment.block_rows_for(inputs.expert_ids.size, experts)
  stable = alignment.route_blocks(inputs.expert_ids, experts, rows)

  def align():
    return backend.align(inputs.expert_ids, experts, rows)

  found = {}
  for kind, plan in (("kernel", align), ("stable", lambda: stable)):
    seen = {key: collections.Counter() for key in _KEYS}
    rng = np.random.default_rng([request.seed, tokens])
    for call in range(request.calls):
      prelude(rng)
      blocks = plan()
      surfaces = backend.surfaces(inputs, blocks, request.contract)
      for key, value in _keys(blocks, surfaces).items():
        seen[key][value] += 1
      if (call + 1) % 100 == 0 or call + 1 == request.calls:
        progress(
            f"M = {tokens}, prelude {name}, {kind} plan",
            call + 1,
            request.calls,
        )
    found[kind] = seen
  outputs = found["kernel"]["final"]
  return {
      "tokens": tokens,
      "prelude": name,
      "calls": request.calls,
      "block_rows": rows,
      "blocks": stable.num_blocks,
      "experts_with_several_blocks": int(
          (np.unique(stable.block_experts, return_counts=True)[1] > 1).sum()
      ),
      "legal_memberships": str(alignment.num_memberships(stable)),
      "kernel": {key: len(counts) for key, counts in found["kernel"].items()},
      "most_frequent_output": max(outputs.values()) / request.calls,
      "stable": {key: len(counts) for key, counts in found["stable"].items()},
  }


_KEYS = ("orders", "memberships", *_SURFACES)


def _keys(blocks: alignment.RouteBlocks, surfaces) -> dict[str, bytes]:
  """What of a call is told apart, by its bits."""
  return {
      "orders": blocks.sorted_routes.tobytes(),
      "memberships": repr(blocks.membership()).encode(),
      **{
          name: hashlib.sha256(
              np.ascontiguousarray(getattr(surfaces, name)).tobytes()
          ).digest()
          for name in _SURFACES
      },
  }


def removed(entries: Sequence[dict]) -> dict[str, int]:
  """Summary: requests with several outputs, and for how many one remains."""
  several = [e for e in entries if e["kernel"]["final"] > 1]
  return {
      "cells": len(entries),
      "with_several_outputs": len(several),
      "of_these_one_under_the_stable_plan": sum(
          e["stable"]["final"] == 1 for e in several
      ),
      "with_several_outputs_under_the_stable_plan": sum(
          e["stable"]["final"] > 1 for e in entries
      ),
  }
