"""The exact value of one element of an operation, rounded once to float64.

Portable arithmetic computes in float64 and asks, for every element, whether
another float64 order could have rounded differently. Where the answer is yes,
the element is computed again here, from the operands, without any rounding
before the last. So the result belongs to the operation and not to the machine.

Slow and scalar on purpose: a run needs a handful of these. Products of two
float32 values are exact in float64, and `math.fsum` rounds a sum of float64
values correctly; everything transcendental goes through mpmath with 160 bits,
which leaves a chance of about 2**-100 that the last rounding is not the right
one.

Layer: numerics.
"""

from collections.abc import Callable
from collections.abc import Iterable
import fractions
import math

import mpmath
import numpy as np

_BITS = 160


def dot(a: np.ndarray, b: np.ndarray, start: float = 0.0) -> float:
  """start + sum(a * b); a and b hold values of at most 24 bits, as float64."""
  with np.errstate(over="ignore", invalid="ignore"):
    products = (a * b).tolist()
  return _sum([start, *products])


def total(values: Iterable[float]) -> float:
  """The sum of float64 values."""
  return _sum(list(values))


def mean(values: np.ndarray) -> float:
  """The sum divided by the count, rounded once."""
  with mpmath.workprec(_BITS):
    return float(mpmath.fsum(values.tolist()) / len(values))


def softmax(values: np.ndarray, index: int) -> float:
  """exp(x_index) / sum(exp(x)); the shift by the maximum cancels."""
  with mpmath.workprec(_BITS):
    largest = mpmath.mpf(float(values.max()))
    weights = [mpmath.exp(mpmath.mpf(float(v)) - largest) for v in values]
    return float(weights[index] / mpmath.fsum(weights))


def log_softmax(values: np.ndarray, index: int) -> float:
  """x_index - log(sum(exp(x)))."""
  with mpmath.workprec(_BITS):
    largest = mpmath.mpf(float(values.max()))
    weights = [mpmath.exp(mpmath.mpf(float(v)) - largest) for v in values]
    shifted = mpmath.mpf(float(values[index])) - largest
    return float(shifted - mpmath.log(mpmath.fsum(weights)))


def power(base: float, x: float) -> float:
  """base ** x."""
  with mpmath.workprec(_BITS):
    return float(mpmath.power(mpmath.mpf(base), mpmath.mpf(x)))


_UNARY: dict[str, Callable] = {
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "sqrt": mpmath.sqrt,
    "reciprocal": lambda x: 1 / x,
    "exp": mpmath.exp,
    "log": mpmath.log,
    "cos": mpmath.cos,
    "sin": mpmath.sin,
    "tanh": mpmath.tanh,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "softplus": lambda x: mpmath.log1p(mpmath.exp(x)),
}


def unary(name: str, x: float) -> float:
  """A function of one value, by its name in `portable_oracle`."""
  with mpmath.workprec(_BITS):
    return float(_UNARY[name](mpmath.mpf(float(x))))


def silu_backward(g: float, x: float) -> float:
  """g s (1 + x (1 - s)), s = 1 / (1 + exp(-x))."""
  with mpmath.workprec(_BITS):
    x = mpmath.mpf(float(x))
    s = 1 / (1 + mpmath.exp(-x))
    return float(mpmath.mpf(float(g)) * s * (1 + x * (1 - s)))


def softmax_backward(g: np.ndarray, y: np.ndarray, index: int) -> float:
  """y_index (g_index - sum(g y)); rational, so no precision is chosen."""
  g, y = _rational(g), _rational(y)
  total_ = sum(a * b for a, b in zip(g, y, strict=True))
  return float(y[index] * (g[index] - total_))


def log_softmax_backward(g: np.ndarray, y: np.ndarray, index: int) -> float:
  """g_index - exp(y_index) sum(g)."""
  with mpmath.workprec(_BITS):
    total_ = mpmath.fsum(g.tolist())
    weight = mpmath.exp(mpmath.mpf(float(y[index])))
    return float(mpmath.mpf(float(g[index])) - weight * total_)


def fused(x: float, factor: float, y: float, z: float, divides: bool) -> float:
  """x + factor y z, or x + factor y / z: rational."""
  x, factor, y, z = _rational((x, factor, y, z))
  return float(x + (factor * y / z if divides else factor * y * z))


def lerp(x: float, y: float, weight: float) -> float:
  """x + weight (y - x): rational."""
  x, y, weight = _rational((x, y, weight))
  return float(x + weight * (y - x))


def _rational(values) -> list[fractions.Fraction]:
  return [fractions.Fraction(float(value)) for value in values]


def _sum(values: list[float]) -> float:
  if all(map(math.isfinite, values)):
    return math.fsum(values)
  with np.errstate(invalid="ignore"):
    return float(np.sum(np.asarray(values, np.float64)))
