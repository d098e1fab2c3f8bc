"""A kernel's alignment plan with the routes of every expert ascending.

An alignment kernel that hands out rows by atomics decides which experts own
which blocks alike each time, but not the order of an expert's routes. Putting
them in ascending order makes the plan a function of the routing: the stable
plan of `numerics/packed/alignment.py`. Nothing here waits for the host, so it
can be captured in a CUDA graph. Two ways:

`by_sort`, with operations of torch. With R routes and E experts, a row of block
j becomes the key

  expert_j * (R + 1) + route       expert E in blocks that are not in use

in which padding (route R) is the last of its expert, so every key stays within
its expert's rows, and route = key mod (R + 1).

`Kernel`, one launch: a route's row is the first of its expert plus the number
of that expert's routes before it.

Layer: torch_bridge.
"""

import dataclasses

import torch

from moejax.contracts import refusal
from torch_bridge import vllm_marlin

_THREADS = 128  # Of a block.
SOURCE = """
extern "C" __global__ void stable_order(
    const int* rows, const int* experts, int* out, int num_rows,
    int block_rows, int num_routes) {
  int place = blockIdx.x * blockDim.x + threadIdx.x;
  if (place >= num_rows) return;
  int route = rows[place];
  if (route >= num_routes) {  // Padding stays where it is: behind the routes.
    out[place] = num_routes;
    return;
  }
  int num_blocks = num_rows / block_rows;
  int first = place / block_rows, end = first + 1;
  int expert = experts[first];
  while (first > 0 && experts[first - 1] == expert) --first;
  while (end < num_blocks && experts[end] == expert) ++end;
  int rank = 0;
  for (int other = first * block_rows; other < end * block_rows; ++other)
    rank += rows[other] < route;
  out[first * block_rows + rank] = route;
}
"""


def by_sort(
    plan: vllm_marlin.DevicePlan, num_experts: int
) -> vllm_marlin.DevicePlan:
  """Returns the stable plan.

  Args:
    plan: Any plan of the kernel, -1 in the blocks that are not in use. A
      negative expert becomes E by the remainder of E + 1.
    num_experts: E.

  Raises:
    UnsupportedError: the keys do not fit 32 bits.
  """
  routes = plan.num_routes + 1
  if (num_experts + 1) * routes >= 1 << 31:
    raise refusal.UnsupportedError(
        f"{plan.num_routes} routes to {num_experts} experts need keys of more"
        " than 32 bits."
    )
  experts = plan.experts.remainder(num_experts + 1)
  keys = torch.add(
      plan.rows.view(-1, plan.block_rows), experts[:, None], alpha=routes
  )
  rows = keys.view(-1).sort().values.remainder(routes)
  return dataclasses.replace(plan, rows=rows)


class Kernel:
  """The same in one launch."""

  def __init__(self):
    """Compiles the kernel for the current device.

    Raises:
      UnsupportedError: this torch or this machine cannot compile it.
    """
    try:
      self._launch = torch.cuda._compile_kernel(SOURCE, "stable_order")
    except (
        AssertionError, AttributeError, OSError, RuntimeError
    ) as error:  # What torch raises without CUDA, without NVRTC, on a fault.
      raise refusal.UnsupportedError(
          "the kernel of the stable order cannot be compiled here:"
          f" {type(error).__name__}: {error}"
      ) from error

  def __call__(self, plan: vllm_marlin.DevicePlan) -> vllm_marlin.DevicePlan:
    """Returns the stable plan. Padding fills what the kernel left unused."""
    rows = torch.empty_like(plan.rows)
    self._launch(
        grid=(-(-rows.numel() // _THREADS), 1, 1),
        block=(_THREADS, 1, 1),
        args=[
            plan.rows, plan.experts, rows, rows.numel(), plan.block_rows,
            plan.num_routes,
        ],
    )
    return dataclasses.replace(plan, rows=rows)
