"""Between the two GEMMs: clamp, silu times up, and its gradient by hand.

  A' = min(A, L)    B' = clip(B, -L, L)      exact; only with a clamp
  S  = R_d(A' s)    s = sigmoid(A')
  P  = R_d(S B')

  dB = R_d(S dP)    dS = R_d(dP B')
  dA = R_d(dS s (1 + A' (1 - s)))            float32 inside, each step rounded
  dA = 0 where A > L;  dB = 0 where B < -L or B > L

The masks are taken on the rounded A and B and a tie passes the gradient. In
float64 nothing is rounded.

Layer: numerics. Contract: contracts/grouped_mlp.py.
"""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import grouped_mlp
from moejax.numerics import moves
from moejax.numerics import rounding
from moejax.numerics.grouped import storage


def sigmoid(x: jax.Array, functions: str) -> jax.Array:
  """sigmoid in the dtype that computes, of a value in it."""
  if functions == "portable" and x.dtype == jnp.float32:
    return jax.nn.sigmoid(x.astype(jnp.float64)).astype(jnp.float32)
  return jax.nn.sigmoid(x)


def forward(
    gate: jax.Array,
    up: jax.Array,
    contract: grouped_mlp.GroupedMlpContract,
    zero: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns (S, P) of A and B before the clamp; [row, hidden] all.

  Args:
    gate: A.
    up: B, the same dtype.
    contract: clamp_limit, functions.
    zero: `storage.run_time_zero`.
  """
  gate, up = _clamped(gate, up, contract.clamp_limit)
  wide = storage.wide(gate)
  silu = storage.rounded(
      storage.product(wide, sigmoid(wide, contract.functions), zero),
      gate.dtype,
  )
  out = storage.product(storage.wide(silu), storage.wide(up), zero)
  return silu, storage.rounded(out, gate.dtype)


def backward(
    gate: jax.Array,
    up: jax.Array,
    d_out: jax.Array,
    contract: grouped_mlp.GroupedMlpContract,
    zero: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns (dA, dB) of A and B before the clamp and of dP; B6 and B7."""
  dtype, limit = gate.dtype, contract.clamp_limit
  raw_gate, raw_up = gate, up
  silu, _ = forward(gate, up, contract, zero)
  gate, up = (storage.wide(v) for v in _clamped(gate, up, limit))
  d_out = storage.wide(d_out)
  d_up = storage.rounded(
      storage.product(storage.wide(silu), d_out, zero), dtype
  )
  d_silu = storage.rounded(storage.product(d_out, up, zero), dtype)
  s = sigmoid(gate, contract.functions)
  slope = s * (1 + storage.product(gate, 1 - s, zero))
  slope = slope if dtype == jnp.float64 else rounding.fence(slope, zero)
  d_gate = storage.rounded(
      storage.product(storage.wide(d_silu), slope, zero), dtype
  )
  if limit is None:
    return d_gate, d_up
  nothing = jnp.zeros((), dtype)
  return (
      moves.where(~(raw_gate > limit), d_gate, nothing),
      moves.where(~((raw_up > limit) | (raw_up < -limit)), d_up, nothing),
  )


def forward_oracle(
    gate: np.ndarray, up: np.ndarray, limit: float | None
) -> tuple[np.ndarray, np.ndarray]:
  """The definition of `forward`, with the sigmoid of "portable"."""
  dtype = gate.dtype
  gate, up = _clamped_oracle(gate, up, limit)
  silu = _rounded(_wide(gate) * _sigmoid(_wide(gate)), dtype)
  return silu, _rounded(_wide(silu) * _wide(up), dtype)


def backward_oracle(
    gate: np.ndarray, up: np.ndarray, d_out: np.ndarray, limit: float | None
) -> tuple[np.ndarray, np.ndarray]:
  """The definition of `backward`, with the sigmoid of "portable"."""
  dtype = gate.dtype
  silu, _ = forward_oracle(gate, up, limit)
  a, b = (_wide(v) for v in _clamped_oracle(gate, up, limit))
  d_out = _wide(d_out)
  d_up = _rounded(_wide(silu) * d_out, dtype)
  d_silu = _rounded(d_out * b, dtype)
  s = _sigmoid(a)
  one = a.dtype.type(1)
  d_gate = _rounded(_wide(d_silu) * (s * (one + a * (one - s))), dtype)
  if limit is not None:
    nothing, bound = np.zeros((), dtype), dtype.type(limit)
    d_gate = np.where(gate > bound, nothing, d_gate)
    d_up = np.where(np.abs(up) > bound, nothing, d_up)
  return d_gate, d_up


def _clamped(gate, up, limit):
  if limit is None:
    return gate, up
  return moves.clamp(gate, None, limit), moves.clamp(up, -limit, limit)


def _clamped_oracle(gate, up, limit):
  if limit is None:
    return gate, up
  bound = gate.dtype.type(limit)
  return (
      np.where(gate > bound, bound, gate),
      np.where(up > bound, bound, np.where(up < -bound, -bound, up)),
  )


def _wide(x):
  return x.astype(np.float64 if x.dtype == np.float64 else np.float32)


def _rounded(x, dtype):
  return rounding.round_oracle(x.astype(np.float64), dtype.name)


def _sigmoid(x):
  """float64, rounded once to x's dtype."""
  with np.errstate(over="ignore"):
    return (1 / (1 + np.exp(-x.astype(np.float64)))).astype(x.dtype)
