"""Which compressed entries a query of a CSA layer may see.

  score_e = sum_h R(R(relu(q_h . k_e) * dim^-1/2) * R(w_h * heads^-1/2))

in float32, over the indexer's own compressed keys k. The top_k largest among
the complete entries are visible; among equals the lower index is.

Layer: modules.
"""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import deepseek_v4_state as state_lib
from moejax.contracts import ops as ops_lib
from moejax.modules import tap as tap_lib
from moejax.modules.deepseek_v4 import compressor as compressor_lib
from moejax.modules.deepseek_v4 import config as config_lib
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
      operations: ops_lib.Operations,
  ):
    self.compressor = compressor_lib.Compressor(
        params["compressor"], config.norm_epsilon, operations
    )
    self.q_b_proj = nnx.Param(params["q_b_proj"])
    self.weights_proj = nnx.Param(params["weights_proj"])
    self.config = config
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
  ) -> tuple[jax.Array, state_lib.CompressorState]:
    """Returns ([batch, token, entry] bool, the state with its new entries).

    Args:
      x: [batch, token, embed].
      rank: [batch, token, query_rank], the attention's own.
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
    keys = ops.cast(state.entries, "float32")[:, None]
    scores = ops.matmul(
        ops.cast(q, "float32"), jnp.swapaxes(keys, -1, -2), "indexer_scores"
    )
    scores = moves.clamp(tap("scores", scores), 0.0, None)
    scores = tap("scaled", ops.scale(scores, dim**-0.5))
    weights = ops.linear(x, self.weights_proj[...], "projection")
    weights = ops.cast(tap("weights_proj", weights), "float32")
    weights = tap("weights", ops.scale(weights, heads**-0.5))
    weighted = tap("weighted", ops.multiply(scores, weights[..., None]))
    total = ops.sum(jnp.swapaxes(weighted, -1, -2), "indexer_sum")[..., 0]
    total = tap("index_scores", total)
    capacity = total.shape[-1]
    complete = complete_entries(cols, self.compressor.rate, capacity)
    total = moves.where(complete, total, np.float32(-np.inf))
    ids = router_lib.select(
        total, min(config.index_top_k, capacity), "lowest_index"
    )
    entry = jnp.arange(capacity, dtype=jnp.int32)
    chosen = (ids[..., None] == entry).any(-2)
    visible = (chosen & complete).astype(jnp.int32)
    return tap("visible", visible) != 0, state
