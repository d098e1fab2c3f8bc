"""Several tokens become one compressed key-value entry.

Each channel of an entry is a weighted mean over tokens, its weights a softmax
of gate + position bias. In an HCA layer the tokens are those of one window of
`rate` tokens; in a CSA layer the first half of the channels of the window
before it, then the second half of its own. An entry is normalised and turned at
the position of its window's first token. Under compressor="float32" the
projections, weights and sum stay in float32, and the sum is rounded to the
model's dtype.

Layer: modules. State: contracts/deepseek_v4_state.py.
"""

from flax import nnx
import jax
import jax.numpy as jnp

from moejax.contracts import deepseek_v4 as contract_lib
from moejax.contracts import deepseek_v4_state as state_lib
from moejax.contracts import ops as ops_lib
from moejax.modules import tap as tap_lib
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import norm
from moejax.modules.deepseek_v4 import quantize
from moejax.modules.deepseek_v4 import state as rows_lib
from moejax.modules.deepseek_v4 import turn
from moejax.numerics import moves


class Compressor(nnx.Module):
  """Appends the entries of the windows that a step completes."""

  def __init__(
      self,
      params: dict,
      config: config_lib.DeepseekV4Config,
      graph: contract_lib.DeepseekV4Graph,
      indexes: bool,
      operations: ops_lib.Operations,
  ):
    """Takes the compressor's parameters.

    Args:
      params: Nested arrays.
      config: The decoder.
      graph: Its compressor, rotary_tables and quantization matter here.
      indexes: Whether the entries are an indexer's keys.
      operations: The arithmetic.
    """
    self.kv_proj = nnx.Param(params["kv_proj"])
    self.gate_proj = nnx.Param(params["gate_proj"])
    self.position_bias = nnx.Param(params["position_bias"])
    self.norm = norm.Norm(params["norm"], config.norm_epsilon, operations)
    self.rate = params["position_bias"].shape[0]
    self.dim = params["norm"].shape[0]
    self.rotary_dim = config.rotary_dim
    self.row_dtype = rows_lib.row_dtype(config, graph)
    self.graph = graph
    self.indexes = indexes
    self.ops = operations

  def __call__(
      self,
      x: jax.Array,
      state: state_lib.CompressorState,
      cols: rows_lib.Columns,
      frequencies: jax.Array,
      factor: float,
      tap: tap_lib.Tap,
  ) -> state_lib.CompressorState:
    """Feeds [batch, token, embed]; returns the state with its new entries.

    Raises:
      ValueError: the state's rows have another dtype than the graph gives them.
    """
    ops, rate = self.ops, self.rate
    if state.kv.dtype != self.row_dtype:
      raise ValueError(
          f"the state's rows are {state.kv.dtype}, but"
          f" compressor={self.graph.compressor!r} keeps {self.row_dtype}: make"
          " it by state.empty with the same graph."
      )
    kv = tap("kv_proj", self._project(x, self.kv_proj[...]))
    gate = tap("gate_proj", self._project(x, self.gate_proj[...]))
    batch, tokens = x.shape[:2]
    first, last = cols.before // rate, cols.after // rate
    count = (tokens + rate - 1) // rate  # At most so many are completed.
    window = first[:, None] + jnp.arange(count, dtype=jnp.int32)
    complete = window < last[:, None]
    wanted = window[..., None] * rate + jnp.arange(rate, dtype=jnp.int32)
    wanted = wanted.reshape(batch, -1)

    def of_windows(old, new):
      found = rows_lib.rows_at(old, wanted % rate, new, wanted, cols)
      return found.reshape(batch, count, rate, -1)

    own_kv = of_windows(state.kv, kv)
    scores = ops.add(
        ops.cast(of_windows(state.gate, gate), "float32"),
        self.position_bias[...],
    )
    scores = tap("scores", scores)
    if state.previous_kv is None:
      pool_kv, pool_scores, previous = own_kv, scores, (None, None)
    else:
      pool_kv, previous_kv = self._with_previous(
          own_kv, state.previous_kv, first, last
      )
      pool_scores, previous_score = self._with_previous(
          scores, state.previous_score, first, last
      )
      previous = previous_kv, previous_score
    entry = self._pool(pool_kv, pool_scores, x.dtype, tap)
    cos, sin = turn.tables(
        frequencies,
        window * rate,
        factor,
        turn.table_dtype(self.graph, x.dtype),
        ops,
        tap.within("rotary"),
    )
    entry = turn.turn(entry, cos, sin, ops, tap.within("turn"))
    entry = self._quantized(entry, tap)
    # An operation set may answer in another dtype, as error bounds do. Where
    # no window is complete, no other backend's value takes the answer's place.
    entry = entry.astype(state.entries.dtype)
    entry = moves.where_rows(complete, entry, jnp.zeros_like(entry))
    capacity = state.entries.shape[1]
    slot = jnp.broadcast_to(
        jnp.arange(capacity, dtype=jnp.int32), (batch, capacity)
    )
    is_new = (slot >= first[:, None]) & (slot < last[:, None])
    entries = moves.where_rows(
        is_new,
        moves.gather_rows(entry, slot - first[:, None]),
        state.entries,
    )
    return state_lib.CompressorState(
        rows_lib.ring(state.kv, kv, cols),
        rows_lib.ring(state.gate, gate, cols),
        *previous,
        entries,
    )

  def _project(self, x, weight):
    ops = self.ops
    if self.graph.compressor == "float32":
      x, weight = (ops.cast(v, "float32") for v in (x, weight))
    return ops.linear(x, weight, "projection")

  def _quantized(self, entry, tap):
    contract = self.graph.quantization
    if self.indexes:
      return quantize.index(entry, contract, self.ops, tap)
    return quantize.entry(
        entry, self.rotary_dim, contract, "quantized", self.ops, tap
    )

  def _with_previous(self, own, previous, first, last):
    """Puts the earlier window's first half in front of the own second half.

    Returns:
      ([batch, window, 2 * rate, dim], the last complete window, whole).
    """
    dim, count = self.dim, own.shape[1]
    own = own.astype(previous.dtype)  # As for an entry, above.
    before = moves.concatenate([previous[:, None], own[:, :-1]], 1)
    pool = moves.concatenate([before[..., :dim], own[..., dim:]], 2)
    at = jnp.clip(last - first - 1, 0, count - 1)[:, None]
    newest = moves.gather_rows(own, at)[:, 0]
    return pool, moves.where_rows(last > first, newest, previous)

  def _pool(self, kv, scores, dtype, tap):
    """R(sum R(kv * R(softmax(scores)))) over the tokens of a window."""
    ops = self.ops

    def last(x):
      return jnp.swapaxes(x, -1, -2)

    weights = last(ops.softmax(last(scores), "compressor_softmax"))
    weights = tap("softmax", weights)
    if kv.dtype != weights.dtype:
      weights = tap("weights", ops.cast(weights, kv.dtype.name))
    products = tap("products", ops.multiply(kv, weights))
    pooled = ops.sum(last(products), "compressor_sum")[..., 0]
    pooled = tap("pooled", pooled)
    if pooled.dtype != dtype:
      pooled = tap("pooled_rounded", ops.cast(pooled, dtype.name))
    return self.norm(pooled, tap.within("norm"))
