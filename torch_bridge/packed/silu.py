"""PyTorch's and vLLM's silu as functions of arrays, for their tables.

Layer: torch_bridge.
"""

from collections.abc import Callable

import numpy as np
import torch

from torch_bridge import tensor_bits
from torch_bridge import vllm_marlin

Silu = Callable[[np.ndarray], np.ndarray]


def aten() -> Silu:
  """Returns ATen's on a CPU: R_16 of a float32 function."""

  def silu(x: np.ndarray) -> np.ndarray:
    return tensor_bits.to_numpy(
        torch.nn.functional.silu(tensor_bits.to_torch(x))
    )

  return silu


def vllm(kernels: vllm_marlin.Kernels) -> Silu:
  """Returns that of vLLM's silu_and_mul: the up half is one."""

  def silu(x: np.ndarray) -> np.ndarray:
    gate = tensor_bits.to_torch(x).cuda().reshape(256, -1)
    s1 = torch.cat([gate, torch.ones_like(gate)], dim=1)
    return tensor_bits.to_numpy(kernels.silu_and_mul(s1)).reshape(-1)

  return silu
