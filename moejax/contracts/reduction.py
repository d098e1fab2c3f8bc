"""How one reduction of a decoder adds its terms.

Every sum in the decoder (a GEMM's contraction, the mean of a norm, the
denominator of a softmax, ...) has a site with a name, and every site has one
of these contracts, even where the contract only says that the framework may
choose ("native"). The combine has a contract of its own, `combine.py`.

Layer: contracts. Imports contracts.
"""

import dataclasses

from moejax.contracts import document

CHAINS = ("native", "portable", "sequential")

SITES = (
    "norm_mean",
    "projection",
    "attention_scores",
    "attention_softmax",
    "attention_values",
    "router_logits",
    "router_softmax",
    "router_normalization",
    "expert_gemm",
    "lm_head",
)


@dataclasses.dataclass(frozen=True, slots=True)
class ReductionContract:
  """The order, the accumulator and the rounding of one reduction.

  Attributes:
    chain: "native": the framework's order and roundings. "portable": the value
      of the sum in float64, rounded once to float32 and then once to the
      output dtype. "sequential": acc = R_FP32(acc + term) from +0 over
      ascending index; the term is the exact product of the two operands.
  """

  chain: str

  def __post_init__(self):
    document.check_types(self)
    document.check_choice("ReductionContract", "chain", self.chain, CHAINS)
