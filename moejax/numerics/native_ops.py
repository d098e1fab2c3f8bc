"""Native arithmetic: what XLA does with the operations of the graph.

The graph fixes where a value is rounded; how a sum is ordered, which
approximation serves for exp, and whether a product is contracted inside one
operation is XLA's choice. A 16-bit operand is widened to float32 and the result
rounded once, as the reference does. The combine and simulated quantisation are
the exceptions: they have a contract and a definition, and run as those say.

Each method is compiled on its own when called with arrays, and becomes part of
the caller's program under `jax.jit`.

Layer: numerics. Protocol: contracts/ops.py.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from moejax.numerics import expert_rows
from moejax.numerics import ordered_combine
from moejax.numerics import quantization_simulation
from moejax.numerics import sinkhorn


def _in_float32(fn):
  """Computes in float32 and rounds the result to the first operand's dtype."""

  @jax.jit
  def run(x, *rest):
    wide = [jnp.asarray(v).astype(jnp.float32) for v in (x, *rest)]
    return fn(*wide).astype(x.dtype)

  return run


_ADD = _in_float32(jnp.add)
_MULTIPLY = _in_float32(jnp.multiply)
_DIVIDE = _in_float32(jnp.divide)
_POWER = _in_float32(lambda x, base: jnp.power(base, x))
_RSQRT = _in_float32(lax.rsqrt)
_EXP = _in_float32(jnp.exp)
_COS = _in_float32(jnp.cos)
_SIN = _in_float32(jnp.sin)
_SILU = _in_float32(lambda x: x / (1.0 + jnp.exp(-x)))
_SIGMOID = _in_float32(lambda x: 1.0 / (1.0 + jnp.exp(-x)))
_SOFTPLUS = _in_float32(lambda x: jnp.logaddexp(x, 0.0))
_SQRT = _in_float32(jnp.sqrt)
_MEAN = _in_float32(lambda x: jnp.mean(x, axis=-1, keepdims=True))
_SUM = _in_float32(lambda x: jnp.sum(x, axis=-1, keepdims=True))
_SOFTMAX = _in_float32(lambda x: jax.nn.softmax(x, axis=-1))


@jax.jit
def _matmul(a, b):
  return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(x, dtype):
  return x.astype(dtype)


class NativeOperations:
  """Implements `ops.Operations` with XLA's own arithmetic."""

  name = "native"

  def cast(self, x, dtype):
    return x if x.dtype == dtype else _cast(x, dtype)

  def add(self, x, y):
    return _ADD(x, y)

  def add_scalar(self, x, c):
    return _ADD(x, jnp.float32(c))

  def multiply(self, x, y):
    return _MULTIPLY(x, y)

  def scale(self, x, c):
    return _MULTIPLY(x, jnp.float32(c))

  def divide(self, x, y):
    return _DIVIDE(x, y)

  def power(self, base, x):
    return _POWER(x, jnp.float32(base))

  def rsqrt(self, x):
    return _RSQRT(x)

  def exp(self, x):
    return _EXP(x)

  def cos(self, x):
    return _COS(x)

  def sin(self, x):
    return _SIN(x)

  def silu(self, x):
    return _SILU(x)

  def sigmoid(self, x):
    return _SIGMOID(x)

  def softplus(self, x):
    return _SOFTPLUS(x)

  def sqrt(self, x):
    return _SQRT(x)

  def simulate_quantization(self, x, code_format, block):
    return quantization_simulation.simulate(x, code_format, block)

  def mean(self, x, site):
    del site
    return _MEAN(x)

  def sum(self, x, site):
    del site
    return _SUM(x)

  def softmax(self, x, site):
    del site
    return _SOFTMAX(x)

  def sinkhorn(self, x, iterations, epsilon, site):
    return sinkhorn.by_operations(self, x, iterations, epsilon, site)

  def linear(self, x, weight, site):
    return self.matmul(x, jnp.swapaxes(weight, -1, -2), site)

  def matmul(self, a, b, site):
    del site
    return _matmul(a, b)

  def expert_linear(self, rows, weight, expert_of_row, site):
    if not isinstance(expert_of_row, jax.core.Tracer):
      return expert_rows.per_expert(
          lambda x, w: self.linear(x, w, site), rows, weight, expert_of_row
      )
    num_experts = weight.shape[0]
    order = jnp.argsort(expert_of_row, stable=True)
    sizes = jnp.bincount(expert_of_row, length=num_experts)
    out = lax.ragged_dot(
        rows[order],
        jnp.swapaxes(weight, -1, -2),
        sizes.astype(jnp.int32),
        preferred_element_type=jnp.float32,
    )
    owned = (expert_of_row < num_experts)[:, None]
    back = jnp.argsort(order, stable=True)
    return jnp.where(owned, out[back], 0.0).astype(rows.dtype)

  def gate_terms(self, expert_out, gate, contract):
    return _gate_terms(expert_out, gate, contract)

  def combine(self, terms, expert_ids, contract, layer):
    order = ordered_combine.term_order(contract, expert_ids, layer)
    return _add_terms(terms, order, contract)


_gate_terms = jax.jit(ordered_combine.gate_terms, static_argnames="contract")
_add_terms = jax.jit(ordered_combine.add_terms, static_argnames="contract")
