"""Routes and margins: the executable meaning of contracts/route.py.

The oracle is NumPy, each operation portable. The twin of the selection is
`select`, used by the decoder's router module.

Layer: numerics.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import route
from moejax.numerics.portable import portable_oracle


class Route(NamedTuple):
  """What a router returns for each token.

  Attributes:
    ids: [token, slot] int32 expert ids, by falling selection score.
    gates: [token, slot] weights of the expert outputs.
  """

  ids: np.ndarray | jax.Array
  gates: np.ndarray | jax.Array


def select_oracle(scores: np.ndarray, top_k: int, tie_rule: str) -> np.ndarray:
  """The top_k largest of the last axis, descending; ties by the rule.

  Args:
    scores: [token, expert], without NaN.
    top_k: At most the number of experts.
    tie_rule: "lowest_index" or "highest_index" first among equals.

  Returns:
    [token, slot] int32.

  Raises:
    ValueError: there are fewer experts than slots.
  """
  _check(scores.shape[-1], top_k)
  falling = -scores.astype(np.float64)
  if tie_rule == "lowest_index":
    order = np.argsort(falling, axis=-1, kind="stable")
  else:
    last = scores.shape[-1] - 1
    order = last - np.argsort(falling[..., ::-1], axis=-1, kind="stable")
  return order[..., :top_k].astype(np.int32)


def select(scores: jax.Array, top_k: int, tie_rule: str) -> jax.Array:
  """The twin of `select_oracle`, for float32 and 16-bit scores.

  Compares integers: XLA on a CPU takes two different subnormals for equal.
  `lax.top_k` prefers the lower index.
  """
  _check(scores.shape[-1], top_k)
  width = 8 * scores.dtype.itemsize
  signed = jnp.dtype(f"int{width}")
  bits = lax.bitcast_convert_type(scores, signed)
  magnitude = bits & jnp.array((1 << (width - 1)) - 1, signed)
  keys = jnp.where(bits < 0, -magnitude, bits)
  if tie_rule == "lowest_index":
    return lax.top_k(keys, top_k)[1].astype(jnp.int32)
  last = scores.shape[-1] - 1
  return (last - lax.top_k(keys[..., ::-1], top_k)[1]).astype(jnp.int32)


def route_oracle(
    logits: np.ndarray,
    contract: route.RouterContract,
    bias: np.ndarray | None = None,
) -> Route:
  """Routes tokens from router logits.

  scores = score(logits); ids = top_k of scores + bias; gates = scores[ids],
  divided by their sum if contract.normalize, times contract.scale.

  Args:
    logits: [token, expert] in contract.logits_dtype.
    contract: Every field matters.
    bias: [expert] float32, added for the selection only.

  Returns:
    The route; gates in contract.gate_dtype.
  """
  ops = portable_oracle.PortableOracle()
  dtype = contract.score_dtype
  if contract.score == "softmax":
    scores = ops.softmax(logits, -1, dtype)
  elif contract.score == "sigmoid":
    scores = ops.unary("sigmoid", logits, dtype)
  else:
    scores = ops.unary("sqrt", ops.unary("softplus", logits, dtype), dtype)
  selection = scores if bias is None else ops.add(scores, bias, dtype)
  ids = select_oracle(selection, contract.top_k, contract.tie_rule)
  gates = np.take_along_axis(scores, ids, axis=-1)
  if contract.normalize:
    gates = ops.divide(gates, ops.sum(gates, -1, True, dtype), dtype)
  if contract.scale != 1.0:
    gates = ops.multiply(gates, contract.scale, dtype)
  return Route(ids, ops.add(gates, 0.0, contract.gate_dtype))


def boundary_margin(scores: np.ndarray, top_k: int) -> np.ndarray:
  """The gap between the last selected and the first rejected score.

  Zero is a boundary tie: a backend without a tie rule may select either.

  Args:
    scores: [token, expert].
    top_k: Slots of a route; with top_k experts or fewer nothing is rejected.

  Returns:
    [token] float64; infinity where nothing is rejected.
  """
  _check(scores.shape[-1], top_k)
  if scores.shape[-1] == top_k:
    return np.full(scores.shape[:-1], np.inf)
  falling = -np.sort(-scores.astype(np.float64), axis=-1)
  last, next_ = falling[..., top_k - 1], falling[..., top_k]
  with np.errstate(invalid="ignore"):  # Both may be minus infinity: a tie.
    return np.where(last == next_, 0.0, last - next_)


def _check(num_experts: int, top_k: int) -> None:
  if top_k > num_experts:
    raise ValueError(f"top_k={top_k} slots, but only {num_experts} experts.")
