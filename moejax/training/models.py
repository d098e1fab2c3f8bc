"""What a training step must know of each architecture, one class each.

Master weights are float32. A forward pass rounds each once to the dtype in
which its decoder holds it, so a trained model computes what its exported
weights compute.

Layer: training.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.contracts import decoder as decoder_contract
from moejax.contracts import deepseek_v4 as deepseek_v4_contract
from moejax.contracts import named_combines
from moejax.modules import config as qwen3_moe
from moejax.modules import decoder as qwen3_moe_decoder
from moejax.modules.deepseek_v4 import config as deepseek_v4
from moejax.modules.deepseek_v4 import decoder as deepseek_v4_decoder
from moejax.modules.deepseek_v4 import parameters as deepseek_v4_parameters
from moejax.modules.deepseek_v4 import state as deepseek_v4_state
from moejax.training import losses
from moejax.training import operations
from moejax.training import recipe as recipe_lib
from moejax.training import watch as watch_lib

Leaf = tuple[tuple[int, ...], str]
Arrays = dict[str, jax.Array]


class Outputs(NamedTuple):
  """What one forward pass returns.

  Attributes:
    logits: [batch, token, vocab] in the decoder's dtype.
    auxiliary: {name: scalar float32} of losses, factors not applied.
    ids: {layer: [token, slot] int32}, the routes.
  """

  logits: jax.Array
  auxiliary: dict[str, jax.Array]
  ids: dict[int, jax.Array]


def _combine(dtype):
  return named_combines.at_dtype(
      named_combines.named("transformers_grouped_mm"), dtype
  )


def _round(leaves: Mapping[str, Leaf], params: Arrays) -> Arrays:
  return {path: params[path].astype(leaves[path][1]) for path in leaves}


@dataclasses.dataclass(frozen=True)
class Qwen3Moe:
  """A Qwen3-MoE decoder; its load is balanced by a loss, layer by layer.

  transformers forms the loss once, over the tokens of all layers together, and
  then an expert without routes in one layer is hidden by its namesakes in the
  others: after 60 steps of the small model five layers had some. So here it is
  the mean over layers.
  """

  config: qwen3_moe.DecoderConfig
  # Leaves that no gradient trains.
  fixed = ()

  def leaves(self) -> dict[str, Leaf]:
    """{path: (shape, dtype)} as the decoder holds them."""
    shapes = qwen3_moe_decoder.parameter_shapes(self.config)
    return {path: (shape, self.config.dtype) for path, shape in shapes.items()}

  def state(self, batch: int, length: int) -> Any:
    """What a forward pass begins with: nothing that has to be handed in."""
    del batch, length

  def apply(
      self, params: Arrays, tokens: jax.Array, state: Any, spread=lambda x: x
  ) -> Outputs:
    """Runs [batch, token] int32 from an empty state.

    Args:
      params: Master weights.
      tokens: The input.
      state: As `state` returned it.
      spread: Makes the mean over devices of a value without a gradient.
    """
    del state
    config, watch = self.config, watch_lib.Watch()
    router = qwen3_moe.router_contract(config)
    model = qwen3_moe_decoder.Decoder(
        config,
        qwen3_moe_decoder.nest(_round(self.leaves(), params)),
        decoder_contract.native(router, _combine(config.dtype)),
        operations.TrainingOperations(),
    )
    empty = qwen3_moe_decoder.empty_state(config, *tokens.shape)
    logits, _ = model(tokens, empty, tap=watch)
    ids = watch.by_layer("moe.router.ids")
    scores = watch.by_layer("moe.router.logits")
    terms = [
        losses.load_balance(
            spread(losses.routed_fraction(ids[layer], config.num_experts)),
            jax.nn.softmax(scores[layer].astype(jnp.float32)).mean(0),
        )
        for layer in ids
    ]
    auxiliary = {}
    if terms:
      auxiliary["balance"] = sum(terms[1:], terms[0]) / jnp.float32(len(terms))
    return Outputs(logits, auxiliary, ids)

  def factor(self, recipe: recipe_lib.Recipe, name: str) -> float:
    """The factor on an auxiliary loss."""
    return {"balance": recipe.balance}[name]


@dataclasses.dataclass(frozen=True)
class DeepseekV4:
  """A DeepSeek-V4 decoder; its load is balanced by selection biases.

  A bias has no gradient: behind a step it rises by the recipe's speed where an
  expert had fewer routes than the mean and falls where it had more. Hash
  tables stay as they were drawn. Indexers are trained by the divergence of
  their scores from what attention reads, and by nothing else.
  """

  config: deepseek_v4.DeepseekV4Config
  fixed = (".moe.bias", ".moe.table")

  def leaves(self) -> dict[str, Leaf]:
    """{path: (shape, dtype)} as the decoder holds them."""
    return deepseek_v4_parameters.leaves(self.config)

  def state(self, batch: int, length: int) -> Any:
    """An empty state. As an argument of the step nothing of it is folded."""
    return deepseek_v4_state.empty(self.config, batch, length)

  def apply(
      self, params: Arrays, tokens: jax.Array, state: Any, spread=lambda x: x
  ) -> Outputs:
    """As `Qwen3Moe.apply`."""
    del spread
    config, watch = self.config, watch_lib.Watch()
    contract = deepseek_v4_contract.of(
        "native",
        deepseek_v4.router_contract(config),
        _combine(config.dtype),
        deepseek_v4_contract.TRANSFORMERS,
    )
    model = deepseek_v4_decoder.Decoder(
        config,
        qwen3_moe_decoder.nest(_round(self.leaves(), params)),
        contract,
        operations.TrainingOperations(),
    )
    logits, _ = model(tokens, state, tap=watch)
    weights = watch.by_layer("attention.softmax_with_sink")
    visible = watch.by_layer("attention.indexer.visible")
    scores = watch.by_layer("attention.indexer.index_scores")
    terms = [
        losses.indexer_divergence(weights[i], scores[i], visible[i])
        for i in scores
    ]
    auxiliary = {"indexer": sum(terms[1:], terms[0])} if terms else {}
    return Outputs(logits, auxiliary, watch.by_layer("moe.router.ids"))

  def factor(self, recipe: recipe_lib.Recipe, name: str) -> float:
    """The factor on an auxiliary loss."""
    return {"indexer": recipe.indexer}[name]


Model = Qwen3Moe | DeepseekV4


def of(config: Any) -> Model:
  """Returns the model of a config."""
  if isinstance(config, qwen3_moe.DecoderConfig):
    return Qwen3Moe(config)
  return DeepseekV4(config)
