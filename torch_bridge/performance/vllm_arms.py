"""vLLM's kernels as arms of a measurement of packed expert layers.

A sample replays one CUDA graph that holds the calls of all requests of a point.
Nothing in a graph waits for the host; its buffers come from the graph's own
memory. Before a graph is measured it is replayed once, and its results and
plans are read and checked.

Layer: torch_bridge.
"""

from collections.abc import Callable
from collections.abc import Sequence
import hashlib

import numpy as np
import torch

from moejax.contracts import refusal
from moejax.numerics.packed import awq_format
from moejax.protocols.performance import run
from torch_bridge import tensor_bits
from torch_bridge import vllm_marlin
from torch_bridge.performance import cuda_graph
from torch_bridge.performance import stable_order


class VllmArms:
  """The arms "vllm_..." of `performance.protocol.ARMS`.

  Attributes:
    arms: Which can run.
    refused: {arm: why it cannot}.
  """

  def __init__(
      self,
      kernels: vllm_marlin.Kernels,
      device: str = "cuda",
      capture: Callable = cuda_graph.Captured,
  ):
    """Compiles what vLLM does not have.

    Args:
      kernels: vLLM's; they should not fill the buffers of results.
      device: Where they run.
      capture: Makes of calls what a sample replays.
    """
    self._kernels = kernels
    self._device = device
    self._capture = capture
    self.arms = ("vllm_native", "vllm_stable_sort", "vllm_layer", "vllm_w13")
    self.refused = {}
    try:
      self._ordered = stable_order.Kernel()
      self.arms += ("vllm_stable",)
    except refusal.UnsupportedError as error:
      self.refused["vllm_stable"] = str(error)
    self._w13 = self._w2 = None

  def load(
      self,
      w13: Sequence[awq_format.PackedOperand],
      w2: Sequence[awq_format.PackedOperand],
      dtype: str,
  ) -> None:
    """Takes a layer to the device in Marlin's layout."""
    del dtype
    self._w13, self._w2 = (
        self._kernels.weights([vllm_marlin.repack(o) for o in part])
        for part in (w13, w2)
    )

  def prepare(self, arm: str, work: run.Work) -> run.Prepared:
    """Captures the calls of all requests, and checks what they compute.

    Raises:
      UnsupportedError: Marlin does not run the contract on this device, or
        the calls cannot be captured.
      HarnessError: a plan is not the one that the arm owes.
    """
    calls = [
        self._call(arm, work, number) for number in range(len(work.inputs))
    ]
    try:
      captured = self._capture(calls)
      captured.sample()
    except RuntimeError as error:
      raise refusal.UnsupportedError(
          f"{arm} cannot be captured here: {error}"
      ) from error
    taken = hashlib.sha256()
    for number, (plan, result) in enumerate(captured.results):
      _check_plan(arm, work, number, plan)
      taken.update(tensor_bits.to_numpy(result).tobytes())
    return run.Prepared(captured.sample, taken.hexdigest())

  def _call(
      self, arm: str, work: run.Work, number: int
  ) -> Callable[[], tuple[vllm_marlin.DevicePlan, torch.Tensor]]:
    """One request as a function of nothing: its plan and its result."""
    kernels, w13, w2 = self._kernels, self._w13, self._w2
    inputs, contract = work.inputs[number], work.contract
    x, gates, ids = (
        tensor_bits.to_torch(array).to(self._device)
        for array in (
            inputs.x, inputs.gates.reshape(-1),
            inputs.expert_ids.astype(np.int32),
        )
    )
    stable = vllm_marlin.to_device(
        work.plans[number], work.experts, self._device
    )

    def align():
      plan = kernels.align_on_device(ids, work.experts, stable.block_rows)
      if arm == "vllm_stable":
        return self._ordered(plan)
      if arm == "vllm_stable_sort":
        return stable_order.by_sort(plan, work.experts)
      return plan

    def call():
      plan = stable if arm in ("vllm_layer", "vllm_w13") else align()
      s1 = kernels.gemm(x, w13, plan, contract.w13, gates)
      if arm == "vllm_w13":
        return plan, s1
      s2 = kernels.silu_and_mul(s1)
      s3 = kernels.gemm(s2, w2, plan, contract.w2, gates)
      return plan, kernels.combine(s3, inputs.gates.shape[1])

    return call


def _check_plan(arm: str, work: run.Work, number: int, plan) -> None:
  """Checks that a plan is legal, and stable where the arm says so."""
  unused = plan.experts[int(plan.padded.item()) // plan.block_rows :].cpu()
  if arm == "vllm_stable_sort" and not bool((unused == -1).all()):
    raise refusal.UnsupportedError(
        f"{arm} sorts by experts, and this kernel names experts of blocks that"
        f" are not in use: {unused.unique().tolist()}."
    )
  try:
    found = vllm_marlin.to_host(plan, work.inputs[number].expert_ids)
  except ValueError as error:
    raise refusal.HarnessError(
        f"{arm}, request {number}: {error}"
    ) from error
  wanted = work.plans[number]
  if arm != "vllm_native" and not (
      np.array_equal(found.sorted_routes, wanted.sorted_routes)
      and np.array_equal(found.block_experts, wanted.block_experts)
  ):
    raise refusal.HarnessError(
        f"{arm}, request {number}: the plan on the device is not the stable"
        " one."
    )
