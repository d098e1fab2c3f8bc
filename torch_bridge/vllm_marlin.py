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


@dataclasses.dataclass(frozen=True, eq=False)
class DevicePlan:
  """An alignment plan as the kernels read it.

  Attributes:
    rows: [row] int32 route ids; `num_routes` is padding. A whole number of
      blocks.
    experts: [block] int32; -1 for a block that is not in use.
    padded: [1] int32, the rows in use.
    block_rows: Rows of a block.
    num_routes: tokens * top_k.
  """

  rows: torch.Tensor
  experts: torch.Tensor
  padded: torch.Tensor
  block_rows: int
  num_routes: int


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

  def __init__(
      self,
      moe_extension: str,
      ops_extension: str | None = None,
      fill: bool = True,
  ):
    """Loads the files.

    Args:
      moe_extension: Path of `_moe_C_stable_libtorch.abi3.so`.
      ops_extension: Path of `_C_stable_libtorch.abi3.so`, or None.
      fill: Whether a result's buffer holds NaN before, so that what a kernel
        leaves out is seen. The fill is one kernel more.

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
    self._fill = fill
    # Locks of the split tiles; the kernel leaves them as it found them.
    self._locks = torch.zeros(
        4 * self.num_sms, dtype=torch.int32, device="cuda"
    )

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
    plan = self.align_on_device(ids, num_experts, block_rows)
    return to_host(plan, expert_ids)

  def align_on_device(
      self, ids: torch.Tensor, num_experts: int, block_rows: int
  ) -> DevicePlan:
    """Runs moe_align_block_size; [token, slot] int32 on the device."""
    length = alignment.buffer_length(ids.numel(), num_experts, block_rows)
    blocks = -(-length // block_rows)
    rows, experts, padded = (
        self._new(ids, size) for size in (blocks * block_rows, blocks, 1)
    )
    torch.ops._moe_C.moe_align_block_size(
        ids, num_experts, block_rows, rows, experts, padded, None
    )
    return DevicePlan(rows, experts, padded, block_rows, ids.numel())

  def gemm(
      self,
      x: torch.Tensor,
      weights: Weights,
      blocks: alignment.RouteBlocks | DevicePlan,
      contract: packed_gemm.PackedGemmContract,
      gates: torch.Tensor,
  ) -> torch.Tensor:
    """Runs moe_wna16_marlin_gemm with the contract's tiles and grid.

    Args:
      x: [row, k] on the device; route r reads row r // (num_routes / rows).
      weights: Of all experts.
      blocks: The plan, given to the kernel as it is; on the host or the device.
      contract: Must be one of `packed_gemm.marlin`.
      gates: [route] float32 on the device; used for "after_rounding" alone.

    Returns:
      [route, n].

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
    plan = blocks
    if isinstance(blocks, alignment.RouteBlocks):
      plan = to_device(blocks, num_experts)
    out = self._new(x, plan.num_routes, n)
    torch.ops._moe_C.moe_wna16_marlin_gemm(
        x, out, weights.words, None, weights.scales, None, None, weights.zeros,
        None, None, self._locks, plan.rows, plan.experts, plan.padded, gates,
        plan.block_rows, plan.num_routes // rows, contract.gate_site != "none",
        _UINT4, rows, n, k, True, False, True, False, contract.thread_k,
        contract.thread_n, blocks_per_sm,
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
    out = self._new(s1, len(s1), s1.shape[1] // 2)
    torch.ops._C.silu_and_mul(out, s1)
    return out

  def combine(self, s3: torch.Tensor, top_k: int) -> torch.Tensor:
    """Runs moe_sum: [token * top_k, H] to [token, H]."""
    out = self._new(s3, len(s3) // top_k, s3.shape[1])
    torch.ops._moe_C.moe_sum(s3.reshape(-1, top_k, s3.shape[1]), out)
    return out

  def _new(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
    """A buffer of a tensor's dtype and device for a kernel's results."""
    if not self._fill:
      return like.new_empty(shape)
    nothing = float("nan") if like.is_floating_point() else -7
    return like.new_full(shape, nothing)


def to_device(
    blocks: alignment.RouteBlocks, num_experts: int, device: str = "cuda"
) -> DevicePlan:
  """Returns a plan as the kernels read it, its tail padded to whole blocks."""
  rows, experts = blocks.buffers(num_experts)
  whole = np.full(len(experts) * blocks.block_rows, blocks.num_routes, np.int32)
  whole[: len(rows)] = rows
  padded = np.array([blocks.padded_length], np.int32)
  return DevicePlan(
      *(torch.from_numpy(a).to(device) for a in (whole, experts, padded)),
      blocks.block_rows, blocks.num_routes,
  )


def to_host(
    plan: DevicePlan, expert_ids: np.ndarray
) -> alignment.RouteBlocks:
  """Reads a plan off the device and checks it against the routing.

  Raises:
    ValueError: it is no partition of the routes.
  """
  return alignment.from_buffers(
      plan.rows.cpu().numpy(), plan.experts.cpu().numpy(),
      int(plan.padded.item()), plan.block_rows, expert_ids,
  )


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
