"""How the top_k expert outputs of one token become one vector.

A combine is top_k products and top_k additions per output element. Floating-
point addition is not associative, so the dtype of each term, the dtype of each
partial sum and the order of the additions are part of the answer, not an
implementation detail. This file states them; `numerics/ordered_combine.py` is
the executable meaning.

The arithmetic, for one token and one output element:

  v_s = R_FP32(R_gate(g_s) * e_s)         e_s: output of the expert in slot s
  t_s = R_operand(v_s)
  a   = +0 (or the first term)
  for s in the order:  a = R_accumulator(a + t_s)
  y   = R_output(a + shared)              or R_output(R_output(a) + shared)

Layer: contracts. Imports contracts.
"""

import dataclasses

from moejax.contracts import document

FLOATS = ("float32", "bfloat16", "float16")
GATE_SITES = ("after_down", "before_down", "input")
ORDERS = ("slot", "expert", "explicit")
NANS = ("0x7fc00000", "0x7fffffff")


@dataclasses.dataclass(frozen=True, slots=True)
class CombineContract:
  """The bits-determining choices of a combine. Changing a field changes bits.

  Attributes:
    name: A label for people; no part of the digest.
    gate_site: Where the gate multiplies: the expert's output ("after_down"),
      the activation that enters its down projection ("before_down"), or its
      input ("input", only legal for top_k 1). Away from "after_down" the
      combine adds the expert outputs as they are.
    gate_dtype: Dtype to which the gate is rounded before it multiplies.
    operand: Dtype to which each gated term is rounded before it is added.
    accumulator: Dtype of every partial sum; one rounding an addition.
    order: Which term is added first: "slot" (as the route lists them),
      "expert" (ascending expert id; equal ids in slot order) or "explicit".
    permutations: Only for "explicit": one permutation of range(top_k) for
      every layer, or one for each layer. Entry j is the slot added j-th. An
      empty tuple says that the caller gives one order a token.
    start: "zero" starts from +0; "first" starts from the first term.
    round_before_shared: Whether the routed sum is rounded to `output` before
      the shared expert's output is added.
    output: Dtype of the result.
    contraction: "mul_add" rounds product and sum apart; "fma" rounds
      a + g * e once, and is legal only where the operand is not rounded.
    subnormals: "keep", or "flush": subnormal float32 operands and results
      count as zeros of the same sign.
    rounding: How float32 becomes bfloat16: "ieee" (nearest, ties to even, NaN
      stays NaN) or "paper" (NaN and infinity lose their low 16 bits, so that a
      NaN whose payload lies there becomes infinity).
    nan: The bits of every NaN that an addition or a product returns.
  """

  name: str
  gate_site: str = "after_down"
  gate_dtype: str = "float32"
  operand: str = "float32"
  accumulator: str = "float32"
  order: str = "slot"
  permutations: tuple[tuple[int, ...], ...] = ()
  start: str = "zero"
  round_before_shared: bool = False
  output: str = "bfloat16"
  contraction: str = "mul_add"
  subnormals: str = "keep"
  rounding: str = "ieee"
  nan: str = "0x7fc00000"

  def __post_init__(self):
    document.check_types(self)
    for field, choices in (
        ("gate_site", GATE_SITES),
        ("gate_dtype", FLOATS),
        ("operand", FLOATS),
        ("accumulator", FLOATS),
        ("order", ORDERS),
        ("start", ("zero", "first")),
        ("output", FLOATS),
        ("contraction", ("mul_add", "fma")),
        ("subnormals", ("keep", "flush")),
        ("rounding", ("ieee", "paper")),
        ("nan", NANS),
    ):
      document.check_choice(
          "CombineContract", field, getattr(self, field), choices
      )
    if not _is_tuple_of_orders(self.permutations):
      raise ValueError(
          f"CombineContract: permutations={self.permutations!r} is no tuple of"
          " tuples of slots."
      )
    if self.order != "explicit" and self.permutations:
      raise ValueError(
          f"CombineContract: order={self.order!r} takes no permutations, got"
          f" {len(self.permutations)}."
      )
    for permutation in self.permutations:
      if sorted(permutation) != list(range(len(permutation))):
        raise ValueError(
            f"CombineContract: {permutation} is not a permutation of"
            f" range({len(permutation)})."
        )
    if len({len(p) for p in self.permutations}) > 1:
      raise ValueError(
          "CombineContract: permutations of several lengths:"
          f" {sorted({len(p) for p in self.permutations})}."
      )
    if self.contraction == "fma" and self.operand != "float32":
      raise ValueError(
          f"CombineContract: contraction='fma' leaves no place for a rounding"
          f" of the operand to {self.operand}."
      )

  @property
  def scheme(self) -> str | None:
    """P32, C, A or B by operand and accumulator; None for other pairs."""
    return {
        ("float32", "float32"): "P32",
        ("bfloat16", "float32"): "C",
        ("float32", "bfloat16"): "A",
        ("bfloat16", "bfloat16"): "B",
    }.get((self.operand, self.accumulator))


def _is_tuple_of_orders(value) -> bool:
  return isinstance(value, tuple) and all(
      isinstance(order, tuple) and all(type(slot) is int for slot in order)
      for order in value
  )


def differing_fields(a: CombineContract, b: CombineContract) -> dict:
  """Returns {field: (value in a, value in b)} of the fields that differ."""
  return {
      field.name: (getattr(a, field.name), getattr(b, field.name))
      for field in dataclasses.fields(CombineContract)
      if field.name != "name"
      and getattr(a, field.name) != getattr(b, field.name)
  }
