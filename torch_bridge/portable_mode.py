"""Portable arithmetic for any unmodified PyTorch model.

A dispatch mode sees every aten operation of a running model. Views, casts and
integer work pass through. An operation that computes is carried out by
`numerics.portable_oracle`: float64 from the operands, one rounding to the dtype
that the operation would have returned. An operation with floating-point inputs
that is in neither class raises `UnsupportedError`, because a guess would make
the verdict worthless.

  with PortableMode() as mode:
    logits = model(ids).logits
  assert mode.oracle.certificate.complete

The operations are the model's own: `softmax`, `silu` or `mean` is one operation
with one rounding, not the primitives inside it. A selection (`topk`, `sort`)
among equal values is left open by PyTorch and differs between its own kernels;
here the lower index comes first, as the router's contract says, and the
certificate counts how many selections had a choice.

Layer: torch_bridge.
"""

from collections.abc import Callable
import math

import numpy as np
import torch
from torch.utils import _python_dispatch
from torch.utils import _pytree

from moejax.contracts import refusal
from moejax.numerics.portable import portable_oracle
from torch_bridge import aten_names
from torch_bridge import tensor_bits

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class PortableMode(_python_dispatch.TorchDispatchMode):
  """Runs every operation in float64 with one rounding."""

  # {name of an operation: what carries it out}; filled below.
  handlers: dict[str, Callable] = {}

  def __init__(self, oracle: portable_oracle.PortableOracle | None = None):
    super().__init__()
    self.oracle = oracle or portable_oracle.PortableOracle()

  def __torch_dispatch__(self, func, types, args=(), kwargs=None):
    del types
    kwargs = kwargs or {}
    name = aten_names.base_name(func)
    computes = _computes(name, args, kwargs)
    if name in aten_names.SELECTIONS and computes:
      return _SELECTIONS[name](self.oracle, args, kwargs)
    adds = name.startswith("index_put") and _accumulates(args, kwargs)
    if (name in aten_names.EXACT or not computes) and not adds:
      return func(*args, **kwargs)
    handler = self.handlers.get(name) or self.handlers.get(
        name.removesuffix("_")
    )
    if handler is None:
      raise refusal.UnsupportedError(
          f"{func}: portable arithmetic does not know this operation on"
          " floating-point values."
      )
    result = handler(self.oracle, args, kwargs)
    if "out" in kwargs:
      return kwargs["out"].copy_(result)
    if aten_names.is_in_place(func):
      return args[0].copy_(result)
    return result


def _accumulates(args, kwargs) -> bool:
  """An `index_put` may add instead of write; that is no movement of values."""
  return args[3] if len(args) > 3 else kwargs.get("accumulate", False)


def _computes(name: str, args, kwargs) -> bool:
  """Whether floating-point values go in, or come out of a true division."""
  if name in ("div", "div_", "reciprocal", "mean"):
    return True
  leaves = _pytree.tree_leaves((args, kwargs))
  return any(
      isinstance(x, torch.Tensor) and x.dtype in _FLOATS for x in leaves
  )


def array_of(x):
  """The bits of a tensor as an array; anything else as it is."""
  return tensor_bits.to_numpy(x) if isinstance(x, torch.Tensor) else x


