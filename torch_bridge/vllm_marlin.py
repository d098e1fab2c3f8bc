"""vLLM's Marlin expert kernels, called without vLLM.

The wheel of vLLM 0.25.1 holds the kernels in two extension files that need
torch 2.11 and nothing else of vLLM: `_moe_C_stable_libtorch.abi3.so` (GEMM,
alignment, sum over slots) and `_C_stable_libtorch.abi3.so` (activation). They
are loaded from paths that the caller gives, and are no part of this project.

Layer: torch_bridge.
"""

from collections.abc import Sequence
import dataclasses
import pathlib

import numpy as np
import torch

from moejax.contracts import packed_gemm
from moejax.contracts import packed_moe
from moejax.contracts import refusal
from moejax.numerics.packed import alignment
from moejax.numerics.packed import awq_format
from moejax.numerics.packed import marlin_layout
from moejax.numerics.packed import oracle
from moejax.protocols import packed_fixture
from torch_bridge import tensor_bits

_UINT4 = 1125899906843648  # The id of vLLM's scalar type uint4.


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
  """One projection of all experts in Marlin's layout, on the device.

  Attributes:
    words: [expert, k / 16, 2 n] int32.
    scales: [expert, group, n] in the compute dtype.
    zeros: [expert, group, n / 8] int32.
  """

  words: torch.Tensor
  scales: torch.Tensor
  zeros: torch.Tensor


