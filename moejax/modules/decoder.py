"""The Qwen3-MoE decoder: embed, layers, norm, output projection.

The operations, the contract and the weights are given from outside; the state
goes in and comes out. One set of weights serves several decoders: building a
second one for another arithmetic copies nothing.

Layer: modules.
"""

from collections.abc import Mapping

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import decoder as decoder_contract
from moejax.contracts import ops as ops_lib
from moejax.contracts import packed_moe
from moejax.modules import attention
from moejax.modules import config as config_lib
from moejax.modules import experts
from moejax.modules import moe
from moejax.modules import norm
from moejax.modules import packed_experts
from moejax.modules import rotary
from moejax.modules import state as state_lib
from moejax.modules import tap as tap_lib
from moejax.numerics import declared_moves


class Layer(nnx.Module):
  """x + attention(norm(x)), then + mlp(norm(.)), one rounding an addition."""

  def __init__(self, params, config, contract, index, operations):
    epsilon = config.norm_epsilon
    self.input_norm = norm.RMSNorm(params["input_norm"], epsilon, operations)
    self.attention = attention.Attention(
        params["attention"], config, operations
    )
    self.mlp_norm = norm.RMSNorm(params["mlp_norm"], epsilon, operations)
    if index in config.sparse_layers:
      self.moe = moe.MoE(params["moe"], contract, index, operations)
      self.mlp = None
    else:
      self.moe = None
      self.mlp = experts.DenseMLP(params["mlp"], operations)
    self.ops = operations

  def __call__(self, x, cos, sin, keys, values, start, bias, valid, tap):
    hidden, x = self.input_norm.beside(x, tap.within("input_norm"))
    hidden, keys, values = self.attention(
        hidden, cos, sin, keys, values, start, bias, tap.within("attention")
    )
    x = tap("after_attention", self.ops.add(x, hidden))
    hidden, x = self.mlp_norm.beside(x, tap.within("mlp_norm"))
    if self.moe is not None:
      hidden = self.moe(hidden, valid, tap.within("moe"))
    else:
      hidden = self.mlp(hidden, tap.within("mlp"))
    return tap("output", self.ops.add(x, hidden)), keys, values


class Decoder(nnx.Module):
  """Tokens and state to logits and state."""

  def __init__(
      self,
      config: config_lib.DecoderConfig,
      params: Mapping,
      contract: (
          decoder_contract.DecoderContract | packed_moe.PackedDecoderContract
      ),
      operations: ops_lib.Operations,
  ):
    """Builds a decoder.

    Args:
      config: The shape.
      params: Nested arrays, as `parameter_shapes` lists them. In the place of
        a layer's "gate_up" and "down" their AWQ tensors may stand.
      contract: Router and combine; its reductions are in `operations`.
      operations: The arithmetic.

    Raises:
      ValueError: the contract speaks of packed experts and no layer has any,
        or the reverse.
      UnsupportedError: packed experts do not fit the contract's tiles.
    """
    self.config = config
    self.embedding = nnx.Param(params["embedding"])
    self.layers = nnx.List([
        Layer(params["layers"][i], config, contract, i, operations)
        for i in range(config.num_layers)
    ])
    packed = isinstance(contract, packed_moe.PackedDecoderContract)
    if packed and not any(
        packed_experts.is_packed(params["layers"][i]["moe"])
        for i in config.sparse_layers
    ):
      raise ValueError(
          f"contract {contract.name!r} is that of packed experts, and no layer"
          " has any."
      )
    self.final_norm = norm.RMSNorm(
        params["final_norm"], config.norm_epsilon, operations
    )
    self.lm_head = (
        None if config.tied_embeddings else nnx.Param(params["lm_head"])
    )
    self.ops = operations

  def packed_summary(self) -> dict:
    """Which layers hold packed experts, see `packed_experts.summary`."""
    return packed_experts.summary({
        index: layer.moe.experts
        for index, layer in enumerate(self.layers)
        if layer.moe is not None
    })

  def __call__(
      self,
      tokens: jax.Array,
      state: state_lib.KVState,
      valid: jax.Array | None = None,
      tap: tap_lib.Tap = tap_lib.SILENT,
  ) -> tuple[jax.Array, state_lib.KVState]:
    """Feeds tokens after those already in the state.

    Args:
      tokens: [batch, token] int32.
      state: Its length is the row at which this step begins.
      valid: [batch, token] bool, False for left padding; None means all.
      tap: Sees every step.

    Returns:
      (logits [batch, token, vocab], the state with this step's rows).

    Raises:
      ValueError: the tokens do not fit the state or the model's positions.
    """
    config, ops = self.config, self.ops
    num_tokens, start = tokens.shape[1], state.length
    end = start + num_tokens
    capacity = state.valid.shape[1]
    if end > min(capacity, config.max_positions):
      raise ValueError(
          f"{end} positions do not fit a state of {capacity} rows and a model"
          f" of {config.max_positions} positions."
      )
    if valid is None:
      valid = jnp.ones(tokens.shape, bool)
    all_valid = jax.lax.dynamic_update_slice(state.valid, valid, (0, start))
    before = jnp.sum(
        all_valid[:, :start], axis=-1, keepdims=True, dtype=jnp.int32
    )
    positions = tap("positions", rotary.positions(valid, before))

    moves, table = declared_moves.of(ops), self.embedding[...]
    if self.lm_head is None:
      table, head = moves.share(table, 2)
    else:
      head = self.lm_head[...]
    x = tap("embed", moves.lookup(table, tokens))
    turning = tap.within("rotary")
    frequencies = rotary.inverse_frequencies(config, ops)
    frequencies = turning("inverse_frequencies", frequencies)
    cos, sin = rotary.tables(
        frequencies,
        positions,
        rotary.attention_factor(config.rope_scaling),
        x.dtype.name,
        ops,
        turning,
    )
    bias = attention.visibility_bias(
        all_valid, start, num_tokens, config.sliding_window, x.dtype.name
    )
    keys, values = [], []
    for index, layer in enumerate(self.layers):
      x, k, v = layer(
          x,
          cos,
          sin,
          state.keys[index],
          state.values[index],
          start,
          bias,
          valid,
          tap.within(f"layers.{index}"),
      )
      keys.append(k)
      values.append(v)
    x = self.final_norm(x, tap.within("final_norm"))
    logits = tap("logits", ops.linear(x, head, "lm_head"))
    return logits, state_lib.KVState(
        tuple(keys), tuple(values), end, all_valid
    )


