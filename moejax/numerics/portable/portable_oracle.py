"""Portable arithmetic, defined: float64 from the operands, rounded once.

Every function is one operation of a model's graph. It takes arrays of any
float dtype, computes in float64 with NumPy, rounds to float32 and from there to
`dtype` (nearest even each time), and enters the certificate. An element whose
float64 value lies within its error bound of a rounding boundary is computed
again exactly, so the result is

  R_dtype(R_FP32(R_FP64(exact value)))

on every machine. Sums that vanish are +0. Subnormals are kept. The twin is
`portable_ops.py`; the torch side of the bridge runs on this file.

Layer: numerics.
"""

from collections.abc import Callable

import numpy as np

from moejax.contracts import combine as combine_contract
from moejax.numerics import formats
from moejax.numerics import ordered_combine
from moejax.numerics.portable import certificate as certificate_lib
from moejax.numerics.portable import error_bounds
from moejax.numerics.portable import exact
from moejax.numerics import rounding

UNIT = formats.FLOAT64.unit_roundoff


def _sigmoid(x):
  return 1.0 / (1.0 + np.exp(-x))


_UNARY: dict[str, Callable] = {
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sqrt": np.sqrt,
    "reciprocal": lambda x: 1.0 / x,
    "exp": np.exp,
    "log": np.log,
    "cos": np.cos,
    "sin": np.sin,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "silu": lambda x: x / (1.0 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(x, 0.0),
}
UNARY = tuple(_UNARY)


def unary_value(name: str, x: np.ndarray) -> np.ndarray:
  """A function of one float64 value in float64, not yet rounded."""
  with np.errstate(all="ignore"):
    return _UNARY[name](x)


class PortableOracle:
  """The operations; the certificate collects what they did."""

  def __init__(self, certificate: certificate_lib.Certificate | None = None):
    self.certificate = certificate or certificate_lib.Certificate()

  def add(self, x, y, dtype: str) -> np.ndarray:
    """x + y. One float64 operation: certain."""
    with np.errstate(all="ignore"):
      return self._certain("add", _wide(x) + _wide(y), dtype)

  def subtract(self, x, y, dtype: str) -> np.ndarray:
    """x - y. One float64 operation: certain."""
    with np.errstate(all="ignore"):
      return self._certain("subtract", _wide(x) - _wide(y), dtype)

  def multiply(self, x, y, dtype: str) -> np.ndarray:
    """x * y. One float64 operation: certain."""
    with np.errstate(all="ignore"):
      return self._certain("multiply", _wide(x) * _wide(y), dtype)

  def divide(self, x, y, dtype: str) -> np.ndarray:
    """x / y. One float64 operation: certain."""
    with np.errstate(all="ignore"):
      return self._certain("divide", _wide(x) / _wide(y), dtype)

  def power(self, base, x, dtype: str) -> np.ndarray:
    """base ** x; a square is one multiplication."""
    base, x = np.broadcast_arrays(_wide(base), _wide(x))
    if (x == 2).all():
      return self.multiply(base, base, dtype)
    with np.errstate(all="ignore"):
      y = np.power(base, x)
    return self._settle(
        "power",
        y,
        error_bounds.relative("power", y, np),
        dtype,
        lambda i: exact.power(base[i], x[i]),
    )

  def unary(self, name: str, x, dtype: str) -> np.ndarray:
    """A function of one value; `UNARY` lists the names."""
    x = _wide(x)
    y = unary_value(name, x)
    return self._settle(
        name,
        y,
        error_bounds.relative(name, y, np),
        dtype,
        lambda i: exact.unary(name, x[i]),
    )

  def sum(self, x, axis: int, keepdims: bool, dtype: str) -> np.ndarray:
    """The sum along one axis."""
    x = np.moveaxis(_wide(x), axis, -1)
    with np.errstate(invalid="ignore"):
      y = _positive_zero(x.sum(-1))
      bound = error_bounds.total(x, np)[..., 0]
    out = self._settle(
        "sum", y, bound, dtype, lambda i: exact.total(x[i].tolist())
    )
    return np.expand_dims(out, axis) if keepdims else out

  def mean(self, x, keepdims: bool, dtype: str) -> np.ndarray:
    """The mean along the last axis."""
    x = _wide(x)
    out = self._settle(
        "mean",
        _positive_zero(x.mean(-1)),
        error_bounds.mean(x, np)[..., 0],
        dtype,
        lambda i: exact.mean(x[i]),
    )
    return out[..., None] if keepdims else out

  def cumsum(self, x, axis: int, dtype: str) -> np.ndarray:
    """Sums of growing prefixes along one axis, each rounded on its own."""
    x = np.moveaxis(_wide(x), axis, -1)
    bound = np.cumsum(np.abs(x), -1) * x.shape[-1] * 1.001
    out = self._settle(
        "cumsum",
        _positive_zero(np.cumsum(x, -1)),
        bound,
        dtype,
        lambda i: exact.total(x[i[:-1]][: i[-1] + 1].tolist()),
    )
    return np.moveaxis(out, -1, axis)

  def softmax(self, x, axis: int, dtype: str) -> np.ndarray:
    """exp(x - max) / sum(exp(x - max)) along one axis: one rounding."""
    x = np.moveaxis(_wide(x), axis, -1)
    with np.errstate(all="ignore"):
      shifted = x - x.max(-1, keepdims=True)
      weights = np.exp(shifted)
      y = weights / weights.sum(-1, keepdims=True)
    out = self._settle(
        "softmax",
        y,
        error_bounds.softmax(shifted, y, np),
        dtype,
        lambda i: exact.softmax(x[i[:-1]], i[-1]),
    )
    return np.moveaxis(out, -1, axis)

  def log_softmax(self, x, axis: int, dtype: str) -> np.ndarray:
    """x - log(sum(exp(x))) along one axis: one rounding."""
    x = np.moveaxis(_wide(x), axis, -1)
    shifted = x - x.max(-1, keepdims=True)
    y = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    bound = np.abs(y) + np.abs(shifted) + 1.4 * x.shape[-1] + 30.0
    out = self._settle(
        "log_softmax",
        y,
        bound,
        dtype,
        lambda i: exact.log_softmax(x[i[:-1]], i[-1]),
    )
    return np.moveaxis(out, -1, axis)

  def matmul(self, a, b, dtype: str, bias=None) -> np.ndarray:
    """bias + a @ b over [..., m, k] and [..., k, n]: one rounding."""
    a, b = _wide(a), _wide(b)
    with np.errstate(all="ignore"):
      y = a @ b
      bound = error_bounds.dot(
          error_bounds.norm(a, np), error_bounds.norm(b, np, -2), a.shape[-1]
      )
    if bias is not None:
      bias = np.broadcast_to(_wide(bias), y.shape)
      y, bound = y + bias, bound + 2 * np.abs(bias)

    def element(i):
      row = np.broadcast_to(a, (*y.shape[:-2], *a.shape[-2:]))[i[:-1]]
      column = np.broadcast_to(b, (*y.shape[:-2], *b.shape[-2:]))[i[:-2]]
      start = 0.0 if bias is None else float(bias[i])
      return exact.dot(row, column[:, i[-1]], start)

    return self._settle("matmul", _positive_zero(y), bound, dtype, element)

  def combine(
      self,
      terms: np.ndarray,
      order: np.ndarray,
      contract: combine_contract.CombineContract,
  ) -> np.ndarray:
    """Adds terms [token, slot, embed] as one operation or as several.

    See `is_one_sum`: then it is one float64 sum, rounded once to float32 and
    once to contract.output. Else every addition is an operation of the graph
    and rounds to the accumulator, in order.

    Raises:
      NotImplementedError: the contract flushes subnormals or contracts.
    """
    refuse_unportable(contract)
    if not is_one_sum(contract):
      out = ordered_combine.add_terms_oracle(terms, order, contract)
      return self._certain_array("combine", out)
    wide = _wide(terms)
    y = wide.sum(1)
    negative = np.signbit(wide).all(1) & (contract.start == "first")
    y = np.where(y == 0, np.where(negative, -0.0, 0.0), y)
    return self._settle(
        "combine",
        y,
        error_bounds.total(wide, np, axis=1)[:, 0],
        contract.output,
        lambda i: exact.total(wide[i[0], :, i[1]].tolist()),
    )

  def _certain(self, name: str, y: np.ndarray, dtype: str) -> np.ndarray:
    return self._certain_array(name, rounding.round_oracle(y, dtype))

  def _certain_array(self, name: str, out: np.ndarray) -> np.ndarray:
    self.certificate.note(name, out.size)
    return out

  def _settle(
      self,
      name: str,
      y: np.ndarray,
      bound: np.ndarray,
      dtype: str,
      element: Callable[[tuple[int, ...]], float],
  ) -> np.ndarray:
    """Rounds y; recomputes the elements that y +- bound * u rounds apart."""
    y = np.asarray(y, np.float64)
    out = np.array(rounding.round_oracle(y, dtype))
    uncertain = is_uncertain(y, bound * UNIT, dtype)
    places = list(map(tuple, np.argwhere(uncertain).tolist()))
    self.certificate.note(name, y.size, len(places))
    if places:
      exact_values = np.array([element(i) for i in places], np.float64)
      out[uncertain] = rounding.round_oracle(exact_values, dtype)
      self.certificate.note_recomputed(name, len(places))
    return out


def is_uncertain(y: np.ndarray, reach: np.ndarray, dtype: str) -> np.ndarray:
  """Whether some value within `reach` of y rounds to other bits than y."""
  uint = formats.of(dtype).uint
  with np.errstate(all="ignore"):
    low = rounding.round_oracle(y - reach, dtype)
    high = rounding.round_oracle(y + reach, dtype)
  differs = low.view(uint) != high.view(uint)
  return differs & (reach > 0) & np.isfinite(y)


def is_one_sum(contract: combine_contract.CombineContract) -> bool:
  """Whether the graph adds the slots in one sum with a float32 accumulator.

  Slot order is the order of an axis, and a sum over an axis rounds nothing that
  the graph can see. Any other order takes an addition a term, and a 16-bit
  accumulator rounds after every one: both can be seen.
  """
  return contract.accumulator == "float32" and contract.order == "slot"


def refuse_unportable(contract: combine_contract.CombineContract) -> None:
  """Raises NotImplementedError for what portable arithmetic cannot express."""
  if contract.subnormals != "keep" or contract.contraction != "mul_add":
    raise NotImplementedError(
        "portable arithmetic keeps subnormals and rounds products apart;"
        f" {contract.name} has subnormals={contract.subnormals!r},"
        f" contraction={contract.contraction!r}."
    )


def _wide(x) -> np.ndarray:
  with np.errstate(invalid="ignore"):  # Signalling NaNs are legal inputs.
    return np.asarray(x).astype(np.float64)


def _positive_zero(y: np.ndarray) -> np.ndarray:
  return np.where(y == 0, 0.0, y)