def tensor_of(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
  """The bits of an array as a tensor, on the device of another."""
  return tensor_bits.to_torch(array).to(like.device)


def name_of(dtype: torch.dtype, func: str) -> str:
  """The full name of a floating dtype; refuses others."""
  if dtype not in (*_FLOATS, torch.float64):
    raise refusal.UnsupportedError(f"{func} with a result of {dtype}.")
  return tensor_bits.dtype_name(dtype)


def refuse_unless(condition: bool, what: str) -> None:
  """Raises UnsupportedError unless the condition holds."""
  if not condition:
    raise refusal.UnsupportedError(f"{what} is not covered in portable form.")


def _binary(method: str, swap: bool = False) -> Callable:
  def run(oracle, args, kwargs):
    x, y = args[:2]
    refuse_unless(kwargs.get("alpha", 1) == 1, f"{method} with alpha")
    refuse_unless(
        kwargs.get("rounding_mode") is None, f"{method} with rounding_mode"
    )
    dtype = torch.result_type(x, y)
    if not dtype.is_floating_point:
      dtype = torch.get_default_dtype()
    left, right = (y, x) if swap else (x, y)
    like = x if isinstance(x, torch.Tensor) else y
    out = getattr(oracle, method)(
        array_of(left), array_of(right), name_of(dtype, method)
    )
    return tensor_of(out, like)

  return run


def _unary(name: str) -> Callable:
  def run(oracle, args, kwargs):
    x = args[0]
    if name == "softplus":
      refuse_unless(
          tuple(args[1:]) in ((), (1,), (1, 20), (1.0, 20.0)),
          f"softplus{tuple(args[1:])}",
      )
    else:
      refuse_unless(len(args) == 1, f"{name} with {len(args)} arguments")
    dtype = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()
    return tensor_of(oracle.unary(name, array_of(x), name_of(dtype, name)), x)

  return run


def _last_axis(x: np.ndarray, axes, keepdim: bool):
  """Moves the reduced axes into one last axis; returns it and a restorer."""
  axes = range(x.ndim) if axes is None or not len(axes) else axes
  axes = sorted(a % x.ndim for a in axes)
  kept = [a for a in range(x.ndim) if a not in axes]
  width = math.prod(x.shape[a] for a in axes)
  moved = x.transpose(*kept, *axes).reshape(*[x.shape[a] for a in kept], width)
  shape = [
      1 if a in axes else x.shape[a]
      for a in range(x.ndim)
      if keepdim or a not in axes
  ]
  return moved, lambda out: out.reshape(shape)


def _reduction(method: str) -> Callable:
  def run(oracle, args, kwargs):
    x = args[0]
    axes = args[1] if len(args) > 1 else None
    axes = [axes] if isinstance(axes, int) else axes
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    dtype = kwargs.get("dtype") or x.dtype
    moved, restore = _last_axis(array_of(x), axes, keepdim)
    name = name_of(dtype, method)
    if method == "mean":
      out = oracle.mean(moved, False, name)
    else:
      out = oracle.sum(moved, -1, False, name)
    return tensor_of(restore(out), x)

  return run


def _cumsum(oracle, args, kwargs):
  x, axis = args[:2]
  dtype = kwargs.get("dtype") or x.dtype
  if not dtype.is_floating_point:
    # A count of whole numbers kept in floats: exact below 2**24.
    values = array_of(x).astype(np.float64)
    refuse_unless((values == np.rint(values)).all(), "cumsum to integers")
    sums = np.cumsum(values, axis)
    return torch.from_numpy(sums).to(x.device, dtype)
  name = name_of(dtype, "cumsum")
  return tensor_of(oracle.cumsum(array_of(x), axis, name), x)


def _softmax(method: str) -> Callable:
  def run(oracle, args, kwargs):
    x, axis = args[:2]
    to_float32 = args[2] if len(args) > 2 and args[2] is True else False
    dtype = torch.float32 if to_float32 else kwargs.get("dtype") or x.dtype
    out = getattr(oracle, method)(array_of(x), axis, name_of(dtype, method))
    return tensor_of(out, x)

  return run


def _power(oracle, args, kwargs):
  del kwargs
  base, exponent = args[:2]
  like = base if isinstance(base, torch.Tensor) else exponent
  name = name_of(torch.result_type(base, exponent), "pow")
  return tensor_of(oracle.power(array_of(base), array_of(exponent), name), like)


def _matmul(oracle, args, kwargs):
  del kwargs
  a, b = args[:2]
  name = name_of(a.dtype, "matmul")
  return tensor_of(oracle.matmul(array_of(a), array_of(b), name), a)


def _add_matmul(oracle, args, kwargs):
  bias, a, b = args[:3]
  scales = (kwargs.get("beta", 1), kwargs.get("alpha", 1))
  refuse_unless(scales == (1, 1), f"addmm with beta, alpha = {scales}")
  name = name_of(a.dtype, "addmm")
  out = oracle.matmul(array_of(a), array_of(b), name, array_of(bias))
  return tensor_of(out, a)


def _grouped_matmul(oracle, args, kwargs):
  rows, weight = args[:2]
  ends = args[2] if len(args) > 2 else kwargs["offs"]
  name = name_of(rows.dtype, "_grouped_mm")
  a, b = array_of(rows), array_of(weight)
  out = np.zeros((a.shape[0], b.shape[-1]), a.dtype)
  start = 0
  for group, end in enumerate(ends.tolist()):
    if end > start:
      out[start:end] = oracle.matmul(a[start:end], b[group], name)
    start = end
  return tensor_of(out, rows)


def _index_add(oracle, args, kwargs):
  """One addition a row. A row hit twice has no order, so it is refused."""
  target, axis, index, source = args[:4]
  refuse_unless(kwargs.get("alpha", 1) == 1, "index_add with alpha")
  rows = array_of(index)
  refuse_unless(len(np.unique(rows)) == len(rows), "index_add to equal rows")
  out = np.moveaxis(array_of(target), axis, 0)
  added = oracle.add(
      out[rows],
      np.moveaxis(array_of(source), axis, 0),
      name_of(target.dtype, "index_add"),
  )
  out[rows] = added
  return tensor_of(np.moveaxis(out, 0, axis), target)


def _ordered(oracle, x, axis: int, descending: bool, count: int):
  """Values and indices along an axis; among equals the lower index first."""
  values = np.moveaxis(array_of(x), axis, -1)
  wide = values.astype(np.float64)
  order = np.argsort(-wide if descending else wide, axis=-1, kind="stable")
  falling = np.take_along_axis(wide, order, -1)
  reach = min(count + 1, falling.shape[-1])
  ties = (falling[..., 1:reach] == falling[..., : reach - 1]).any(-1)
  oracle.certificate.note_ties(int(ties.sum()))
  order = order[..., :count]
  picked = np.take_along_axis(values, order, -1)
  return (
      tensor_of(np.moveaxis(picked, -1, axis), x),
      torch.from_numpy(np.moveaxis(order, -1, axis).copy()).to(x.device),
  )


def _index_put(oracle, args, kwargs):
  """Reached only where it accumulates."""
  del oracle, args, kwargs
  refuse_unless(False, "index_put with accumulate")


def _topk(oracle, args, kwargs):
  x, count = args[:2]
  axis = args[2] if len(args) > 2 else kwargs.get("dim", -1)
  largest = args[3] if len(args) > 3 else kwargs.get("largest", True)
  return _ordered(oracle, x, axis, largest, count)


def _sort(oracle, args, kwargs):
  x = args[0]
  axis = args[1] if len(args) > 1 else kwargs.get("dim", -1)
  falling = args[2] if len(args) > 2 else kwargs.get("descending", False)
  return _ordered(oracle, x, axis, falling, x.shape[axis])


_SELECTIONS = {"topk": _topk, "sort": _sort}
PortableMode.handlers = {
    "add": _binary("add"),
    "sub": _binary("subtract"),
    "rsub": _binary("subtract", swap=True),
    "mul": _binary("multiply"),
    "div": _binary("divide"),
    "pow": _power,
    "mean": _reduction("mean"),
    "sum": _reduction("sum"),
    "cumsum": _cumsum,
    "_softmax": _softmax("softmax"),
    "softmax": _softmax("softmax"),
    "_log_softmax": _softmax("log_softmax"),
    "log_softmax": _softmax("log_softmax"),
    "mm": _matmul,
    "bmm": _matmul,
    "matmul": _matmul,
    "addmm": _add_matmul,
    "baddbmm": _add_matmul,
    "_grouped_mm": _grouped_matmul,
    "grouped_mm_fallback": _grouped_matmul,
    "index_add": _index_add,
    "index_put": _index_put,
    **{name: _unary(name) for name in portable_oracle.UNARY},
}
