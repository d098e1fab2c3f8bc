"""A packed expert layer, predicted bit for bit: the four surfaces.

Layer: numerics. Contract: contracts/packed_moe.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moejax.contracts import packed_moe
from moejax.numerics import ordered_combine
from moejax.numerics.packed import activation
from moejax.numerics.packed import alignment
from moejax.numerics.packed import awq_format
from moejax.numerics.packed import gemm


class Surfaces(NamedTuple):
  """The four captured surfaces of a layer, by route id.

  Attributes:
    w13: S1, [route, 2 I].
    activation: S2, [route, I].
    routed_w2: S3, [route, H].
    final: S4, [token, H].
  """

  w13: np.ndarray
  activation: np.ndarray
  routed_w2: np.ndarray
  final: np.ndarray


def packed_moe_oracle(
    x: np.ndarray,
    gates: np.ndarray,
    w13: Sequence[awq_format.PackedOperand],
    w2: Sequence[awq_format.PackedOperand],
    blocks: alignment.RouteBlocks,
    contract: packed_moe.PackedMoeContract,
) -> Surfaces:
  """Computes a packed-AWQ expert layer in the exact order of its contract.

  Args:
    x: [token, H] in the contract's dtype.
    gates: [token, slot] float32.
    w13: [H, 2 I] weight of each local expert, gate columns first.
    w2: [I, H] weight of each local expert.
    blocks: The alignment plan of the routes.
    contract: Every field matters.

  Returns:
    The surfaces, each in the contract's dtype. Routes in no block are +0.

  Raises:
    ValueError: shapes, dtypes or the plan do not fit.

  Source: specification of the packed-AWQ MoE, section 5.
  """
  tokens, top_k = gates.shape
  if tokens != len(x) or gates.size != blocks.num_routes:
    raise ValueError(
        f"{len(x)} tokens, gates {gates.shape} and a plan of"
        f" {blocks.num_routes} routes do not belong together."
    )
  s1 = gemm.packed_gemm_oracle(x, w13, blocks, contract.w13)
  s2 = activation.silu_and_mul(s1, contract)
  s3 = gemm.packed_gemm_oracle(
      s2, w2, blocks, contract.w2, gates=gates.reshape(-1)
  )
  return Surfaces(s1, s2, s3, combine_slots(s3, top_k, contract))


def combine_slots(
    s3: np.ndarray, top_k: int, contract: packed_moe.PackedMoeContract
) -> np.ndarray:
  """Adds the rows of each token in slot order: float32 from +0, R_16 once.

  Args:
    s3: [token * top_k, H]. W2 has gated them, so they are the terms.
    top_k: Slots of a token.
    contract: combine.

  Returns:
    [token, H] in the contract's dtype.
  """
  terms = s3.reshape(-1, top_k, s3.shape[-1])
  slots = np.broadcast_to(np.arange(top_k), terms.shape[:2])
  return ordered_combine.add_terms_oracle(terms, slots, contract.combine)


def first_non_finite(surfaces: Surfaces) -> tuple[str, int, int] | None:
  """Returns (surface, row, column) of the first infinity or NaN, or None."""
  for name, surface in surfaces._asdict().items():
    places = np.argwhere(~np.isfinite(surface.astype(np.float32)))
    if len(places):
      return name, int(places[0, 0]), int(places[0, 1])
  return None
