"""Every reduction of a decoder under one declared contract.

Layer: contracts. Imports contracts.
"""

import dataclasses

from moejax.contracts import combine
from moejax.contracts import document
from moejax.contracts import reduction
from moejax.contracts import route


@dataclasses.dataclass(frozen=True, slots=True)
class Reductions:
  """One contract for each reduction site; `reduction.SITES` are the fields."""

  norm_mean: reduction.ReductionContract
  projection: reduction.ReductionContract
  attention_scores: reduction.ReductionContract
  attention_softmax: reduction.ReductionContract
  attention_values: reduction.ReductionContract
  router_logits: reduction.ReductionContract
  router_softmax: reduction.ReductionContract
  router_normalization: reduction.ReductionContract
  expert_gemm: reduction.ReductionContract
  lm_head: reduction.ReductionContract

  @classmethod
  def all(cls, chain: str) -> "Reductions":
    """Puts every site under the same chain."""
    contract = reduction.ReductionContract(chain)
    return cls(**{site: contract for site in reduction.SITES})


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderContract:
  """What decides the bits of a decoder, beside its weights and its config.

  Attributes:
    name: A label for people; no part of the digest.
    elementwise: "native", or "portable": each operation that reduces nothing
      (products, activations, rotary angles, ...) in float64 with one rounding.
    reductions: The contract of each reduction site.
    router: The contract of every router.
    combine: The contract of every combine.
  """

  name: str
  elementwise: str
  reductions: Reductions
  router: route.RouterContract
  combine: combine.CombineContract

  def __post_init__(self):
    document.check_types(self)
    if self.elementwise not in ("native", "portable"):
      raise ValueError(
          f"DecoderContract: elementwise={self.elementwise!r} is neither"
          " 'native' nor 'portable'."
      )


def native(router, combine_contract) -> DecoderContract:
  """Leaves every reduction but the combine to the framework."""
  return DecoderContract(
      "native", "native", Reductions.all("native"), router, combine_contract
  )


def portable(router, combine_contract) -> DecoderContract:
  """Computes every operation in float64 and rounds it once."""
  return DecoderContract(
      "portable",
      "portable",
      Reductions.all("portable"),
      router,
      combine_contract,
  )


def sequential(router, combine_contract) -> DecoderContract:
  """Adds every reduction in float32 in ascending order."""
  return DecoderContract(
      "sequential",
      "portable",
      Reductions.all("sequential"),
      router,
      combine_contract,
  )
