"""What decides the bits of a routed expert MLP in training.

Rows of a batch are copied expert by expert, go through grouped GEMMs and are
added back slot by slot. The forward pass and each line of the hand-written
backward pass round where this file says; `numerics/grouped/mlp_oracle.py` is
the executable meaning. With R_d one rounding to the dtype of the activations:

  X = rows of x            A, B = R_d(X W1^T), R_d(X W3^T)     gate, up
  A <- min(A, L), B <- clip(B, -L, L)                          if clamped
  S = R_d(A sigmoid(A))    P = R_d(S B)
  before_fc2: Q = R_d(P G), V = R_d(Q W2^T)
  after_fc2:  U = R_d(P W2^T), V = R_d(U G)
  y = R_d(sum over slots of V, ascending from +0, in float32)

A launch bound belongs to a GEMM, never to a shape: `bound` says how many rows
of one expert the launch reaches. The GEMMs of the forward pass, those that make
gradients of rows and those that make gradients of weights have a contract each,
so none can inherit another's.

Layer: contracts. Imports contracts.
"""

import dataclasses
import math

from moejax.contracts import document
from moejax.contracts import packed_gemm

CHAINS = ("native", "sequential", "portable", "mma16")
BOUNDS = ("tile_list", "total_rows", "distinct", "limit")
FILLS = {"nan": math.nan, "zero": 0.0, "1e4": 1e4}


@dataclasses.dataclass(frozen=True, slots=True)
class GroupGemmContract:
  """How one grouped GEMM adds its products, and which rows it reaches.

  Attributes:
    name: A label for people; no part of the digest.
    chain: "native": the framework's ragged dot, in its order. "sequential":
      acc = R_FP32(acc + term) from +0 over ascending index, the term the exact
      product (float64 operands: in float64). "portable": the sum in float64,
      rounded once to float32 and once to the output. "mma16": the steps of a
      tensor core over ascending index, sixteen products each.
    bound: Rows of one expert that the launch reaches, in whole blocks.
      "tile_list": all, from a list of tiles without a bound per expert.
      "total_rows": R, always enough. "distinct": the token count, enough when
      no token has one expert twice. "limit": `limit`.
    limit: max_M (max_K for weight gradients) of bound "limit"; else None.
    block_rows: Rows of one tile (BLOCK_M; BLOCK_K for weight gradients).
    unwritten: What output memory holds before a launch with a bound: "nan",
      "zero" or "1e4". A right bound leaves none of it.
    mma: The step of chain "mma16".
  """

  name: str = "native"
  chain: str = "native"
  bound: str = "tile_list"
  limit: int | None = None
  block_rows: int = 128
  unwritten: str = "nan"
  mma: packed_gemm.Mma16Contract = packed_gemm.HOPPER

  def __post_init__(self):
    document.check_types(self)
    for field, choices in (
        ("chain", CHAINS), ("bound", BOUNDS), ("unwritten", tuple(FILLS))
    ):
      document.check_choice(
          "GroupGemmContract", field, getattr(self, field), choices
      )
    if (self.bound == "limit") != (type(self.limit) is int):
      raise ValueError(
          f"GroupGemmContract: bound={self.bound!r} with limit={self.limit!r};"
          " bound 'limit' takes a whole number, the others None."
      )
    if self.block_rows < 1 or (self.limit or 0) < 0:
      raise ValueError(
          f"GroupGemmContract: block_rows={self.block_rows}, limit="
          f"{self.limit} must be positive."
      )
    if self.chain == "native" and self.bound != "tile_list":
      raise ValueError(
          "GroupGemmContract: the framework's ragged dot has no launch bound;"
          f" bound={self.bound!r} needs another chain."
      )

  def reach(self, rows: int, tokens: int) -> int | None:
    """Returns the bound on the rows of one expert; None if there is none.

    Args:
      rows: R of the grouped buffer.
      tokens: T; read by bound "distinct" alone.
    """
    return {
        "tile_list": None,
        "total_rows": rows,
        "distinct": tokens,
        "limit": self.limit,
    }[self.bound]


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedMlpContract:
  """The choices of one routed expert MLP and of its gradient.

  Attributes:
    name: A label for people; no part of the digest.
    forward: Of the GEMMs of the forward pass.
    dgrad: Of the GEMMs that make gradients of rows.
    wgrad: Of those that make gradients of weights.
    fc1_layout: "merged": gate and up projection are one GEMM, forward and
      backward. "split": two, whose input gradients are rounded and added.
    weight_placement: "before_fc2" or "after_fc2": where the gate multiplies.
    clamp_limit: L above, or None for no clamp. The gradient passes where
      A <= L and -L <= B <= L, ties included, taken on the rounded A and B.
    functions: Who computes sigmoid: "native", the framework in float32;
      "portable", float64 rounded once to float32.
    residuals: "save" or "recompute" what the backward pass can rebuild. Under
      declared chains and portable functions the bits are the same; the memory
      is not.
  """

  name: str = "native"
  forward: GroupGemmContract = GroupGemmContract()
  dgrad: GroupGemmContract = GroupGemmContract()
  wgrad: GroupGemmContract = GroupGemmContract()
  fc1_layout: str = "merged"
  weight_placement: str = "before_fc2"
  clamp_limit: float | None = None
  functions: str = "native"
  residuals: str = "save"

  def __post_init__(self):
    document.check_types(self)
    for field, choices in (
        ("fc1_layout", ("merged", "split")),
        ("weight_placement", ("before_fc2", "after_fc2")),
        ("functions", ("native", "portable")),
        ("residuals", ("save", "recompute")),
    ):
      document.check_choice(
          "GroupedMlpContract", field, getattr(self, field), choices
      )
    for field in ("forward", "dgrad", "wgrad"):
      if not isinstance(getattr(self, field), GroupGemmContract):
        raise ValueError(
            f"GroupedMlpContract: {field}={getattr(self, field)!r} is no"
            " contract of a grouped GEMM."
        )
    if self.clamp_limit is not None and not self.clamp_limit > 0:
      raise ValueError(
          f"GroupedMlpContract: clamp_limit={self.clamp_limit!r} is not"
          " positive; None says no clamp."
      )


def of_chain(chain: str, **fields) -> GroupedMlpContract:
  """Returns the contract whose GEMMs all have one chain.

  Functions are native for the native chain and portable for the others.
  `block_rows` goes to the GEMMs, every other field to the MLP.
  """
  blocks = {
      key: fields.pop(key) for key in ("block_rows",) if key in fields
  }
  gemm = GroupGemmContract(name=chain, chain=chain, **blocks)
  return GroupedMlpContract(**{
      "name": chain,
      "forward": gemm,
      "dgrad": gemm,
      "wgrad": gemm,
      "functions": "native" if chain == "native" else "portable",
      **fields,
  })
