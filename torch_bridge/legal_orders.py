"""The reference under another order, and along a given route.

Two modes over an unmodified model. `ReversedContraction` adds every matrix
product from the far end of its contracting axis: as legal as the native order,
so the difference between the two is the reference's own uncertainty. Where a
router stands near a boundary, such a difference selects another expert and
everything after it is another computation; `ForcedRoutes` keeps the selection,
so that runs stay comparable and the selection is judged by its margin instead.
The same holds for an indexer, which selects what attention may see.

Layer: torch_bridge.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils import _python_dispatch

from torch_bridge import aten_names

_PRODUCTS = {"mm": 0, "bmm": 0, "_grouped_mm": 0, "addmm": 1, "baddbmm": 1}


class ReversedContraction(_python_dispatch.TorchDispatchMode):
  """Reverses the contracting axis of both operands of every product."""

  def __torch_dispatch__(self, func, types, args=(), kwargs=None):
    del types
    name = aten_names.base_name(func)
    if name in _PRODUCTS:
      at = _PRODUCTS[name]
      args = list(args)
      args[at] = args[at].flip(-1)
      # A grouped product needs its weight to stay as it is laid out.
      flipped = args[at + 1].transpose(-1, -2).flip(-1)
      args[at + 1] = flipped.transpose(-1, -2)
    return func(*args, **(kwargs or {}))


class ForcedRoutes(_python_dispatch.TorchDispatchMode):
  """Replaces each `topk` by given indices, in the order of the calls."""

  def __init__(self, ids: Iterator[np.ndarray]):
    """Takes the indices of one call after the other, [token, at least k]."""
    super().__init__()
    self._ids = ids

  def __torch_dispatch__(self, func, types, args=(), kwargs=None):
    del types
    if aten_names.base_name(func) != "topk":
      return func(*args, **(kwargs or {}))
    scores, count = args[:2]
    ids = next(self._ids)[..., :count].astype(np.int64)
    ids = torch.from_numpy(ids.reshape(*scores.shape[:-1], count))
    ids = ids.to(scores.device)
    return torch.gather(scores, -1, ids), ids
