"""What decides the bits of packed-AWQ expert layers and of a decoder with them.

The experts of a packed decoder run in one of two ways, and its contract says
which. "Dequantized" makes the weights wide with one rounding and goes on with
the decoder's own operations. The other is the expert layer of vLLM's Marlin:

Two packed GEMMs, an activation between them, a combine behind them. Their
results are four surfaces, listed by route id r = token * top_k + slot:

  S1 [route, 2 I]  W13 of the token's activations: gate half, then up half
  S2 [route, I]    R_16(R_16(silu(gate)) * (up + 0.0))
  S3 [route, H]    W2 of S2, times the route's gate, R_16 before and after
  S4 [token, H]    the slots of S3 in float32, ascending from +0; R_16 once

silu is a function of one 16-bit value, so 65,536 results say all about it. The
contract holds their digest; `numerics/packed/activation.py` makes the table.

Layer: contracts. Imports contracts.
"""

import dataclasses

from moejax.contracts import combine
from moejax.contracts import decoder as decoder_lib
from moejax.contracts import document
from moejax.contracts import named_combines
from moejax.contracts import packed_gemm

# vLLM's silu_and_mul on an H200, gates 0x0000 to 0xffff, little-endian uint16.
SILU_TABLES = {
    "float16": (
        "589977e32de09fe30ef836ffcfe55831b0f26fe46efaf8ec6c4e57d7b0d247c8"
    ),
    "bfloat16": (
        "5f48cf06e46dc6cfd0977367a6a09d01eb4794c3b6c1fcd9338f52a8859ab5e2"
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class PackedMoeContract:
  """The bits-determining choices of a layer. Changing a field changes bits.

  Attributes:
    name: A label for people; no part of the digest.
    w13: The GEMM that makes S1; ungated.
    silu_table: SHA-256 of the 65,536 values of R_16(silu).
    up_zero: "added": the up value is up + 0.0, so a -0 becomes +0. "as_is".
    w2: The GEMM that makes S3; gated.
    combine: How S3 becomes S4. Its gate is the one that `w2` multiplies with.
  """

  name: str
  w13: packed_gemm.PackedGemmContract
  silu_table: str
  up_zero: str
  w2: packed_gemm.PackedGemmContract
  combine: combine.CombineContract

  def __post_init__(self):
    document.check_types(self)
    document.check_choice(
        "PackedMoeContract", "up_zero", self.up_zero, ("added", "as_is")
    )
    sites = (self.w13.gate_site, self.w2.gate_site, self.combine.gate_site)
    if sites != ("none", "after_rounding", "after_down"):
      raise ValueError(
          f"PackedMoeContract: gate sites {sites} of W13, W2 and combine; the"
          " gate multiplies W2's rounded output, once."
      )
    dtypes = (
        self.w13.dtype, self.w2.dtype, self.combine.gate_dtype,
        self.combine.operand, self.combine.output,
    )
    if len(set(dtypes)) != 1:
      raise ValueError(
          "PackedMoeContract: W13, W2, gate, terms and output are of dtypes"
          f" {dtypes}, not of one."
      )

  @property
  def dtype(self) -> str:
    """The 16-bit dtype of the layer."""
    return self.w13.dtype


def marlin(
    *,
    dtype: str,
    thread_k: int,
    thread_n: int,
    grid: int,
    group_size: int = 128,
) -> PackedMoeContract:
  """Returns the contract of vLLM's Marlin expert layer on a Hopper chip."""
  gemm = {
      site: packed_gemm.marlin(
          dtype=dtype, thread_k=thread_k, thread_n=thread_n, grid=grid,
          group_size=group_size, gate_site=site,
      )
      for site in packed_gemm.GATE_SITES
  }
  return PackedMoeContract(
      name="marlin_moe_hopper",
      w13=gemm["none"],
      silu_table=SILU_TABLES[dtype],
      up_zero="added",
      w2=gemm["after_rounding"],
      combine=dataclasses.replace(
          named_combines.named("vllm_marlin"),
          gate_dtype=dtype, operand=dtype, output=dtype, nan="0x7fffffff",
      ),
  )


@dataclasses.dataclass(frozen=True, slots=True)
class DequantizedContract:
  """Experts whose weights are made wide before they multiply.

    w = R_dtype((code - zero) * R_dtype(scale))

  The difference is a whole number, so the product is exact in float32 and the
  weight has one rounding, beside that of the scale where the checkpoint's
  dtype is not this one. Everything else (the site "expert_gemm", activation,
  combine) is as the decoder's contract says.

  Attributes:
    name: A label for people; no part of the digest.
    dtype: Of the weights made wide.
    group_size: Inputs that share a scale and a zero point; -1 means all.
  """

  name: str
  dtype: str
  group_size: int

  def __post_init__(self):
    document.check_types(self)
    document.check_choice(
        "DequantizedContract", "dtype", self.dtype, packed_gemm.HALVES
    )
    if self.group_size < 1 and self.group_size != -1:
      raise ValueError(
          f"DequantizedContract: group_size={self.group_size} is neither"
          " positive nor -1."
      )


@dataclasses.dataclass(frozen=True, slots=True)
class PackedDecoderContract:
  """What decides the bits of a decoder whose experts are packed.

  Attributes:
    name: A label for people; no part of the digest.
    decoder: Everything but the packed experts.
    experts: How they run.
    plan: Which routes share a block; "none" where nothing depends on it.
      "stable": the routes of an expert ascend, and a block has as many rows as
      vLLM chooses for the number of routes. Marlin's bits depend on it.
  """

  name: str
  decoder: decoder_lib.DecoderContract
  experts: DequantizedContract | PackedMoeContract
  plan: str

  def __post_init__(self):
    document.check_types(self)
    planned = isinstance(self.experts, PackedMoeContract)
    if not planned and not isinstance(self.experts, DequantizedContract):
      raise ValueError(
          f"PackedDecoderContract: experts={self.experts!r} is no contract of"
          " packed experts."
      )
    document.check_choice(
        "PackedDecoderContract", "plan", self.plan,
        ("stable",) if planned else ("none",),
    )
    if not planned:
      return
    if self.router.gate_dtype != "float32":
      raise ValueError(
          f"PackedDecoderContract: gate_dtype={self.router.gate_dtype!r}; the"
          " packed layer takes float32 gates and rounds them itself."
      )
    differing = combine.differing_fields(self.combine, self.experts.combine)
    if differing:
      raise ValueError(
          "PackedDecoderContract: the combines of decoder and experts differ"
          f" in {differing}."
      )

  @property
  def router(self):
    """The contract of every router."""
    return self.decoder.router

  @property
  def combine(self) -> combine.CombineContract:
    """The contract of every combine."""
    return self.decoder.combine


def dequantized_decoder(
    decoder: decoder_lib.DecoderContract, *, dtype: str, group_size: int
) -> PackedDecoderContract:
  """Returns a decoder's contract with dequantised experts."""
  experts = DequantizedContract("dequantized", dtype, group_size)
  return PackedDecoderContract(
      f"{decoder.name}_dequantized", decoder, experts, "none"
  )


def marlin_decoder(
    decoder: decoder_lib.DecoderContract, experts: PackedMoeContract
) -> PackedDecoderContract:
  """Returns a decoder's contract with the experts of vLLM's Marlin.

  The router hands float32 gates over, and the combine is that of the experts,
  whatever the decoder's contract said.
  """
  router = dataclasses.replace(decoder.router, gate_dtype="float32")
  decoder = dataclasses.replace(
      decoder, router=router, combine=experts.combine
  )
  return PackedDecoderContract(
      f"{decoder.name}_{experts.name}", decoder, experts, "stable"
  )
