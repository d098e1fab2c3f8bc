"""What a running model computes, operation by operation, with its place.

The mode stands on top of the arithmetic (native, or `PortableMode` below it)
and copies the result of each operation that computes, rounds down or selects,
together with the name of the module that ran it. It changes nothing: it calls
the operation and returns what that returned.

Layer: torch_bridge.
"""

from collections.abc import Iterator
import contextlib
import dataclasses

import numpy as np
import torch
from torch.utils import _python_dispatch

from torch_bridge import aten_names
from torch_bridge import tensor_bits


@dataclasses.dataclass(slots=True)
class Event:
  """One operation.

  Attributes:
    scope: Dotted name of the innermost running module.
    operation: Name without overload; "cast" for a cast to a narrower float,
      "from_int" for one from integers, "append" for a concatenation along the
      last but one axis, "lookup" for integers taken from a table.
    value: A copy of the result; of the indices, where values are selected.
  """

  scope: str
  operation: str
  value: np.ndarray


class OperationTrace(_python_dispatch.TorchDispatchMode):
  """Collects events between `begin` and `take`."""

  def __init__(self):
    super().__init__()
    self._scopes: list[str] = []
    self._events: list[Event] = []

  @contextlib.contextmanager
  def following(self, model: torch.nn.Module) -> Iterator["OperationTrace"]:
    """Watches which module runs, and traces, while the context is open."""
    handles = []
    for name, module in model.named_modules():

      def enter(module, args, name=name):
        del module, args
        self._scopes.append(name)

      def leave(module, args, output):
        del module, args, output
        self._scopes.pop()

      handles.append(module.register_forward_pre_hook(enter))
      handles.append(module.register_forward_hook(leave))
    try:
      with self:
        yield self
    finally:
      self._scopes.clear()
      for handle in handles:
        handle.remove()

  def take(self) -> list[Event]:
    """Returns the events since the last call, in order of execution."""
    events, self._events = self._events, []
    return events

  def __torch_dispatch__(self, func, types, args=(), kwargs=None):
    del types
    result = func(*args, **(kwargs or {}))
    operation = _kind(func, args, result)
    if operation is not None:
      value = result[1] if operation in ("topk", "sort") else result
      scope = self._scopes[-1] if self._scopes else ""
      self._events.append(
          Event(scope, operation, tensor_bits.to_numpy(value))
      )
    return result


_SELECTIONS = ("topk", "sort", "embedding", "nonzero")


def _kind(func, args, result) -> str | None:
  """Returns the event's name of an operation, or None if it only moves."""
  name = aten_names.base_name(func)
  if name in _SELECTIONS:
    return name
  if not isinstance(result, torch.Tensor):
    return None
  if name == "_to_copy":
    return _cast_kind(args[0].dtype, result.dtype)
  if name == "cat" and len(args) > 1 and args[1] == -2:
    return "append"
  if name == "index" and result.dtype == torch.int64:
    return "lookup"
  if name in aten_names.EXACT or not result.dtype.is_floating_point:
    return None
  return name


def _cast_kind(before: torch.dtype, after: torch.dtype) -> str | None:
  if not after.is_floating_point or before == after:
    return None
  if not before.is_floating_point:
    return "from_int"
  narrower = torch.finfo(after).bits < torch.finfo(before).bits
  return "cast" if narrower else None