def empty_state(
    config: config_lib.DecoderConfig,
    batch: int,
    capacity: int,
    dtype: str | None = None,
) -> state_lib.KVState:
  """Returns a state without rows, for up to `capacity` of them."""
  shape = (batch, capacity, config.num_kv_heads, config.head_dim)
  zeros = jnp.zeros(shape, dtype or config.dtype)
  layers = range(config.num_layers)
  return state_lib.KVState(
      tuple(zeros for _ in layers),
      tuple(zeros for _ in layers),
      0,
      jnp.zeros((batch, capacity), bool),
  )


def parameter_shapes(
    config: config_lib.DecoderConfig,
) -> dict[str, tuple[int, ...]]:
  """Returns {dotted path: shape} of every parameter, in a stable order."""
  c = config
  heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
  shapes = {"embedding": (c.vocab_size, c.embed)}
  for i in range(c.num_layers):
    at = f"layers.{i}"
    shapes[f"{at}.input_norm"] = (c.embed,)
    for name, rows, columns in (
        ("q_proj", heads, c.embed),
        ("k_proj", kv, c.embed),
        ("v_proj", kv, c.embed),
        ("o_proj", c.embed, heads),
    ):
      shapes[f"{at}.attention.{name}"] = (rows, columns)
      if c.attention_bias:
        shapes[f"{at}.attention.{name}_bias"] = (rows,)
    shapes[f"{at}.attention.q_norm"] = (c.head_dim,)
    shapes[f"{at}.attention.k_norm"] = (c.head_dim,)
    shapes[f"{at}.mlp_norm"] = (c.embed,)
    if i in c.sparse_layers:
      shapes[f"{at}.moe.router"] = (c.num_experts, c.embed)
      shapes[f"{at}.moe.gate_up"] = (
          c.num_experts,
          2 * c.expert_hidden,
          c.embed,
      )
      shapes[f"{at}.moe.down"] = (c.num_experts, c.embed, c.expert_hidden)
    else:
      shapes[f"{at}.mlp.gate_proj"] = (c.hidden, c.embed)
      shapes[f"{at}.mlp.up_proj"] = (c.hidden, c.embed)
      shapes[f"{at}.mlp.down_proj"] = (c.embed, c.hidden)
  shapes["final_norm"] = (c.embed,)
  if not c.tied_embeddings:
    shapes["lm_head"] = (c.vocab_size, c.embed)
  return shapes


def nest(flat: Mapping[str, jax.Array | np.ndarray]) -> dict:
  """Turns {dotted path: array} into the nested mapping a decoder takes."""
  out: dict = {}
  for path, value in flat.items():
    *parents, leaf = path.split(".")
    node = out
    for part in parents:
      node = node.setdefault(int(part) if part.isdigit() else part, {})
    node[leaf] = value
  return out
