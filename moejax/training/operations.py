"""Native arithmetic with gradients that are fit for training.

Forward results are those of `native_ops`, but for the functions listed here,
which stay within its bounds. Where JAX's own gradient would be slow, large or
not a number, the method brings another rule:

  linear, matmul   both gradients are products of 16-bit operands, added in
                   float32 and rounded once to the dtype of what they belong to
  silu, sigmoid    by one logistic function; x / (1 + exp(-x)) has the gradient
                   infinity * 0 at x = -89
  sinkhorn         one loop over rounds; the matrix after the last round alone
  moe_mlp          the routed MLP with its hand-written gradient

Layer: training. Protocol: contracts/ops.py, TrainingOperations.
"""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp

from moejax.contracts import grouped_mlp
from moejax.numerics.grouped import mlp
from moejax.numerics import native_ops


# The gate multiplies where both decoders of transformers multiply it.
MLP = grouped_mlp.GroupedMlpContract(weight_placement="after_fc2")


class TrainingOperations(native_ops.NativeOperations):
  """Implements `ops.TrainingOperations`."""

  name = "training"

  def __init__(self, mlp_contract: grouped_mlp.GroupedMlpContract = MLP):
    """Takes the contract of the routed MLPs; its limit is the decoder's."""
    self._mlp = mlp_contract

  def silu(self, x):
    wide = x.astype(jnp.float32)
    return (wide * lax.logistic(wide)).astype(x.dtype)

  def sigmoid(self, x):
    return lax.logistic(x.astype(jnp.float32)).astype(x.dtype)

  def linear(self, x, weight, site):
    del site
    flat = x.reshape(-1, x.shape[-1])
    return _linear(flat, weight).reshape(*x.shape[:-1], weight.shape[0])

  def matmul(self, a, b, site):
    del site
    return _matmul(a, b)

  def sinkhorn(self, x, iterations, epsilon, site):
    """Of the rounds, the last alone: [..., 1, n, n]."""
    del site
    return _sinkhorn(x, iterations, epsilon)[..., None, :, :]

  def moe_mlp(self, x, gates, gate_up, down, expert_ids, limit):
    contract = dataclasses.replace(self._mlp, clamp_limit=limit)
    return mlp.moe_mlp(x, gates, gate_up, down, expert_ids, contract)


def _product(a, b):
  return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _turned(x):
  return jnp.swapaxes(x, -1, -2)


@jax.custom_vjp
def _linear(x, weight):
  return _product(x, weight.T).astype(x.dtype)


def _linear_backward(kept, cotangent):
  x, weight = kept
  return (
      _product(cotangent, weight).astype(x.dtype),
      _product(cotangent.T, x).astype(weight.dtype),
  )


_linear.defvjp(lambda x, w: (_linear(x, w), (x, w)), _linear_backward)


@jax.custom_vjp
def _matmul(a, b):
  return _product(a, b).astype(a.dtype)


def _matmul_backward(kept, cotangent):
  a, b = kept
  return (
      _unbroadcast(_product(cotangent, _turned(b)), a.shape).astype(a.dtype),
      _unbroadcast(_product(_turned(a), cotangent), b.shape).astype(b.dtype),
  )


_matmul.defvjp(lambda a, b: (_matmul(a, b), (a, b)), _matmul_backward)


def _unbroadcast(x, shape):
  """Adds up the batch axes along which an operand was repeated."""
  padded = (1,) * (x.ndim - len(shape)) + shape
  axes = tuple(i for i, n in enumerate(padded) if n != x.shape[i])
  return x.sum(axes, keepdims=True).reshape(shape)


@functools.partial(jax.jit, static_argnames=("iterations", "epsilon"))
def _sinkhorn(x, iterations, epsilon):
  """Rows and columns in front, so that every sum is n - 1 vector additions."""
  rows = jnp.moveaxis(x, (-2, -1), (0, 1))

  def normalise(m, axis):
    parts = [lax.index_in_dim(m, i, axis) for i in range(m.shape[axis])]
    return m / (sum(parts[1:], parts[0]) + jnp.float32(epsilon))

  def both(m, _):
    return normalise(normalise(m, 1), 0), None

  rows, _ = lax.scan(both, normalise(rows, 0), length=iterations - 1)
  return jnp.moveaxis(rows, (0, 1), (-2, -1))
