"""Portable arithmetic of a backward pass and an optimiser step, defined.

As `portable_oracle.py`: each function is one operation of the graph, computed
in float64 from its operands and rounded once; uncertain elements are settled
exactly. The twin is `gradient_ops.py`; contracts/gradients/backward.py says
which of them make up the gradient of which forward operation.

Layer: numerics.
"""

import numpy as np

from moejax.numerics.portable import error_bounds
from moejax.numerics.portable import exact
from moejax.numerics.portable import portable_oracle


class GradientOracle(portable_oracle.PortableOracle):
  """The operations of a forward pass, and those that only gradients need."""

  def silu_backward(self, g, x, dtype: str) -> np.ndarray:
    """g s (1 + x (1 - s)), s = 1 / (1 + exp(-x)): one rounding."""
    g, x = np.broadcast_arrays(_wide(g), _wide(x))
    with np.errstate(all="ignore"):
      s, rest = 1.0 / (1.0 + np.exp(-x)), 1.0 / (1.0 + np.exp(x))
      y = g * s * (1.0 + x * rest)
      bound = error_bounds.silu_backward(g, x, s, np)
    return self._settle(
        "silu_backward", y, bound, dtype,
        lambda i: exact.silu_backward(g[i], x[i]),
    )

  def softmax_backward(self, g, y, axis: int, dtype: str) -> np.ndarray:
    """y (g - sum(g y)) along one axis, y the rounded softmax: one rounding."""
    g, y = (np.moveaxis(_wide(v), axis, -1) for v in (g, y))
    with np.errstate(all="ignore"):
      value = y * (g - (g * y).sum(-1, keepdims=True))
      bound = error_bounds.softmax_backward(g, y, np)
    out = self._settle(
        "softmax_backward", _positive_zero(value), bound, dtype,
        lambda i: exact.softmax_backward(g[i[:-1]], y[i[:-1]], i[-1]),
    )
    return np.moveaxis(out, -1, axis)

  def log_softmax_backward(self, g, y, axis: int, dtype: str) -> np.ndarray:
    """g - exp(y) sum(g) along one axis, y the rounded result: one rounding."""
    g, y = (np.moveaxis(_wide(v), axis, -1) for v in (g, y))
    with np.errstate(all="ignore"):
      value = g - np.exp(y) * g.sum(-1, keepdims=True)
      bound = error_bounds.log_softmax_backward(g, y, np)
    out = self._settle(
        "log_softmax_backward", _positive_zero(value), bound, dtype,
        lambda i: exact.log_softmax_backward(g[i[:-1]], y[i[:-1]], i[-1]),
    )
    return np.moveaxis(out, -1, axis)

  def nll_loss(self, x, targets, dtype: str) -> np.ndarray:
    """Minus the mean of x [row, class] at the targets; a negative one is none.

    Args:
      x: Log probabilities.
      targets: [row] ints.
      dtype: Of the scalar result.
    """
    rows = np.flatnonzero(np.asarray(targets) >= 0)
    return self.mean(-_wide(x)[rows, targets[rows]], False, dtype)

  def nll_loss_backward(self, g, shape, targets, dtype: str) -> np.ndarray:
    """-g / n at the targets, +0 elsewhere: one division."""
    rows = np.flatnonzero(np.asarray(targets) >= 0)
    out = np.zeros(shape, np.float64)
    with np.errstate(all="ignore"):
      out[rows, targets[rows]] = -(_wide(g) / len(rows))
    return self._certain("nll_loss_backward", out, dtype)

  def add_rows(self, target, index, rows, dtype: str) -> np.ndarray:
    """target[index] += rows, one addition a row, in the order of the rows.

    Args:
      target: [place, ...].
      index: [row] ints; a place hit several times is rounded each time.
      rows: [row, ...].
      dtype: Of the result.
    """
    out = np.array(target)
    for members in in_turn(index):
      at = np.asarray(index)[members]
      out[at] = self.add(out[at], np.asarray(rows)[members], dtype)
    return out

  def fused(self, x, factor, y, z, divides: bool, dtype: str) -> np.ndarray:
    """x + factor y z, or x + factor y / z, as one operation.

    Args:
      x: First term.
      factor: A float64 scalar, not rounded first.
      y: Second factor.
      z: Third factor, or divisor.
      divides: Whether z divides.
      dtype: Of the result.
    """
    x, y, z = np.broadcast_arrays(_wide(x), _wide(y), _wide(z))
    with np.errstate(all="ignore"):
      change = factor * y / z if divides else factor * y * z
      bound = error_bounds.fused(x, change, np)
    return self._settle(
        "fused", _positive_zero(x + change), bound, dtype,
        lambda i: exact.fused(x[i], factor, y[i], z[i], divides),
    )

  def lerp(self, x, y, weight: float, dtype: str) -> np.ndarray:
    """x + weight (y - x), as one operation."""
    x, y = np.broadcast_arrays(_wide(x), _wide(y))
    with np.errstate(all="ignore"):
      value = x + weight * (y - x)
      bound = error_bounds.lerp(x, y, weight, np)
    return self._settle(
        "lerp", _positive_zero(value), bound, dtype,
        lambda i: exact.lerp(x[i], y[i], weight),
    )


def in_turn(index: np.ndarray) -> list[np.ndarray]:
  """Groups rows so that no place occurs twice in a group, order kept.

  Group r holds, of every place in `index`, the row that hits it for the r-th
  time. Adding group by group adds to each place in the order of its rows.
  """
  index = np.asarray(index)
  order = np.argsort(index, kind="stable")
  first = np.r_[True, index[order][1:] != index[order][:-1]][: len(order)]
  start = np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
  turn = np.empty(len(order), np.intp)
  turn[order] = np.arange(len(order)) - start
  return [np.flatnonzero(turn == r) for r in range(turn.max(initial=-1) + 1)]


def _wide(x) -> np.ndarray:
  with np.errstate(invalid="ignore"):
    return np.asarray(x).astype(np.float64)


def _positive_zero(y: np.ndarray) -> np.ndarray:
  return np.where(y == 0, 0.0, y)
