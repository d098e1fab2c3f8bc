"""torch tensors to NumPy arrays and back by their bits.

NumPy has no bfloat16 of its own and torch's `.numpy()` refuses it; a detour
through float32 would be exact but hides NaN payloads on the way back. Here the
bytes are viewed, never converted.

Layer: torch_bridge.
"""

import ml_dtypes
import numpy as np
import torch

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
  """Returns a copy of a tensor's values, bit for bit."""
  tensor = tensor.detach().cpu().contiguous()
  if tensor.dtype == torch.bfloat16:
    return tensor.view(torch.int16).numpy().copy().view(_BFLOAT16)
  return tensor.numpy().copy()


def to_torch(array: np.ndarray) -> torch.Tensor:
  """Returns a tensor of an array's values, bit for bit; shares no memory."""
  array = np.array(array, order="C", copy=True)
  if array.dtype == _BFLOAT16:
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
  return torch.from_numpy(array)


def dtype_name(dtype: torch.dtype) -> str:
  """Returns the full name of a torch dtype, as contracts write it."""
  return str(dtype).removeprefix("torch.")
