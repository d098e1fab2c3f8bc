"""Portable arithmetic for the backward pass and the optimiser of a model.

As `portable_mode.py`, with the aten operations that autograd's formulas and
torch's optimisers run. Each is one operation with one rounding; where aten adds
rows to one place (`index_put` with accumulate, the gradient of an embedding)
each addition rounds, in the order of the rows, which is what its CPU kernels
do. Additions of several cotangents at one tensor are operations that the engine
runs itself, from the last use of the tensor to the first.

Layer: torch_bridge.
"""

import numpy as np
import torch

from moejax.numerics.portable import certificate as certificate_lib
from moejax.numerics.portable import gradient_oracle
from torch_bridge import portable_mode as base

# reduction="mean" in aten's integers.
_MEAN = 1


class BackwardMode(base.PortableMode):
  """Runs a forward pass, its backward pass and an optimiser's step."""

  def __init__(self, certificate: certificate_lib.Certificate | None = None):
    super().__init__(gradient_oracle.GradientOracle(certificate))

  def __torch_dispatch__(self, func, types, args=(), kwargs=None):
    if func is torch.ops.aten.sort.default and not args[0].is_floating_point():
      # Rows of one expert: which comes first is left open, so the lower index.
      axis, falling = (*args[1:], *(-1, False)[len(args) - 1 :])
      return torch.ops.aten.sort.stable(
          args[0], stable=True, dim=axis, descending=falling
      )
    return super().__torch_dispatch__(func, types, args, kwargs)


def _add(oracle, args, kwargs):
  alpha = kwargs.get("alpha", 1)
  if alpha == 1:
    return base.PortableMode.handlers["add"](oracle, args, kwargs)
  x, y = args[:2]
  out = oracle.fused(
      base.array_of(x), alpha, base.array_of(y), 1.0, False,
      base.name_of(x.dtype, "add"),
  )
  return base.tensor_of(out, x)


def _fused(divides: bool):
  def run(oracle, args, kwargs):
    x, y, z = args[:3]
    out = oracle.fused(
        *(base.array_of(x), kwargs.get("value", 1)),
        *(base.array_of(y), base.array_of(z), divides),
        base.name_of(x.dtype, "addcdiv" if divides else "addcmul"),
    )
    return base.tensor_of(out, x)

  return run


def _lerp(oracle, args, kwargs):
  del kwargs
  x, y, weight = args
  base.refuse_unless(isinstance(weight, float), "lerp with a tensor of weights")
  name = base.name_of(x.dtype, "lerp")
  out = oracle.lerp(base.array_of(x), base.array_of(y), weight, name)
  return base.tensor_of(out, x)


def _silu_backward(oracle, args, kwargs):
  del kwargs
  g, x = args
  name = base.name_of(x.dtype, "silu_backward")
  out = oracle.silu_backward(base.array_of(g), base.array_of(x), name)
  return base.tensor_of(out, x)


def _softmax_backward(method: str):
  def run(oracle, args, kwargs):
    del kwargs
    g, y, axis, dtype = args
    base.refuse_unless(dtype == y.dtype, f"{method} from {y.dtype} to {dtype}")
    out = getattr(oracle, method)(
        base.array_of(g), base.array_of(y), axis, base.name_of(dtype, method)
    )
    return base.tensor_of(out, y)

  return run


def _checked_targets(name, targets, weight, reduction, ignored) -> np.ndarray:
  """Targets as integers, -1 for rows that take no part."""
  base.refuse_unless(
      weight is None and reduction == _MEAN,
      f"{name} with weights or reduction={reduction}",
  )
  targets = base.array_of(targets)
  base.refuse_unless(targets.ndim == 1, f"{name} of {targets.ndim} axes")
  return np.where(targets == ignored, -1, targets)


def _nll_loss(oracle, args, kwargs):
  del kwargs
  x, *rest = args
  targets = _checked_targets("nll_loss", *rest)
  name = base.name_of(x.dtype, "nll_loss")
  out = oracle.nll_loss(base.array_of(x), targets, name)
  count = np.asarray((targets >= 0).sum()).astype(out.dtype)
  return base.tensor_of(out, x), base.tensor_of(count, x)


def _nll_loss_backward(oracle, args, kwargs):
  del kwargs
  g, x, *rest, _ = args
  targets = _checked_targets("nll_loss_backward", *rest)
  name = base.name_of(x.dtype, "nll_loss_backward")
  out = oracle.nll_loss_backward(
      base.array_of(g), tuple(x.shape), targets, name
  )
  return base.tensor_of(out, x)


def _embedding_backward(oracle, args, kwargs):
  del kwargs
  g, tokens, num_rows, padding, by_frequency = args
  base.refuse_unless(not by_frequency, "an embedding scaled by frequency")
  index = base.array_of(tokens).reshape(-1)
  rows = base.array_of(g).reshape(index.size, -1)
  kept = index != padding
  start = np.zeros((num_rows, rows.shape[1]), rows.dtype)
  name = base.name_of(g.dtype, "embedding_dense_backward")
  return base.tensor_of(
      oracle.add_rows(start, index[kept], rows[kept], name), g
  )


def _index_put(oracle, args, kwargs):
  """With accumulate: one addition a row, in the order of the rows."""
  del kwargs
  target, index, rows = args[:3]
  base.refuse_unless(
      target.is_floating_point() and all(i is not None for i in index),
      "index_put with accumulate of integers, or along some axes only",
  )
  places = tuple(base.array_of(i).reshape(-1) for i in index)
  shape = tuple(target.shape)
  flat = np.ravel_multi_index(places, shape[: len(places)])
  rest = shape[len(places) :]
  start = base.array_of(target).reshape(-1, *rest)
  added = base.array_of(rows).reshape(len(flat), *rest)
  name = base.name_of(target.dtype, "index_put")
  out = oracle.add_rows(start, flat, added, name)
  return base.tensor_of(out.reshape(shape), target)


def _grouped_matmul(oracle, args, kwargs):
  """[m, row] times [row, n], the rows in groups: [group, m, n]."""
  a, b = args[:2]
  if b.ndim == 3:
    return base.PortableMode.handlers["_grouped_mm"](oracle, args, kwargs)
  ends = args[2] if len(args) > 2 else kwargs["offs"]
  name = base.name_of(a.dtype, "_grouped_mm")
  left, right = base.array_of(a), base.array_of(b)
  out = np.zeros((len(ends), left.shape[0], right.shape[1]), left.dtype)
  start = 0
  for group, end in enumerate(ends.tolist()):
    if end > start:
      out[group] = oracle.matmul(left[:, start:end], right[start:end], name)
    start = end
  return base.tensor_of(out, a)


BackwardMode.handlers = base.PortableMode.handlers | {
    "add": _add,
    "addcmul": _fused(False),
    "addcdiv": _fused(True),
    "lerp": _lerp,
    "silu_backward": _silu_backward,
    "_softmax_backward_data": _softmax_backward("softmax_backward"),
    "_log_softmax_backward_data": _softmax_backward("log_softmax_backward"),
    "nll_loss_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "embedding_dense_backward": _embedding_backward,
    "index_put": _index_put,
    "_grouped_mm": _grouped_matmul,
}
