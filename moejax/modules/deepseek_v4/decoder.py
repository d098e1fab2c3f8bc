"""The DeepSeek-V4 decoder: embed, layers, head collapse, norm, projection.

The operations, the contract and the weights are given from outside; the state
goes in and comes out.

Layer: modules.
"""

from collections.abc import Mapping

from flax import nnx
import jax
import jax.numpy as jnp

from moejax.contracts import deepseek_v4 as contract_lib
from moejax.contracts import deepseek_v4_state as state_lib
from moejax.contracts import ops as ops_lib
from moejax.modules import config as shapes
from moejax.modules import rotary
from moejax.modules import tap as tap_lib
from moejax.modules.deepseek_v4 import attention
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import hyper
from moejax.modules.deepseek_v4 import moe
from moejax.modules.deepseek_v4 import norm
from moejax.modules.deepseek_v4 import quantize
from moejax.modules.deepseek_v4 import state as rows_lib
from moejax.modules.deepseek_v4 import turn
from moejax.numerics import moves


class Layer(nnx.Module):
  """Attention, then the sparse layer, each inside a hyper-connection."""

  def __init__(self, params, config, contract, index, operations):
    epsilon, graph = config.norm_epsilon, contract.graph
    self.attention_hc = hyper.HyperConnection(
        params["attention_hc"], config, graph, operations
    )
    self.input_norm = norm.Norm(params["input_norm"], epsilon, operations)
    self.attention = attention.Attention(
        params["attention"], config, index, graph, operations
    )
    self.moe_hc = hyper.HyperConnection(
        params["moe_hc"], config, graph, operations
    )
    self.mlp_norm = norm.Norm(params["mlp_norm"], epsilon, operations)
    self.moe = moe.MoE(params["moe"], config, contract, index, operations)
    self.precision = graph.hyper_mix
    self.ops = operations

  def __call__(self, streams, tokens, state, cols, rope, tap):
    """Returns (streams, state); rope is (cos, sin, frequencies, factor)."""
    ops = self.ops
    post, comb, x = self.attention_hc(streams, tap.within("attention_hc"))
    x = self.input_norm(x, tap.within("input_norm"))
    x, state = self.attention(x, state, cols, *rope, tap.within("attention"))

    def mix(block, name):
      return hyper.mix(
          post, comb, block, streams, self.precision, ops, tap.within(name)
      )

    streams = mix(x, "attention_mix")
    streams = tap("streams_after_attention", streams)
    post, comb, x = self.moe_hc(streams, tap.within("moe_hc"))
    x = self.mlp_norm(x, tap.within("mlp_norm"))
    x = self.moe(x, tokens, cols.valid, tap.within("moe"))
    return tap("streams", mix(x, "moe_mix")), state


class Decoder(nnx.Module):
  """Tokens and state to logits and state."""

  def __init__(
      self,
      config: config_lib.DeepseekV4Config,
      params: Mapping,
      contract: contract_lib.DeepseekV4Contract,
      operations: ops_lib.Operations,
  ):
    """Builds a decoder over the nested arrays of `parameters.leaves`.

    Raises:
      ValueError: the combine ends in another dtype than the config's, or a
        width does not fit what the contract quantises.
      NotImplementedError: the contract asks for what is not covered.
    """
    quantize.check(config, contract.graph.quantization)
    self.config = config
    self.graph = contract.graph
    self.embedding = nnx.Param(params["embedding"])
    self.layers = nnx.List([
        Layer(params["layers"][i], config, contract, i, operations)
        for i in range(config.num_layers)
    ])
    self.head_hc = hyper.HyperHead(
        params["head_hc"], config, contract.graph, operations
    )
    self.final_norm = norm.Norm(
        params["final_norm"], config.norm_epsilon, operations
    )
    self.lm_head = nnx.Param(params["lm_head"])
    self.ops = operations

  def __call__(
      self,
      tokens: jax.Array,
      state: state_lib.DeepseekV4State,
      valid: jax.Array | None = None,
      tap: tap_lib.Tap = tap_lib.SILENT,
  ) -> tuple[jax.Array, state_lib.DeepseekV4State]:
    """Feeds tokens after those already in the state.

    Args:
      tokens: [batch, token] int32.
      state: What earlier steps left.
      valid: [batch, token] bool, False for left padding; None means all.
      tap: Sees every step.

    Returns:
      (logits [batch, token, vocab], the state after this step).
    """
    config, ops = self.config, self.ops
    if valid is None:
      valid = jnp.ones(tokens.shape, bool)
    cols = rows_lib.columns(valid, state.lengths)
    tap("positions", cols.position)
    x = tap("embed", moves.take_rows(self.embedding[...], tokens))
    rope = {
        name: self._rope(name, cols, x.dtype, tap.within(f"rotary.{name}"))
        for name in ("main", "compress")
    }
    streams = jnp.repeat(x[:, :, None], config.streams, axis=2)
    layers = []
    for index, layer in enumerate(self.layers):
      swa = config.attentions[index] == config_lib.SWA
      streams, after = layer(
          streams,
          tokens,
          state.layers[index],
          cols,
          rope["main" if swa else "compress"],
          tap.within(f"layers.{index}"),
      )
      layers.append(after)
    x = self.head_hc(streams, tap.within("head_hc"))
    x = self.final_norm(x, tap.within("final_norm"))
    weight = self.lm_head[...]
    if self.graph.logits == "float32":
      x, weight = (ops.cast(v, "float32") for v in (x, weight))
    logits = tap("logits", ops.linear(x, weight, "lm_head"))
    return logits, state_lib.DeepseekV4State(tuple(layers), cols.after)

  def _rope(self, name, cols, dtype, tap):
    """(cos, sin, frequencies, factor) of one kind of layer."""
    config = self.config
    theta, scaling = config.rope_theta, shapes.RopeScaling()
    if name == "compress":
      theta, scaling = config.compress_theta, config.compress_scaling
    frequencies = rotary.frequencies_of(
        config.rotary_dim, theta, scaling, config.max_positions, self.ops
    )
    frequencies = tap("inverse_frequencies", frequencies)
    factor = rotary.attention_factor(scaling)
    cos, sin = turn.tables(
        frequencies,
        cols.position,
        factor,
        turn.table_dtype(self.graph, dtype),
        self.ops,
        tap,
    )
    return cos, sin, frequencies, factor
