"""One optimisation step of a decoder in portable arithmetic.

Layer: protocols.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts.gradients import optimizer
from moejax.modules import config as config_lib
from moejax.modules import decoder as decoder_lib
from moejax.modules import tap as tap_lib
from moejax.numerics.portable import differentiable_ops
from moejax.numerics.portable import first_step
from moejax.numerics.portable import with_gradients
from moejax.protocols.gradients import places


@dataclasses.dataclass(slots=True)
class Record:
  """What one step showed, bit for bit.

  Attributes:
    loss: float32 scalar.
    cotangents: {tap: array}, in the order in which they were complete.
    gradients: {parameter: array}.
    updated: {parameter: array}, after the step.
  """

  loss: np.ndarray
  cotangents: dict[str, np.ndarray]
  gradients: dict[str, np.ndarray]
  updated: dict[str, np.ndarray]

  def at(self, place: places.Place) -> np.ndarray | None:
    """The value at a place, or None if it was not seen."""
    if place.kind == places.LOSS:
      return self.loss
    return {
        places.COTANGENT: self.cotangents,
        places.GRADIENT: self.gradients,
        places.UPDATED: self.updated,
    }[place.kind].get(place.name)


class CotangentTap(tap_lib.Tap):
  """Keeps the cotangent of every observed activation, by its name."""

  def __init__(self):
    super().__init__()
    self.seen: dict[str, np.ndarray] = {}

  def observe(self, name, value):
    if not jnp.issubdtype(value.dtype, jnp.floating):
      return value

    def back(g, operands, result, needed):
      self.seen[name] = np.asarray(g)
      return (g,)

    return with_gradients.run(lambda x: x, back, (value,))


def run(
    config: config_lib.DecoderConfig,
    params: Mapping[str, jax.Array],
    build: Callable[[Mapping[str, Any]], decoder_lib.Decoder],
    operations: differentiable_ops.DifferentiableOperations,
    tokens: np.ndarray,
    step: optimizer.FirstStep,
    seed: float = 1.0,
) -> Record:
  """Forward, backward, one step of the optimiser.

  Args:
    config: The decoder's.
    params: {dotted path: array}.
    build: Parameters to a decoder over `operations`.
    operations: The arithmetic.
    tokens: [batch, token] ints, each the target of the one before it.
    step: The optimiser.
    seed: Cotangent of the loss.
  """
  tap = CotangentTap()

  def loss(params):
    state = decoder_lib.empty_state(config, *tokens.shape)
    logits, _ = build(params)(jnp.asarray(tokens, jnp.int32), state, tap=tap)
    return differentiable_ops.loss(operations, logits, tokens)

  value, back = jax.vjp(loss, dict(params))
  (gradients,) = back(jnp.float32(seed))
  updated = {
      path: np.asarray(
          first_step.updated(
              params[path], gradients[path], step, operations.plain
          )
      )
      for path in params
  }
  return Record(
      np.asarray(value),
      _with_gate(tap.seen),
      {path: np.asarray(g) for path, g in gradients.items()},
      updated,
  )


def _with_gate(seen):
  """Adds the gate half of each fused projection, as the activation sees it."""
  out = dict(seen)
  for name, value in seen.items():
    if name.endswith("moe.experts.gate_up"):
      gate = np.split(value, 2, axis=-1)[0]
      out[name.removesuffix("gate_up") + "gate"] = gate
  return out
