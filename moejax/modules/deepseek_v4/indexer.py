"""Which compressed entries a query of a CSA layer may see.

  score_e = sum_h R(R(relu(q_h . k_e) * dim^-1/2) * R(w_h * heads^-1/2))

in float32, over the indexer's own compressed keys k. Under indexer="model" each
operation rounds to the model's dtype, and one factor holds both scales:

  score_e = R(sum_h R(relu(R(q_h . k_e)) * R(w_h * dim^-1/2 * heads^-1/2)))

The top_k largest among the complete entries are visible; among equals the lower
index is.

Layer: modules.
"""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import deepseek_v4 as contract_lib
from moejax.contracts import deepseek_v4_state as state_lib
from moejax.contracts import ops as ops_lib
from moejax.modules import tap as tap_lib
from moejax.modules.deepseek_v4 import compressor as compressor_lib
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import quantize
from moejax.modules.deepseek_v4 import state as rows_lib
from moejax.modules.deepseek_v4 import turn
from moejax.numerics import moves
from moejax.numerics import router as router_lib


def complete_entries(
    cols: rows_lib.Columns, rate: int, capacity: int
) -> jax.Array:
  """[batch, token, entry] bool: (entry + 1) * rate <= position + 1."""
  entry = jnp.arange(capacity, dtype=jnp.int32)
  return entry < ((cols.position + 1) // rate)[..., None]


class Indexer(nnx.Module):
  """Scores entries and selects the visible ones."""

  def __init__(
      self,
      params: dict,
      config: config_lib.DeepseekV4Config,
      graph: contract_lib.DeepseekV4Graph,
      operations: ops_lib.Operations,
  ):
    self.compressor = compressor_lib.Compressor(
        params["compressor"], config, graph, True, operations
    )
    self.q_b_proj = nnx.Param(params["q_b_proj"])
    self.weights_proj = nnx.Param(params["weights_proj"])
    self.config = config
    self.graph = graph
    self.ops = operations

  def __call__(
      self,
      x: jax.Array,
      rank: jax.Array,
      state: state_lib.CompressorState,
      cols: rows_lib.Columns,
      table: tuple[jax.Array, jax.Array],
      frequencies: jax.Array,
      factor: float,
      tap: tap_lib.Tap,
  ) -> tuple[jax.Array, jax.Array | None, state_lib.CompressorState]:
    """Returns (visible, place, the state with its new entries).

    visible [batch, token, entry] bool; place, of the same shape, int32: how
    many entries come before by score, None where no order is asked for.

    Args:
      x: [batch, token, embed].
      rank: [batch, token, query_rank], the attention's own, as its second
        query projection reads it.
      state: Of this indexer.
      cols: Where the tokens stand.
      table: cos and sin at the tokens' positions.
      frequencies: [half_dim].
      factor: On cos and sin.
      tap: Sees every step.
    """
    ops, config = self.ops, self.config
    heads, dim = config.index_heads, config.index_dim
    state = self.compressor(
        x, state, cols, frequencies, factor, tap.within("compressor")
    )
    q = tap("q_b_proj", ops.linear(rank, self.q_b_proj[...], "projection"))
    q = q.reshape(*x.shape[:2], heads, dim)
    by_head = [t[:, :, None] for t in table]
    q = turn.turn(q, *by_head, ops, tap.within("q_turn"))
    q = quantize.index(
        q, self.graph.quantization, ops, tap.within("q_simulation")
    )
    wide = self.graph.indexer == "float32"
    dtype = "float32" if wide else config.dtype
    keys = ops.cast(state.entries, dtype)[:, None]
    scores = ops.matmul(
        ops.cast(q, dtype), jnp.swapaxes(keys, -1, -2), "indexer_scores"
    )
    scores = moves.clamp(tap("scores", scores), 0.0, None)
    factor = heads**-0.5 if wide else dim**-0.5 * heads**-0.5
    if wide:
      scores = tap("scaled", ops.scale(scores, dim**-0.5))
    weights = ops.linear(x, self.weights_proj[...], "projection")
    weights = ops.cast(tap("weights_proj", weights), dtype)
    weights = tap("weights", ops.scale(weights, factor))
    weighted = tap("weighted", ops.multiply(scores, weights[..., None]))
    total = ops.sum(jnp.swapaxes(weighted, -1, -2), "indexer_sum")[..., 0]
    total = tap("index_scores", total)
    capacity = total.shape[-1]
    complete = complete_entries(cols, self.compressor.rate, capacity)
    total = moves.where(complete, total, -np.inf)
    top_k, place = min(config.index_top_k, capacity), None
    if self.graph.attention == "online_softmax":
      ids = router_lib.select(total, capacity, "lowest_index")
      place = jnp.argsort(ids, axis=-1).astype(jnp.int32)
      ids = ids[..., :top_k]
    else:
      ids = router_lib.select(total, top_k, "lowest_index")
    entry = jnp.arange(capacity, dtype=jnp.int32)
    chosen = (ids[..., None] == entry).any(-2)
    visible = (chosen & complete).astype(jnp.int32)
    return tap("visible", visible) != 0, place, state
