"""How well trained weights predict a text, and which experts it uses.

Layer: experiments.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.training import losses
from moejax.training import models


def token_nats(
    model: models.Model,
    params: models.Arrays,
    tokens: np.ndarray,
    length: int,
    batch: int,
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
  """Returns (nats of each token but the first, routes of each expert).

  The text is cut into windows of `length` inputs; every token but the first is
  predicted once, from what its window holds before it.

  Args:
    model: The architecture.
    params: Its weights.
    tokens: [token] ints, more than `length`.
    length: Of a window.
    batch: Windows of one call.

  Returns:
    ([token - 1] float32, {layer: [expert] int64}).
  """
  count = len(tokens) - 1
  if count < length:
    raise ValueError(f"{len(tokens)} tokens make no window of {length}.")
  firsts = np.arange(0, count, length)  # Of what each window predicts.
  state = model.state(batch, length)

  @jax.jit
  def run(params, rows, state, counted):
    out = model.apply(params, rows[:, :-1], state)
    nats = losses.cross_entropy(out.logits, rows[:, 1:])
    experts = model.config.num_experts
    counts = {
        layer: losses.expert_counts(
            jnp.where(counted.reshape(-1, 1), ids, experts), experts
        )
        for layer, ids in out.ids.items()
    }
    return nats, counts

  found = np.zeros(count, np.float32)
  routes: dict[int, np.ndarray] = {}
  for at in range(0, len(firsts), batch):
    some = firsts[at : at + batch]
    # Rows behind the last window predict nothing.
    some = np.pad(some, (0, batch - len(some)), constant_values=count)
    # The last window begins early, and overlaps the one before it.
    place = np.minimum(some, count - length)[:, None] + np.arange(length)
    counted = place >= some[:, None]
    rows = tokens[np.concatenate([place, place[:, -1:] + 1], 1)]
    nats, counts = run(params, rows.astype(np.int32), state, counted)
    found[place[counted]] = np.asarray(nats)[counted]
    for layer, c in counts.items():
      routes[layer] = routes.get(layer, 0) + np.asarray(c, np.int64)
  return found, routes


def summary(nats: np.ndarray, parts: dict[str, list]) -> dict[str, Any]:
  """{"all" and each part: {"nats", "tokens"}}.

  Args:
    nats: [token - 1], as `token_nats` returns them.
    parts: {name: [[first, end], ...]} spans of tokens.
  """
  masks = {"all": np.ones(len(nats), bool)}
  for name, spans in parts.items():
    masks[name] = np.zeros(len(nats), bool)
    for first, end in spans:
      masks[name][max(first - 1, 0) : end - 1] = True
  return {
      name: {
          "nats": float(nats[mask].astype(np.float64).mean()),
          "tokens": int(mask.sum()),
      }
      for name, mask in masks.items()
      if mask.any()
  }


def generate(
    model: models.Model,
    params: models.Arrays,
    prompts: list[list[int]],
    new_tokens: int,
    temperature: float,
    seed: int,
) -> list[list[int]]:
  """Continues prompts, token by token, each drawn at a temperature.

  Every token is computed from the whole text so far, in one program: what
  stands to the right of a position takes no part in it.

  Args:
    model: The architecture.
    params: Its weights.
    prompts: Token ids, none empty.
    new_tokens: How many are drawn for each.
    temperature: Logits are divided by it; 0 takes the largest.
    seed: Of the draws.
  """
  longest = max(map(len, prompts)) + new_tokens
  text = np.zeros((len(prompts), longest), np.int32)
  for row, prompt in zip(text, prompts, strict=True):
    row[: len(prompt)] = prompt
  ends = np.array([len(prompt) for prompt in prompts], np.int32)
  state = model.state(len(prompts), longest)

  @jax.jit
  def step(params, text, end, key, state):
    logits = model.apply(params, text, state).logits
    row = jnp.arange(len(prompts))
    last = logits[row, end - 1].astype(jnp.float32)
    if temperature:
      drawn = jax.random.categorical(key, last / jnp.float32(temperature))
    else:
      drawn = jnp.argmax(last, axis=-1)
    return text.at[row, end].set(drawn.astype(jnp.int32))

  for index in range(new_tokens):
    key = jax.random.fold_in(jax.random.key(seed), index)
    text = step(params, text, ends + index, key, state)
  text = np.asarray(text)
  return [
      row[: end + new_tokens].tolist()
      for row, end in zip(text, ends, strict=True)
  ]
