"""What a process may have done on a device before a call that is studied.

Layer: torch_bridge.
"""

from collections.abc import Callable

import numpy as np
import torch

_TENSORS = 4
_LARGEST = 1 << 22  # Bytes.


def nothing(rng: np.random.Generator) -> None:
  """Leaves the device as it is."""
  del rng


def allocations(rng: np.random.Generator) -> None:
  """Fills four tensors of random sizes up to 4 MiB and gives them back.

  The fills run on the device in front of what follows, and the allocator's
  free lists change, so that later tensors lie at other addresses.
  """
  tensors = [
      torch.empty(int(size), dtype=torch.uint8, device="cuda").fill_(1)
      for size in rng.integers(1, _LARGEST, _TENSORS)
  ]
  del tensors


PRELUDES: dict[str, Callable[[np.random.Generator], None]] = {
    "none": nothing,
    "allocations": allocations,
}


def describe() -> dict[str, str]:
  """{name: what it does}, for a record."""
  return {
      name: prelude.__doc__.split("\n")[0]
      for name, prelude in PRELUDES.items()
  }
