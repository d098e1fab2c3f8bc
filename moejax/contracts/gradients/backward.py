"""The backward graph: what a gradient step computes, and where it rounds.

A gradient is a second graph. Each operation of the forward graph has a rule,
and its rule is again made of operations with one rounding each, so `silu` is
one rounding going back while a division is six. Where a value has several
uses, their cotangents are added one after another; the order decides bits and
is part of the contract. `RULES` states what aten's autograd computes, read off
the operations that an unmodified transformers model runs; a test holds both
sides to it. Notation: g is the cotangent of the result, R a rounding to the
dtype of the result, u(.) the sum over the axes along which an operand was
broadcast (one sum, one rounding; nothing where no axis was).

Layer: contracts. Imports contracts.
"""

import dataclasses

from moejax.contracts import document

DISPATCH = ("falling_experts", "rising_experts", "one_sum")
EXPERT_WEIGHT = ("one_sum", "rows_in_turn")


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardContract:
  """What differs between backward graphs of one forward graph.

  Attributes:
    name: A label for people.
    dispatch: How the cotangents of the rows that one token sent to its experts
      become one. "falling_experts": a buffer an expert that was hit by any
      token, zero but for its rows, added one buffer at a time from the highest
      expert down. "rising_experts": from zero, one row at a time, experts
      rising. "one_sum": one sum over the slots.
    expert_weight: How the rows of an expert become the gradient of its weight.
      "one_sum": one matrix product. "rows_in_turn": R(g x) of each row, added
      from zero one at a time in route order.
    gate_from_zero: Whether the cotangent of a gate passes an addition to zero,
      as a gather's does; it turns -0 into +0.
  """

  name: str
  dispatch: str
  expert_weight: str
  gate_from_zero: bool

  def __post_init__(self):
    document.check_types(self)
    for field, known in (
        ("dispatch", DISPATCH),
        ("expert_weight", EXPERT_WEIGHT),
    ):
      document.check_choice(
          "BackwardContract", field, getattr(self, field), known
      )


_ALL = (
    BackwardContract("transformers_eager", "falling_experts", "one_sum", True),
    BackwardContract(
        "transformers_grouped_mm", "rising_experts", "one_sum", True
    ),
    BackwardContract(
        "transformers_batched_mm", "one_sum", "rows_in_turn", False
    ),
)
NAMES = tuple(contract.name for contract in _ALL)


def named(name: str) -> BackwardContract:
  """Returns a named contract.

  Raises:
    ValueError: the name is unknown; the message lists the known ones.
  """
  for contract in _ALL:
    if contract.name == name:
      return contract
  raise ValueError(f"backward {name!r} is not one of {', '.join(NAMES)}.")


# Operation or move -> the cotangent of each operand that may have one.
RULES = {
    "cast": {"x": "R(g)"},
    "add": {"x": "R(u(g))", "y": "R(u(g))"},
    "add_scalar": {"x": "g"},
    "multiply": {"x": "R(u(R(g y)))", "y": "R(u(R(g x)))"},
    "square": {"x": "R(g R(2 x))"},  # A product of a value with itself.
    "scale": {"x": "R(g c)"},
    "divide": {"x": "R(g / y)", "y": "R(u(R(-g R(R(x / y) / y))))"},
    "rsqrt": {"x": "R(R(-g / 2) R(result^3))"},
    "silu": {"x": "R(g s (1 + x (1 - s))), s = 1 / (1 + exp(-x))"},
    "mean": {"x": "R(g / n)"},
    "sum": {"x": "g"},
    "softmax": {"x": "R(result (g - sum(g result)))"},
    "log_softmax": {"x": "R(g - exp(result) sum(g))"},
    "nll_loss": {"x": "R(-g / n) at the target, +0 elsewhere"},
    "linear": {"x": "R(g weight)", "weight": "R(transpose(g) x)"},
    "matmul": {"a": "R(u(R(g transpose(b))))", "b": "R(u(R(transpose(a) g)))"},
    "expert_linear": {
        "rows": "R(g weight[expert])",
        "weight": "by `expert_weight`; +0 for an expert without rows; with"
        " `falling_experts` R(0 + it) if several experts have rows",
    },
    "gate_terms": {
        "expert_out": "R(g gate)",
        "gate": "R(sum(R(g expert_out))), by `gate_from_zero`",
    },
    "combine": {"terms": "g, for each slot"},
    "share": {"x": "additions, from the last use to the first"},
    "lookup": {"table": "from zero, R(sum + g) token by token"},
    "dispatch": {"x": "by `dispatch`"},
    "pick": {"x": "g where it was picked, +0 elsewhere"},
    "halves": {"x": "g side by side"},
    "half_turn": {"x": "R(0 + the turn of g back)"},
}
