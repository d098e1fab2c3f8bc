"""What decides the bits of a packed-AWQ expert GEMM.

A split-K GEMM on tensor cores adds the K products of an output element in an
order that its tile sizes, its grid and the chip decide. This file states all of
it as data; `numerics/packed/gemm.py` is the executable meaning. For one route
with activations x, one column n and its expert's codes q, zero points z, scales
s (one pair per group of K rows):

  w_k = R_16((q_k - z_k) * s_k)
  piece p of the planner, K-tiles [k_start, k_start + k_len):
    stream v owns rows [32 v, 32 v + 32) of every K-tile, in two k16 steps
    c_v = mma16(c_v, w, x) over ascending K, from c_v = +0
    P_p = the streams added as `stream_merge` nests them, in float32
  acc = P_last; for p = last - 1 .. 0: acc = R_FP32(P_p + acc)
  y   = R_16(acc), and for gate_site "after_rounding": R_16(y * R_16(gate))

Layer: contracts. Imports contracts.
"""

import dataclasses

from moejax.contracts import document

HALVES = ("float16", "bfloat16")
GATE_SITES = ("none", "after_rounding")
GROUP_SIZES = (32, 64, 128)
STREAM_ROWS = 32
STREAM_MERGES = {64: (0, 1), 128: (0, (1, (3, 2)))}


@dataclasses.dataclass(frozen=True, slots=True)
class Mma16Contract:
  """One k16 step of a tensor core: 16 products and the accumulator.

  The terms are cut toward zero to multiples of 2**(e_max - fraction_bits),
  where e_max is the largest exponent among them, and then added exactly.

  Attributes:
    name: A label for people; no part of the digest.
    group: Products that one addition takes together with the accumulator; 16,
      or 8 for two additions a step.
    fraction_bits: Bits kept below e_max.
    exponents: "sum": a product's exponent is that of its operands added, so
      its significand lies in [1, 4). "renormalized": the product's own.
    operand_exponents: "clamped": a subnormal has its format's least normal
      exponent. "unclamped": that of its leading bit. Holds for the
      accumulator too.
    final: "truncate" or "nearest_even": how the sum becomes float32.
    nan: The bits of every NaN it returns.
  """

  name: str
  group: int = 16
  fraction_bits: int = 25
  exponents: str = "sum"
  operand_exponents: str = "clamped"
  final: str = "truncate"
  nan: str = "0x7fffffff"

  def __post_init__(self):
    document.check_types(self)
    for field, choices in (
        ("group", (8, 16)),
        ("exponents", ("sum", "renormalized")),
        ("operand_exponents", ("clamped", "unclamped")),
        ("final", ("truncate", "nearest_even")),
        ("nan", ("0x7fffffff", "0x7fc00000")),
    ):
      document.check_choice(
          "Mma16Contract", field, getattr(self, field), choices
      )
    if not 10 <= self.fraction_bits <= 32:
      raise ValueError(
          f"Mma16Contract: fraction_bits={self.fraction_bits} is not in 10..32,"
          " where the sum is exact in float64."
      )


# Measured on an H200 (mma.sync and wgmma alike). No other chip was measured.
HOPPER = Mma16Contract(name="hopper")


@dataclasses.dataclass(frozen=True, slots=True)
class PackedGemmContract:
  """The bits-determining choices of one GEMM. Changing a field changes bits.

  Attributes:
    name: A label for people; no part of the digest.
    dtype: Of activations, dequantized weights and the result.
    thread_k: K rows of one tile; 64 or 128.
    thread_n: Columns of one tile; a multiple of 64.
    grid: Thread blocks over which the K-tiles are cut. A contract field, never
      derived from a device.
    group_size: K rows that share a scale and a zero point.
    gate_site: "none" (W13), or "after_rounding" (W2): R_16(y * R_16(gate)).
    stream_merge: How the K-streams of a piece are added: a stream's number,
      or a pair (left, right) of such, left + right in float32.
    slice_merge: "highest_k_first": right-nested, P_0 + (P_1 + (... + P_last)).
      "lowest_k_first": ((P_0 + P_1) + ...) + P_last, which Marlin never does.
    mma: The tensor core's step.
  """

  name: str
  dtype: str
  thread_k: int
  thread_n: int
  grid: int
  group_size: int
  gate_site: str
  stream_merge: tuple
  slice_merge: str
  mma: Mma16Contract

  def __post_init__(self):
    document.check_types(self)
    for field, choices in (
        ("dtype", HALVES),
        ("thread_k", tuple(STREAM_MERGES)),
        ("group_size", GROUP_SIZES),
        ("gate_site", GATE_SITES),
        ("slice_merge", ("highest_k_first", "lowest_k_first")),
    ):
      document.check_choice(
          "PackedGemmContract", field, getattr(self, field), choices
      )
    if self.thread_n < 64 or self.thread_n % 64 or self.grid < 1:
      raise ValueError(
          f"PackedGemmContract: thread_n={self.thread_n} must be a positive"
          f" multiple of 64, grid={self.grid} at least 1."
      )
    if not isinstance(self.mma, Mma16Contract):
      raise ValueError(f"PackedGemmContract: mma={self.mma!r} is no contract.")
    leaves = _leaves(self.stream_merge)
    if sorted(leaves) != list(range(self.num_streams)):
      raise ValueError(
          f"PackedGemmContract: stream_merge={self.stream_merge!r} does not add"
          f" each of the {self.num_streams} streams of thread_k="
          f"{self.thread_k} once."
      )

  @property
  def num_streams(self) -> int:
    """K-streams of a piece, thread_k / 32."""
    return self.thread_k // STREAM_ROWS


def marlin(
    *,
    dtype: str,
    thread_k: int,
    thread_n: int,
    grid: int,
    group_size: int = 128,
    gate_site: str = "none",
) -> PackedGemmContract:
  """Returns the contract of vLLM's Marlin MoE kernel on a Hopper chip.

  Raises:
    ValueError: a value is not one that the kernel knows.
  """
  document.check_choice(
      "marlin", "thread_k", thread_k, tuple(STREAM_MERGES)
  )
  return PackedGemmContract(
      name="marlin_moe_hopper",
      dtype=dtype,
      thread_k=thread_k,
      thread_n=thread_n,
      grid=grid,
      group_size=group_size,
      gate_site=gate_site,
      stream_merge=STREAM_MERGES[thread_k],
      slice_merge="highest_k_first",
      mma=HOPPER,
  )


def _leaves(nest) -> list:
  if not isinstance(nest, tuple):
    return [nest] if type(nest) is int else [-1]
  return [leaf for side in nest for leaf in _leaves(side)] + (
      [] if len(nest) == 2 else [-1]
  )
