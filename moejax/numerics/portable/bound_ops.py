"""An operation set whose results are error bounds.

In a replay every tap gives the decoder another backend's value, whatever the
operation before it returned. So an operation may return, in the place of its
result, the distance within which a native result must lie: the recorder then
holds a bound of the right shape for every tap, and the modules need no change.

  bound = B * 2^-24 + one spacing of the result's dtype

B is the operation's own (`error_bounds`), in units of the unit roundoff; native
operations compute in float32 and round once. The spacing covers that rounding
and the rounding of the portable value from which the distance is taken.

Works on the host, in NumPy. Layer: numerics. Protocol: contracts/ops.py.
"""

import numpy as np

from moejax.numerics import formats
from moejax.numerics.portable import error_bounds
from moejax.numerics.portable import portable_oracle
from moejax.numerics import ulp

UNIT = formats.FLOAT32.unit_roundoff
# Below this a float32 operation may underflow or flush.
_FLOOR = 2.0**-126


def _wide(x) -> np.ndarray:
  return np.asarray(x).astype(np.float64)


class BoundOperations:
  """Implements `ops.Operations`; every result is a float64 bound."""

  name = "bounds"

  def cast(self, x, dtype):
    if np.asarray(x).dtype.itemsize <= formats.of(dtype).numpy.itemsize:
      return np.asarray(x).astype(formats.of(dtype).numpy)  # Exact: a value.
    return self._bound(_wide(x), 0.0, dtype)

  def add(self, x, y):
    value = _wide(x) + _wide(y)
    return self._bound(value, np.abs(value), x.dtype)

  def add_scalar(self, x, c):
    value = _wide(x) + c
    return self._bound(value, np.abs(value) + abs(c), x.dtype)

  def multiply(self, x, y):
    value = _wide(x) * _wide(y)
    return self._bound(value, np.abs(value), x.dtype)

  def scale(self, x, c):
    value = _wide(x) * c
    return self._bound(value, 2 * np.abs(value), x.dtype)

  def divide(self, x, y):
    with np.errstate(invalid="ignore"):  # Padding may divide zero by zero.
      value = _wide(x) / _wide(y)
    return self._bound(value, 2 * np.abs(value), x.dtype)

  def power(self, base, x):
    value = np.power(base, _wide(x))
    bound = error_bounds.relative("power", value, np)
    return self._bound(value, bound, x.dtype)

  def rsqrt(self, x):
    return self._unary("rsqrt", x)

  def exp(self, x):
    return self._unary("exp", x)

  def cos(self, x):
    return self._unary("cos", x)

  def sin(self, x):
    return self._unary("sin", x)

  def silu(self, x):
    return self._unary("silu", x)

  def sigmoid(self, x):
    return self._unary("sigmoid", x)

  def softplus(self, x):
    return self._unary("softplus", x)

  def sqrt(self, x):
    return self._unary("sqrt", x)

  def simulate_quantization(self, x, code_format, block):
    """It has a definition down to the bit: it leaves no room at all."""
    del code_format, block
    return np.zeros(x.shape)

  def mean(self, x, site):
    del site
    wide = _wide(x)
    value = wide.mean(-1, keepdims=True)
    return self._bound(value, error_bounds.mean(wide, np), x.dtype)

  def sum(self, x, site):
    del site
    wide = _wide(x)
    value = wide.sum(-1, keepdims=True)
    return self._bound(value, error_bounds.total(wide, np), x.dtype)

  def softmax(self, x, site):
    del site
    wide = _wide(x)
    shifted = wide - wide.max(-1, keepdims=True)
    weights = np.exp(shifted)
    value = weights / weights.sum(-1, keepdims=True)
    bound = error_bounds.softmax(shifted, value, np)
    return self._bound(value, bound, x.dtype)

  def sinkhorn(self, x, iterations, epsilon, site):
    """No bound: a deviation of one round grows in those after it."""
    del epsilon, site
    shape = np.shape(x)
    rounds = 2 * iterations - 1
    return np.full((*shape[:-2], rounds, *shape[-2:]), np.inf)

  def linear(self, x, weight, site):
    return self.matmul(x, np.swapaxes(np.asarray(weight), -1, -2), site)

  def matmul(self, a, b, site):
    del site
    wide_a, wide_b = _wide(a), _wide(b)
    bound = error_bounds.dot(
        error_bounds.norm(wide_a, np),
        error_bounds.norm(wide_b, np, -2),
        wide_a.shape[-1],
    )
    return self._bound(wide_a @ wide_b, bound, a.dtype)

  def expert_linear(self, rows, weight, expert_of_row, site):
    rows, weight = np.asarray(rows), np.asarray(weight)
    ids = np.asarray(expert_of_row)
    out = np.zeros((len(rows), weight.shape[1]))
    for expert in np.unique(ids[ids < len(weight)]):
      mine = ids == expert
      out[mine] = self.linear(rows[mine], weight[expert], site)
    return out

  def gate_terms(self, expert_out, gate, contract):
    """A combine has a contract: it leaves no room at all."""
    del gate, contract
    return np.zeros(expert_out.shape)

  def combine(self, terms, expert_ids, contract, layer):
    """A combine has a contract: it leaves no room at all."""
    del expert_ids, contract, layer
    return np.zeros((terms.shape[0], terms.shape[2]))

  def _unary(self, name, x):
    value = _wide(portable_oracle.unary_value(name, _wide(x)))
    bound = error_bounds.relative(name, value, np)
    return self._bound(value, bound, x.dtype)

  def _bound(self, value, bound, dtype) -> np.ndarray:
    name = np.dtype(dtype).name
    return bound * UNIT + ulp.spacing(value, name) + _FLOOR
