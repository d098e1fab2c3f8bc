"""Grouped-query attention with q/k norm, rotary and a key-value state.

Layer: modules.
"""

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.contracts import ops as ops_lib
from moejax.modules import config as config_lib
from moejax.modules import norm
from moejax.modules import rotary
from moejax.modules import tap as tap_lib
from moejax.numerics import declared_moves


class Projection(nnx.Module):
  """x times weight transposed, plus a bias where there is one."""

  def __init__(self, weight, bias, site: str, operations: ops_lib.Operations):
    self.weight = nnx.Param(weight)
    self.bias = None if bias is None else nnx.Param(bias)
    self.site = site
    self.ops = operations

  def __call__(self, x: jax.Array) -> jax.Array:
    """[..., k] to [..., n]; with a bias the sum is one operation."""
    if self.bias is None:
      return self.ops.linear(x, self.weight[...], self.site)
    # A bias joins the dot product before its rounding: a column of ones.
    ones = jnp.ones((*x.shape[:-1], 1), x.dtype)
    weight = jnp.concatenate([self.weight[...], self.bias[...][:, None]], -1)
    return self.ops.linear(
        jnp.concatenate([x, ones], -1), weight, self.site
    )


class Attention(nnx.Module):
  """Attention of one layer.

  scores = R(q k^T); R(scores * head_dim^-0.5); R(+ mask); softmax in float32;
  rounded to the activations' dtype; R(probabilities v).
  """

  def __init__(
      self,
      params: dict,
      config: config_lib.DecoderConfig,
      operations: ops_lib.Operations,
  ):
    def projection(name):
      bias = params.get(f"{name}_bias")
      return Projection(params[name], bias, "projection", operations)

    self.q_proj = projection("q_proj")
    self.k_proj = projection("k_proj")
    self.v_proj = projection("v_proj")
    self.o_proj = projection("o_proj")
    epsilon = config.norm_epsilon
    self.q_norm = norm.RMSNorm(params["q_norm"], epsilon, operations)
    self.k_norm = norm.RMSNorm(params["k_norm"], epsilon, operations)
    self.num_kv_heads = config.num_kv_heads
    self.head_dim = config.head_dim
    self.scale = config.head_dim**-0.5
    self.state_dtype = config.dtype
    self.ops = operations

  def __call__(
      self,
      x: jax.Array,
      cos: jax.Array,
      sin: jax.Array,
      keys: jax.Array,
      values: jax.Array,
      start: int,
      bias: jax.Array,
      tap: tap_lib.Tap = tap_lib.SILENT,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attends from the tokens of this step to all rows of the state.

    Args:
      x: [batch, token, embed], normalised.
      cos: [batch, token, head_dim].
      sin: [batch, token, head_dim].
      keys: [batch, capacity, kv_head, head_dim] buffer of this layer.
      values: The same shape.
      start: Row at which this step's keys are written.
      bias: [batch, token, capacity] in x's dtype: 0 where a key is visible,
        the dtype's lowest finite number elsewhere.
      tap: Sees every step.

    Returns:
      ([batch, token, embed], keys, values).
    """
    ops = self.ops
    for_q, for_k, for_v = declared_moves.of(ops).share(x, 3)
    split = (*x.shape[:2], -1, self.head_dim)
    q = tap("q_proj", self.q_proj(for_q)).reshape(split)
    q = self.q_norm(q, tap.within("q_norm"))
    k = tap("k_proj", self.k_proj(for_k)).reshape(split)
    k = self.k_norm(k, tap.within("k_norm"))
    v = tap("v_proj", self.v_proj(for_v)).reshape(split)
    q = rotary.rotate(q, cos, sin, ops, tap.within("q_rotary"))
    k = rotary.rotate(k, cos, sin, ops, tap.within("k_rotary"))
    k = tap("state_keys", k.astype(self.state_dtype))
    v = tap("state_values", v.astype(self.state_dtype))
    keys, values = write_rows(keys, k, start), write_rows(values, v, start)

    # [batch, kv_head, group, token | key, head_dim]
    q = jnp.moveaxis(q.reshape(*x.shape[:2], self.num_kv_heads, -1,
                               self.head_dim), 1, 3)
    k = jnp.moveaxis(keys, 1, 2)[:, :, None]
    v = jnp.moveaxis(values, 1, 2)[:, :, None]
    scores = ops.matmul(q, jnp.swapaxes(k, -1, -2), "attention_scores")
    scores = tap("scores", _merge_heads(scores))
    scores = tap("scaled", ops.scale(scores, self.scale))
    scores = tap("masked", ops.add(scores, bias[:, None]))
    weights = ops.cast(scores, "float32")
    weights = tap("softmax", ops.softmax(weights, "attention_softmax"))
    if x.dtype != weights.dtype:
      weights = tap("probabilities", ops.cast(weights, x.dtype.name))
    weights = weights.reshape(
        x.shape[0], self.num_kv_heads, -1, *weights.shape[2:]
    )
    out = _merge_heads(ops.matmul(weights, v, "attention_values"))
    out = tap("values", jnp.swapaxes(out, 1, 2))
    out = out.reshape(*x.shape[:2], -1)
    return tap("o_proj", self.o_proj(out)), keys, values


def _merge_heads(x: jax.Array) -> jax.Array:
  """[batch, kv_head, group, ...] to [batch, head, ...]."""
  return x.reshape(x.shape[0], -1, *x.shape[3:])


def write_rows(buffer: jax.Array, rows: jax.Array, start: int) -> jax.Array:
  """Writes [batch, token, ...] rows into a buffer at a row, exactly."""
  if buffer.dtype != rows.dtype:
    raise ValueError(
        f"rows of dtype {rows.dtype} do not fit a state of {buffer.dtype}."
    )
  at = (0, start) + (0,) * (buffer.ndim - 2)
  return lax.dynamic_update_slice(buffer, rows, at)


def visibility_bias(
    valid: jax.Array,
    start: int,
    num_tokens: int,
    window: int | None,
    dtype: str,
) -> jax.Array:
  """0 where query i sees key j, the dtype's lowest number elsewhere.

  Query i stands in row start + i and sees valid keys j with j <= start + i and,
  under a sliding window of W, j > start + i - W: W keys, itself included.

  Args:
    valid: [batch, capacity] bool.
    start: Row of the first query.
    num_tokens: Queries.
    window: W, or None.
    dtype: Of the result.

  Returns:
    [batch, num_tokens, capacity].
  """
  row = start + jnp.arange(num_tokens)[:, None]
  key = jnp.arange(valid.shape[1])[None]
  visible = key <= row
  if window is not None:
    visible &= key > row - window
  visible = visible[None] & valid[:, None]
  lowest = np.array(ml_dtypes.finfo(dtype).min, dtype)
  return jnp.where(visible, jnp.zeros((), dtype), jnp.asarray(lowest))
