"""Portable arithmetic in JAX: the twin of `portable_oracle.py`.

Each operation is compiled on its own: the operands are widened on their bits,
the value and its error bound are computed in float64, and the value is rounded
with integers. The host then looks at the number of uncertain elements, which
is nearly always zero, and computes those exactly. Because the host looks, the
set runs op by op and refuses to be traced.

Needs `jax_enable_x64`.

Layer: numerics. Protocol: contracts/ops.py.
"""

from collections.abc import Callable
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax.numerics import expert_rows
from moejax.numerics import formats
from moejax.numerics import ordered_combine
from moejax.numerics.portable import certificate as certificate_lib
from moejax.numerics.portable import error_bounds
from moejax.numerics.portable import exact
from moejax.numerics.portable import portable_oracle
from moejax.numerics import quantization_simulation
from moejax.numerics import rounding
from moejax.numerics import sinkhorn


def _positive_zero(y: jax.Array) -> jax.Array:
  return jnp.where(y == 0, jnp.float64(0), y)


def _add(x, y):
  return x + y, None


def _multiply(x, y):
  return x * y, None


def _divide(x, y):
  return x / y, None


def _power(base, x):
  y = jnp.power(base, x)
  return y, error_bounds.relative("power", y, jnp)


def _unary(name: str, fn: Callable):
  def value(x):
    y = fn(x)
    return y, error_bounds.relative(name, y, jnp)

  return value


def _mean(x):
  y = jnp.sum(x, axis=-1, keepdims=True) / x.shape[-1]
  return _positive_zero(y), error_bounds.mean(x, jnp)


def _sum(x):
  y = jnp.sum(x, axis=-1, keepdims=True)
  return _positive_zero(y), error_bounds.total(x, jnp)


def _softmax(x):
  shifted = x - jnp.max(x, axis=-1, keepdims=True)
  weights = jnp.exp(shifted)
  y = weights / jnp.sum(weights, axis=-1, keepdims=True)
  return y, error_bounds.softmax(shifted, y, jnp)


def _matmul(a, b):
  y = jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
  bound = error_bounds.dot(
      error_bounds.norm(a, jnp), error_bounds.norm(b, jnp, -2), a.shape[-1]
  )
  return _positive_zero(y), bound


def _combine(terms):
  y = _positive_zero(jnp.sum(terms, axis=1))
  return y, error_bounds.total(terms, jnp, axis=1)[:, 0]


_VALUES = {
    "add": _add,
    "multiply": _multiply,
    "divide": _divide,
    "power": _power,
    "rsqrt": _unary("rsqrt", lambda x: 1.0 / jnp.sqrt(x)),
    "exp": _unary("exp", jnp.exp),
    "cos": _unary("cos", jnp.cos),
    "sin": _unary("sin", jnp.sin),
    "silu": _unary("silu", lambda x: x / (1.0 + jnp.exp(-x))),
    "sigmoid": _unary("sigmoid", lambda x: 1.0 / (1.0 + jnp.exp(-x))),
    "softplus": _unary("softplus", lambda x: jnp.logaddexp(x, 0.0)),
    "sqrt": _unary("sqrt", jnp.sqrt),
    "mean": _mean,
    "sum": _sum,
    "softmax": _softmax,
    "matmul": _matmul,
    "combine": _combine,
}


@functools.partial(jax.jit, static_argnames=("name", "dtype", "value"))
def evaluate(name: str, operands: tuple, dtype: str, value=None):
  """Returns (result, uncertain mask or None, number of uncertain elements)."""
  y, bound = (value or _VALUES[name])(*map(rounding.widen, operands))
  if bound is None:
    return rounding.round_pack(y, dtype), None, 0
  reach = jnp.broadcast_to(bound * portable_oracle.UNIT, y.shape)
  uint = jnp.dtype(formats.of(dtype).uint)
  # Side by side, so that the rounding is compiled once and not three times.
  rounded = rounding.round_pack(jnp.stack([y, y - reach, y + reach]), dtype)
  _, low, high = lax.bitcast_convert_type(rounded, uint)
  mask = (low != high) & (reach > 0) & jnp.isfinite(y)
  return rounded[0], mask, jnp.sum(mask)


