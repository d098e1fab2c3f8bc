"""Sliding-window attention over one shared head, with compressed entries.

One projection gives the row that is key and value at once. A query sees the
last `window` rows, the compressed entries of complete windows (all of them in
an HCA layer, those its indexer selects in a CSA layer) and a sink that weighs
but has no value.

Layer: modules. State: contracts/deepseek_v4_state.py.
"""

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.contracts import deepseek_v4 as contract_lib
from moejax.contracts import deepseek_v4_state as state_lib
from moejax.contracts import ops as ops_lib
from moejax.modules import tap as tap_lib
from moejax.modules.deepseek_v4 import compressor as compressor_lib
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import indexer as indexer_lib
from moejax.modules.deepseek_v4 import norm
from moejax.modules.deepseek_v4 import online_attention
from moejax.modules.deepseek_v4 import quantize
from moejax.modules.deepseek_v4 import state as rows_lib
from moejax.modules.deepseek_v4 import turn
from moejax.numerics import moves


class Attention(nnx.Module):
  """One attention block of any of the three kinds."""

  def __init__(
      self,
      params: dict,
      config: config_lib.DeepseekV4Config,
      layer: int,
      graph: contract_lib.DeepseekV4Graph,
      operations: ops_lib.Operations,
  ):
    epsilon = config.norm_epsilon
    for name in ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj"):
      setattr(self, name, nnx.Param(params[name]))
    self.sinks = nnx.Param(params["sinks"])
    self.q_a_norm = norm.Norm(params["q_a_norm"], epsilon, operations)
    self.kv_norm = norm.Norm(params["kv_norm"], epsilon, operations)
    kind = config.attentions[layer]
    self.compressor = None if kind == config_lib.SWA else (
        compressor_lib.Compressor(
            params["compressor"], config, graph, False, operations
        )
    )
    self.indexer = None if kind != config_lib.CSA else (
        indexer_lib.Indexer(params["indexer"], config, graph, operations)
    )
    self.config = config
    self.graph = graph
    self.ops = operations

  def __call__(
      self,
      x: jax.Array,
      state: state_lib.LayerState,
      cols: rows_lib.Columns,
      cos: jax.Array,
      sin: jax.Array,
      frequencies: jax.Array,
      factor: float,
      tap: tap_lib.Tap,
  ) -> tuple[jax.Array, state_lib.LayerState]:
    """Attends from [batch, token, embed].

    Args:
      x: The block's normalised input.
      state: This layer's.
      cols: Where the tokens stand.
      cos: [batch, token, half_dim] of this layer's kind.
      sin: The same.
      frequencies: [half_dim], for positions of compressed entries.
      factor: On their cos and sin.
      tap: Sees every step.
    """
    ops, config, graph = self.ops, self.config, self.graph
    given = self._quantized(x, "input", tap)
    rank = tap("q_a_proj", ops.linear(given, self.q_a_proj[...], "projection"))
    rank = self.q_a_norm(rank, tap.within("q_a_norm"))
    rank = self._quantized(rank, "q_a", tap)
    q = tap("q_b_proj", ops.linear(rank, self.q_b_proj[...], "projection"))
    q = q.reshape(*x.shape[:2], config.num_heads, config.head_dim)
    q = norm.bare_norm(
        q,
        config.norm_epsilon,
        "query_norm_mean",
        ops,
        tap.within("q_b_norm"),
        graph.query_norm,
    )
    by_head = cos[:, :, None], sin[:, :, None]
    q = turn.turn(q, *by_head, ops, tap.within("q_turn"))
    kv = tap("kv_proj", ops.linear(given, self.kv_proj[...], "projection"))
    kv = self.kv_norm(kv, tap.within("kv_norm"))
    kv = turn.turn(kv, cos, sin, ops, tap.within("kv_turn"))
    kv = quantize.entry(
        kv, config.rotary_dim, graph.quantization, "kv_quantized", ops, tap
    )
    kv = tap("state_kv", kv)

    keys = [_in_order(state.window, cols), kv]
    visible = place = None
    compressor, indexer = state.compressor, state.indexer
    if self.compressor is not None:
      compressor = self.compressor(
          x, compressor, cols, frequencies, factor, tap.within("compressor")
      )
      keys.append(compressor.entries)
      if self.indexer is None:
        rate = self.compressor.rate
        visible = indexer_lib.complete_entries(
            cols, rate, compressor.entries.shape[1]
        )
        place = jnp.arange(visible.shape[-1], dtype=jnp.int32)
      else:
        # A selection has no gradient. What else may train the indexer, such
        # as a divergence, must not reach the trunk through its inputs.
        visible, place, indexer = self.indexer(
            lax.stop_gradient(x),
            lax.stop_gradient(rank),
            indexer,
            cols,
            (cos, sin),
            frequencies,
            factor,
            tap.within("indexer"),
        )
    keys = moves.concatenate(keys, 1)
    if graph.attention == "online_softmax":
      out = self._attend_online(q, keys, cols, visible, place, tap)
    else:
      bias = [self._window_bias(cols, x.dtype)]
      if visible is not None:
        bias.append(_bias(visible, -np.inf, x.dtype))
      out = self._attend(q, keys, jnp.concatenate(bias, -1), tap)
    out = turn.turn(
        out, by_head[0], -by_head[1], ops, tap.within("output_turn")
    )
    out = self._project(out, tap)
    return out, state_lib.LayerState(
        rows_lib.ring(state.window, kv, cols), compressor, indexer
    )

  def _quantized(self, x, name, tap):
    return quantize.activation(
        x, self.graph.quantization, f"{name}_quantized", self.ops, tap
    )

  def _window(self, cols):
    """(seen, exists), both broadcast to [batch, token, window + token]."""
    size = self.config.window
    old = cols.before[:, None] - size + jnp.arange(size, dtype=jnp.int32)
    exists = jnp.concatenate([old >= 0, cols.valid], -1)[:, None]
    key = jnp.concatenate([old, cols.position], -1)[:, None]
    query = cols.position[..., None]
    return (key <= query) & (key > query - size), exists

  def _window_bias(self, cols, dtype):
    """[batch, token, window + token]: 0 where a query sees a row.

    The dtype's lowest number hides rows outside the window, as transformers
    does; minus infinity hides what is no row at all.
    """
    seen, exists = self._window(cols)
    hidden = jnp.asarray(np.array(ml_dtypes.finfo(dtype).min, dtype))
    bias = jnp.where(seen, jnp.zeros((), dtype), hidden)
    return jnp.where(exists, bias, jnp.asarray(-np.inf, dtype))

  def _attend_online(self, q, keys, cols, visible, place, tap):
    """The same, by blocks of slots: `online_attention`."""
    seen, exists = self._window(cols)
    seen = seen & exists
    window = jnp.arange(seen.shape[-1], dtype=jnp.int32)
    slots, filled = online_attention.in_order(
        seen, window, self.config.window
    )
    if visible is not None:
      count = visible.shape[-1]
      if self.indexer is not None:
        count = min(count, self.config.index_top_k)
      entries, more = online_attention.in_order(visible, place, count)
      slots = jnp.concatenate([slots, entries + seen.shape[-1]], -1)
      filled = jnp.concatenate([filled, more], -1)
    out = online_attention.attend(
        q,
        keys,
        slots,
        filled,
        self.sinks[...],
        self.graph.attention_block,
        self.ops,
        tap.within("online"),
    )
    return tap("values", out)

  def _attend(self, q, keys, bias, tap):
    """[batch, token, head, head_dim] from keys [batch, key, head_dim]."""
    ops = self.ops
    keys = keys[:, None]
    scores = ops.matmul(
        jnp.swapaxes(q, 1, 2), jnp.swapaxes(keys, -1, -2), "attention_scores"
    )
    scores = tap("scores", scores)
    scores = tap("scaled", ops.scale(scores, self.config.head_dim**-0.5))
    scores = tap("masked", ops.add(scores, bias[:, None]))
    wide = ops.cast(scores, "float32")
    sinks = jnp.broadcast_to(
        self.sinks[...][None, :, None, None], (*wide.shape[:-1], 1)
    )
    wide = moves.concatenate([wide, sinks], -1)
    shifted = tap("shifted", ops.add(wide, -moves.largest(wide)))
    weights = ops.softmax(shifted, "attention_softmax")
    weights = tap("softmax_with_sink", weights)[..., :-1]
    if q.dtype != weights.dtype:
      weights = tap("probabilities", ops.cast(weights, q.dtype.name))
    out = ops.matmul(weights, keys, "attention_values")
    return tap("values", jnp.swapaxes(out, 1, 2))

  def _project(self, out, tap):
    """Each group of heads by its own matrix, then all of them by one."""
    ops, groups = self.ops, self.config.output_groups
    batch, tokens = out.shape[:2]
    out = jnp.swapaxes(out.reshape(batch, tokens, groups, -1), 1, 2)
    weight = self.o_a_proj[...].reshape(groups, -1, out.shape[-1])
    out = ops.matmul(out, jnp.swapaxes(weight, -1, -2)[None], "projection")
    out = jnp.swapaxes(tap("o_a_proj", out), 1, 2).reshape(batch, tokens, -1)
    out = self._quantized(out, "o_a", tap)
    return tap("o_b_proj", ops.linear(out, self.o_b_proj[...], "projection"))


def _in_order(window: jax.Array, cols: rows_lib.Columns) -> jax.Array:
  """The rows of a ring by position: L - size .. L - 1."""
  size = window.shape[1]
  position = cols.before[:, None] - size + jnp.arange(size, dtype=jnp.int32)
  return moves.gather_rows(window, position % size)


def _bias(visible, hidden, dtype):
  zero = jnp.zeros((), dtype)
  return jnp.where(visible, zero, jnp.asarray(hidden, dtype))
