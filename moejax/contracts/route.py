"""From router logits to a route: which experts, in which slots, which gates.

Two routers with the same weights disagree when they score in another dtype,
break ties another way, select with a bias that they then also put into the
gates, or normalise where the other does not. Each of these is a field here;
`numerics/router.py` is the executable meaning.

  scores = score(logits)                      in score_dtype
  ids    = the top_k largest of scores + bias, descending, ties by tie_rule
  gates  = scores[ids]                        never the biased scores
  gates  = gates / sum(gates)                 if normalize
  gates  = R_gate_dtype(gates * scale)

Layer: contracts. Imports contracts.
"""

import dataclasses

from moejax.contracts import combine
from moejax.contracts import document

SCORES = ("softmax", "sigmoid", "sqrt_softplus")
TIE_RULES = ("lowest_index", "highest_index")


@dataclasses.dataclass(frozen=True, slots=True)
class RouterContract:
  """The bits-determining choices of a router.

  Attributes:
    name: A label for people; no part of the digest.
    top_k: Number of slots a token fills.
    normalize: Whether the gates are divided by their sum.
    score: "softmax" over all experts, or an element's "sigmoid" or
      "sqrt_softplus".
    logits_dtype: Dtype of the router's GEMM output.
    score_dtype: Dtype of scores, of their sum and of the normalised gates.
    gate_dtype: Dtype of the gates that the experts receive.
    tie_rule: Which of two equal scores is selected first.
    scale: Factor on the gates, after normalisation.
  """

  name: str
  top_k: int
  normalize: bool
  score: str = "softmax"
  logits_dtype: str = "bfloat16"
  score_dtype: str = "float32"
  gate_dtype: str = "bfloat16"
  tie_rule: str = "lowest_index"
  scale: float = 1.0

  def __post_init__(self):
    document.check_types(self)
    if self.top_k < 1:
      raise ValueError(f"RouterContract: top_k={self.top_k} must be positive.")
    for field, choices in (
        ("score", SCORES),
        ("logits_dtype", combine.FLOATS),
        ("score_dtype", combine.FLOATS),
        ("gate_dtype", combine.FLOATS),
        ("tie_rule", TIE_RULES),
    ):
      document.check_choice(
          "RouterContract", field, getattr(self, field), choices
      )