class PortableOperations:
  """Implements `ops.Operations`; the certificate collects what it did."""

  name = "portable"

  def __init__(self, certificate: certificate_lib.Certificate | None = None):
    if not jax.config.jax_enable_x64:
      raise ValueError(
          "portable arithmetic needs float64: jax_enable_x64 is off."
      )
    self.certificate = certificate or certificate_lib.Certificate()

  def cast(self, x, dtype):
    x = jnp.asarray(x)
    return x if x.dtype == dtype else _cast(x, dtype)

  def add(self, x, y):
    return self._run("add", (x, y), x.dtype)

  def add_scalar(self, x, c):
    return self._run("add", (x, jnp.float64(c)), x.dtype)

  def multiply(self, x, y):
    return self._run("multiply", (x, y), x.dtype)

  def scale(self, x, c):
    return self._run("multiply", (x, jnp.float64(c)), x.dtype)

  def divide(self, x, y):
    return self._run("divide", (x, y), x.dtype)

  def power(self, base, x):
    def element(operands, i):
      return exact.power(base, operands[1][i])

    return self._run("power", (jnp.float64(base), x), x.dtype, element)

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
    out = quantization_simulation.simulate(x, code_format, block)
    self.certificate.note("simulate_quantization", out.size)
    return out

  def mean(self, x, site):
    del site
    return self._run(
        "mean", (x,), x.dtype, lambda v, i: exact.mean(v[0][i[:-1]])
    )

  def sum(self, x, site):
    del site
    return self._run(
        "sum", (x,), x.dtype, lambda v, i: exact.total(v[0][i[:-1]].tolist())
    )

  def softmax(self, x, site):
    del site
    return self._run(
        "softmax",
        (x,),
        x.dtype,
        lambda v, i: exact.softmax(v[0][i[:-1]], i[-1]),
    )

  def sinkhorn(self, x, iterations, epsilon, site):
    del site
    out = sinkhorn.portable(x, iterations, epsilon)
    self.certificate.note("sinkhorn", out.size)
    return out

  def linear(self, x, weight, site):
    return self.matmul(x, jnp.swapaxes(weight, -1, -2), site)

  def matmul(self, a, b, site):
    del site

    def element(v, i):
      batch = np.broadcast_shapes(v[0].shape[:-2], v[1].shape[:-2])
      row = np.broadcast_to(v[0], (*batch, *v[0].shape[-2:]))[i[:-1]]
      matrix = np.broadcast_to(v[1], (*batch, *v[1].shape[-2:]))[i[:-2]]
      return exact.dot(row, matrix[:, i[-1]])

    return self._run("matmul", (a, b), a.dtype, element)

  def expert_linear(self, rows, weight, expert_of_row, site):
    return expert_rows.per_expert(
        lambda x, w: self.linear(x, w, site), rows, weight, expert_of_row
    )

  def gate_terms(self, expert_out, gate, contract):
    out = _gate_terms(expert_out, gate, contract)
    self.certificate.note("gate_terms", out.size)
    return out

  def combine(self, terms, expert_ids, contract, layer):
    portable_oracle.refuse_unportable(contract)
    order = ordered_combine.term_order(contract, expert_ids, layer)
    if not portable_oracle.is_one_sum(contract):
      out = _add_terms(terms, order, contract)
      self.certificate.note("combine", out.size)
      return out
    if contract.start != "zero":
      raise NotImplementedError(
          f"start={contract.start!r} with a float32 accumulator."
      )
    return self._run(
        "combine",
        (terms,),
        contract.output,
        lambda v, i: exact.total(v[0][i[0], :, i[1]].tolist()),
    )

  def _unary(self, name, x):
    return self._run(
        name, (x,), x.dtype, lambda v, i: exact.unary(name, v[0][i])
    )

  def _run(self, name, operands, dtype, element=None, value=None):
    """Evaluates one operation and settles its uncertain elements.

    Args:
      name: Of the operation.
      operands: Arrays.
      dtype: Of the result.
      element: (float64 operands, place) to the exact value there.
      value: (float64 operands) to (float64 value, bound or None), a function
        of a module; None finds it by the name.
    """
    if any(isinstance(x, jax.core.Tracer) for x in operands):
      raise NotImplementedError(
          "portable arithmetic settles rounding boundaries on the host; it"
          f" runs op by op and {name} is being traced."
      )
    dtype = np.dtype(dtype).name
    out, mask, count = evaluate(name, operands, dtype, value)
    count = int(count)
    self.certificate.note(name, out.size, count)
    if not count:
      return out
    wide = [np.asarray(x).astype(np.float64) for x in operands]
    settled, mask = np.array(out), np.asarray(mask)
    places = map(tuple, np.argwhere(mask).tolist())
    exact_values = np.array([element(wide, i) for i in places], np.float64)
    settled[mask] = rounding.round_oracle(exact_values, dtype)
    self.certificate.note_recomputed(name, count)
    return jnp.asarray(settled)


@functools.partial(jax.jit, static_argnames=("dtype",))
def _cast(x, dtype):
  return rounding.round_pack(rounding.widen(x), dtype)


_gate_terms = jax.jit(ordered_combine.gate_terms, static_argnames="contract")
_add_terms = jax.jit(ordered_combine.add_terms, static_argnames="contract")