def repack(
    operand: awq_format.PackedOperand,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns one expert's (words, scales, zeros) in Marlin's layout."""
  return (
      marlin_layout.repack(operand.codes),
      marlin_layout.permute_scales(operand.scales),
      marlin_layout.repack_zeros(operand.zeros),
  )


class Kernels:
  """The kernels of the two extension files.

  Attributes:
    has_activation: Whether the file with the activation was given.
  """

  def __init__(self, moe_extension: str, ops_extension: str | None = None):
    """Loads the files.

    Raises:
      HarnessError: a file is missing or cannot be loaded.
      UnsupportedError: there is no CUDA device.
    """
    for path in (moe_extension, ops_extension):
      if path is not None and not pathlib.Path(path).is_file():
        raise refusal.HarnessError(f"no vLLM extension at {path!r}.")
    if not torch.cuda.is_available():
      raise refusal.UnsupportedError(
          "vLLM's Marlin kernels need a CUDA device; there is none."
      )
    for path in (moe_extension, ops_extension):
      if path is not None:
        try:
          torch.ops.load_library(path)
        except OSError as error:
          raise refusal.HarnessError(f"cannot load {path!r}: {error}") from (
              error
          )
    self.has_activation = ops_extension is not None
    self.num_sms = torch.cuda.get_device_properties(0).multi_processor_count

  def weights(self, repacked: Sequence[tuple]) -> Weights:
    """Moves the experts' repacked arrays to the device."""
    return Weights(*(
        torch.stack([tensor_bits.to_torch(part) for part in parts]).cuda()
        for parts in zip(*repacked, strict=True)
    ))

  def align(
      self, expert_ids: np.ndarray, num_experts: int, block_rows: int
  ) -> alignment.RouteBlocks:
    """Returns the plan that moe_align_block_size makes, checked.

    On the large path the order inside an expert is decided by atomics, so two
    calls may return different plans.

    Raises:
      ValueError: the kernel's plan is no partition of the routes.
    """
    ids = torch.from_numpy(expert_ids.astype(np.int32)).cuda()
    length = alignment.buffer_length(expert_ids.size, num_experts, block_rows)
    rows = torch.full((length,), -7, dtype=torch.int32, device="cuda")
    experts = torch.full(
        (-(-length // block_rows),), -7, dtype=torch.int32, device="cuda"
    )
    padded = torch.full((1,), -7, dtype=torch.int32, device="cuda")
    torch.ops._moe_C.moe_align_block_size(
        ids, num_experts, block_rows, rows, experts, padded, None
    )
    return alignment.from_buffers(
        rows.cpu().numpy(), experts.cpu().numpy(), int(padded.item()),
        block_rows, expert_ids,
    )

  def gemm(
      self,
      x: torch.Tensor,
      weights: Weights,
      blocks: alignment.RouteBlocks,
      contract: packed_gemm.PackedGemmContract,
      gates: torch.Tensor,
  ) -> torch.Tensor:
    """Runs moe_wna16_marlin_gemm with the contract's tiles and grid.

    Args:
      x: [row, k] on the device; route r reads row r // (num_routes / rows).
      weights: Of all experts.
      blocks: The plan, given to the kernel as it is.
      contract: Must be one of `packed_gemm.marlin`.
      gates: [route] float32 on the device; used for "after_rounding" alone.

    Returns:
      [route, n]. The buffer held NaN before, so what the kernel leaves out is
      seen.

    Raises:
      UnsupportedError: the grid is no multiple of this device's processors, or
        the contract is not the kernel's.
    """
    blocks_per_sm, rest = divmod(contract.grid, self.num_sms)
    kernel = packed_gemm.marlin(
        dtype=contract.dtype, thread_k=contract.thread_k,
        thread_n=contract.thread_n, grid=contract.grid,
        group_size=contract.group_size, gate_site=contract.gate_site,
    )
    if rest or dataclasses.replace(contract, name=kernel.name) != kernel:
      raise refusal.UnsupportedError(
          f"Marlin on {self.num_sms} processors does not run {contract}."
      )
    rows, k = x.shape
    num_experts, _, n = weights.scales.shape
    ids, experts = (
        torch.from_numpy(part).cuda() for part in blocks.buffers(num_experts)
    )
    padded = torch.tensor(
        [blocks.padded_length], dtype=torch.int32, device="cuda"
    )
    out = torch.full(
        (blocks.num_routes, n), float("nan"), dtype=x.dtype, device="cuda"
    )
    workspace = torch.zeros(
        4 * self.num_sms, dtype=torch.int32, device="cuda"
    )
    torch.ops._moe_C.moe_wna16_marlin_gemm(
        x, out, weights.words, None, weights.scales, None, None, weights.zeros,
        None, None, workspace, ids, experts, padded, gates, blocks.block_rows,
        blocks.num_routes // rows, contract.gate_site != "none", _UINT4, rows,
        n, k, True, False, True, False, contract.thread_k, contract.thread_n,
        blocks_per_sm,
    )
    return out

  def silu_and_mul(self, s1: torch.Tensor) -> torch.Tensor:
    """Runs silu_and_mul: [route, 2 I] to [route, I].

    Raises:
      UnsupportedError: the file with the activation was not given.
    """
    if not self.has_activation:
      raise refusal.UnsupportedError(
          "silu_and_mul lives in vLLM's other extension file, which was not"
          " given."
      )
    out = s1.new_full((len(s1), s1.shape[1] // 2), float("nan"))
    torch.ops._C.silu_and_mul(out, s1)
    return out

  def combine(self, s3: torch.Tensor, top_k: int) -> torch.Tensor:
    """Runs moe_sum: [token * top_k, H] to [token, H]."""
    out = s3.new_full((len(s3) // top_k, s3.shape[1]), float("nan"))
    torch.ops._moe_C.moe_sum(s3.reshape(-1, top_k, s3.shape[1]), out)
    return out


class Vllm:
  """The kernels as a backend of `awq_bits`: one layer, its four surfaces."""

  name = "vllm"

  def __init__(self, moe_extension: str, ops_extension: str):
    """Loads the extension files.

    Raises:
      HarnessError: a file is missing or cannot be loaded.
      UnsupportedError: there is no CUDA device.
    """
    self._kernels = Kernels(moe_extension, ops_extension)
    self._w13 = self._w2 = None
    self.align = self._kernels.align

  @staticmethod
  def prepare(operand: awq_format.PackedOperand, dtype: str):
    """Packs one expert's weight."""
    del dtype
    return repack(operand)

  def load(self, w13: Sequence, w2: Sequence, dtype: str) -> None:
    """Takes a layer to the device."""
    del dtype
    self._w13, self._w2 = map(self._kernels.weights, (w13, w2))

  def surfaces(
      self,
      inputs: packed_fixture.Request,
      blocks: alignment.RouteBlocks,
      contract: packed_moe.PackedMoeContract,
  ) -> oracle.Surfaces:
    """Runs the loaded layer and returns host arrays."""
    kernels = self._kernels
    x = tensor_bits.to_torch(inputs.x).cuda()
    gates = torch.from_numpy(inputs.gates.reshape(-1)).cuda()
    s1 = kernels.gemm(x, self._w13, blocks, contract.w13, gates)
    s2 = kernels.silu_and_mul(s1)
    s3 = kernels.gemm(s2, self._w2, blocks, contract.w2, gates)
    s4 = kernels.combine(s3, inputs.gates.shape[1])
    return oracle.Surfaces(*map(tensor_bits.to_numpy, (s1, s2, s3, s4)))
