"""vLLM's kernels made of the NumPy oracle, on the CPU."""

import numpy as np
import torch

from moejax.numerics.packed import activation
from moejax.numerics.packed import alignment
from moejax.numerics.packed import gemm
from moejax.numerics.packed import oracle
from torch_bridge import tensor_bits
from torch_bridge import vllm_marlin


def any_plan(expert_ids, num_experts, block_rows, rng):
  """A legal plan with each expert's routes in a random order."""
  flat = np.asarray(expert_ids).reshape(-1)
  orders = {
      int(e): rng.permutation(np.flatnonzero(flat == e))
      for e in np.unique(flat)
  }
  return alignment.route_blocks(
      expert_ids, num_experts, block_rows, orders=orders
  )


class Kernels:
  """In the place of `vllm_marlin.Kernels`; weights are the AWQ operands."""

  def __init__(self, layer, contract):
    """Takes what the repacked weights no longer tell."""
    self._layer = layer
    self._contract = contract
    self._rng = np.random.default_rng(0)
    self.plans = []

  def weights(self, repacked):
    """The part of the layer that was repacked, by its number."""
    words = [vllm_marlin.repack(o)[0] for o in self._layer[0]]
    same = len(words[0]) == len(repacked[0][0]) and all(
        np.array_equal(a, b[0]) for a, b in zip(words, repacked, strict=True)
    )
    return 0 if same else 1

  def align_on_device(self, ids, num_experts, block_rows):
    assert ids.dtype == torch.int32
    plan = any_plan(ids.numpy().astype(int), num_experts, block_rows, self._rng)
    self.plans.append(plan)
    return vllm_marlin.to_device(plan, num_experts, "cpu")

  def gemm(self, x, part, plan, contract, gates):
    ids = plan.rows.numpy().reshape(-1, plan.block_rows)
    used = int(plan.padded.item()) // plan.block_rows
    blocks = alignment.RouteBlocks(
        ids[:used], plan.experts.numpy()[:used], plan.num_routes
    )
    found = gemm.packed_gemm_oracle(
        tensor_bits.to_numpy(x), self._layer[part], blocks, contract,
        **({} if contract.gate_site == "none" else {"gates": gates.numpy()}),
    )
    return tensor_bits.to_torch(found)

  def silu_and_mul(self, s1):
    found = activation.silu_and_mul(tensor_bits.to_numpy(s1), self._contract)
    return tensor_bits.to_torch(found)

  def combine(self, s3, top_k):
    return tensor_bits.to_torch(oracle.combine_slots(
        tensor_bits.to_numpy(s3), top_k, self._contract
    ))


class Replayed:
  """In the place of a CUDA graph: calls that are run again."""

  def __init__(self, calls):
    """Runs them once."""
    self._calls = calls
    self.results = [call() for call in calls]

  def sample(self) -> int:
    """Runs them; the time is made up."""
    self.results[:] = [call() for call in self._calls]
    return 7
