"""Several optimiser steps as one compiled call, over all devices.

The batch is split over the devices; weights and optimiser are copied. Each
device differentiates its part and the gradients are averaged: a mean over
sequences of equal length, so the loss does not depend on the split but for
rounding. The load-balancing loss is that of the whole batch: its counts are
averaged over the devices before it is formed.

A step whose loss or gradient is not finite changes nothing, nor does any step
after it in the call; the result says which leaf it was.

Layer: training.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from moejax.training import balance
from moejax.training import first_weights
from moejax.training import losses
from moejax.training import models
from moejax.training import recipe as recipe_lib

_AXIS = "data"


class State(NamedTuple):
  """What a run carries on.

  Attributes:
    params: {path: float32} that gradients train.
    fixed: {path: array} of leaves without a gradient: biases, hash tables.
    optimiser: Of optax.
    step: int32 scalar, steps done.
  """

  params: dict[str, jax.Array]
  fixed: dict[str, jax.Array]
  optimiser: Any
  step: jax.Array


class Report(NamedTuple):
  """What steps showed; each value has a leading axis of steps.

  Attributes:
    loss: Cross entropy in nats per token.
    auxiliary: {name: loss without its factor}.
    gradient_norm: Global, before it is clipped.
    finite: [leaf] bool, in the order of sorted paths: whether its gradient is.
    done: Whether the step changed the weights.
    counts: {layer: [expert] routes}.
  """

  loss: jax.Array
  auxiliary: dict[str, jax.Array]
  gradient_norm: jax.Array
  finite: jax.Array
  done: jax.Array
  counts: dict[int, jax.Array]


class Trainer:
  """A model and a recipe as a function from state and batches to state."""

  def __init__(
      self,
      model: models.Model,
      recipe: recipe_lib.Recipe,
      devices: Sequence[jax.Device] | None = None,
  ):
    """Compiles nothing yet.

    Args:
      model: The architecture.
      recipe: How it is trained.
      devices: Over which the batch is split; None takes all that JAX sees.

    Raises:
      ValueError: the batch is no multiple of the number of devices.
    """
    self.model, self.recipe = model, recipe
    devices = list(devices or jax.devices())
    if recipe.batch % len(devices):
      raise ValueError(
          f"batch={recipe.batch} sequences cannot be split evenly over"
          f" {len(devices)} devices."
      )
    self._mesh = jax.sharding.Mesh(np.array(devices), (_AXIS,))
    self._optimiser = optimiser(model, recipe)
    self._start = self._spread(
        model.state(recipe.batch, recipe.length), _spec()
    )
    self.paths = sorted(
        path for path in model.leaves() if not path.endswith(model.fixed)
    )
    self._run: Callable = jax.jit(self._steps, donate_argnums=0)

  def initial(self) -> State:
    """Returns the state before the first step."""
    weights = first_weights.draw(self.model, self.recipe.seed)
    params = {path: weights.pop(path) for path in self.paths}
    state = State(
        params,
        weights,
        self._optimiser.init(params),
        jnp.zeros((), jnp.int32),
    )
    return self._spread(state, jax.sharding.PartitionSpec())

  def place(self, state: State) -> State:
    """Puts a restored state on the devices."""
    return self._spread(state, jax.sharding.PartitionSpec())

  def run(self, state: State, batches: np.ndarray) -> tuple[State, Report]:
    """Takes one step for each of [step, batch, length + 1] int32.

    The given state's memory is reused; it is gone afterwards.
    """
    tokens = self._spread(batches, jax.sharding.PartitionSpec(None, _AXIS))
    return self._run(state, tokens, self._start)

  def compile(self, state: State) -> Any:
    """Returns the compiled call for this state's shapes."""
    recipe = self.recipe
    shape = (recipe.chunk, recipe.batch, recipe.length + 1)
    tokens = jax.ShapeDtypeStruct(
        shape,
        jnp.int32,
        sharding=jax.sharding.NamedSharding(
            self._mesh, jax.sharding.PartitionSpec(None, _AXIS)
        ),
    )
    self._run = self._run.lower(state, tokens, self._start).compile()
    return self._run

  def _spread(self, tree, spec):
    return jax.device_put(tree, jax.sharding.NamedSharding(self._mesh, spec))

  def _steps(self, state, batches, start):
    def one(carry, tokens):
      state, going = carry
      fresh, report = self._step(state, tokens, start, going)
      return (fresh, report.done), report

    (state, _), reports = lax.scan(one, (state, jnp.array(True)), batches)
    return state, reports

  def _step(self, state, tokens, start, going):
    gradients, loss, auxiliary, counts = self._gradients(
        state.params, state.fixed, tokens, start
    )
    norm = optax.tree.norm(gradients)
    finite = jnp.stack(
        [jnp.isfinite(gradients[path]).all() for path in self.paths]
    )
    done = going & finite.all() & jnp.isfinite(loss)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its scalars.
      updates, inner = self._optimiser.update(
          gradients, state.optimiser, state.params
      )
    fixed = {
        path: balance.moved_bias(
            leaf, counts[_layer(path)], self.recipe.bias_speed
        )
        if path.endswith(".bias")
        else leaf
        for path, leaf in state.fixed.items()
    }
    fresh = State(
        optax.apply_updates(state.params, updates), fixed, inner, state.step + 1
    )
    kept = jax.tree.map(
        lambda new, old: jnp.where(done, new, old), fresh, state
    )
    return kept, Report(loss, auxiliary, norm, finite, done, counts)

  def _gradients(self, params, fixed, tokens, start):
    whole = jax.sharding.PartitionSpec()

    @functools.partial(
        jax.shard_map,
        mesh=self._mesh,
        in_specs=(whole, whole, _spec(), _spec()),
        out_specs=whole,
        check_vma=False,  # The means below are what it would ask for.
    )
    def local(params, fixed, tokens, start):
      (_, out), gradients = jax.value_and_grad(self._loss, has_aux=True)(
          params, fixed, tokens, start
      )
      loss, auxiliary, counts = out
      means = lax.pmean((gradients, loss, auxiliary), _AXIS)
      return *means, lax.psum(counts, _AXIS)

    return local(params, fixed, tokens, start)

  def _loss(self, params, fixed, tokens, start):
    outputs = self.model.apply(
        params | fixed,
        tokens[:, :-1],
        start,
        spread=lambda x: lax.pmean(x, _AXIS),
    )
    loss = losses.cross_entropy(outputs.logits, tokens[:, 1:]).mean()
    total = loss
    for name, value in outputs.auxiliary.items():
      factor = self.model.factor(self.recipe, name)
      total = total + jnp.float32(factor) * value
    counts = {
        layer: losses.expert_counts(ids, self.model.config.num_experts)
        for layer, ids in outputs.ids.items()
    }
    return total, (loss, outputs.auxiliary, counts)


def optimiser(
    model: models.Model, recipe: recipe_lib.Recipe
) -> optax.GradientTransformation:
  """Clip by global norm, then AdamW under the recipe's schedule."""
  schedule = optax.warmup_cosine_decay_schedule(
      init_value=0.0,
      peak_value=recipe.peak,
      warmup_steps=recipe.warm_up,
      decay_steps=recipe.steps,
      end_value=recipe.peak * recipe.final,
  )
  leaves = model.leaves()

  def decays(params):
    return {
        path: len(leaves[path][0]) > 1
        and "_hc." not in path
        and not path.endswith("position_bias")
        for path in params
    }

  return optax.chain(
      optax.clip_by_global_norm(recipe.clip),
      optax.adamw(
          schedule,
          b1=recipe.beta1,
          b2=recipe.beta2,
          eps=recipe.epsilon,
          weight_decay=recipe.weight_decay,
          mask=decays,
      ),
  )


def _spec():
  return jax.sharding.PartitionSpec(_AXIS)


def _layer(path: str) -> int:
  return int(path.split(".")[1])
