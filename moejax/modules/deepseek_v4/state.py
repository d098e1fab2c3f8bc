"""Bookkeeping of the persistent state: which position lies in which row.

Tokens of a step stand left-padded: column c of a sequence with L tokens seen
and p columns of padding holds position L + c - p. Every function here moves
values and computes none, so a state does not depend on how a text was cut into
steps, stale rows included.

Layer: modules. State: contracts/deepseek_v4_state.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.contracts import deepseek_v4 as contract_lib
from moejax.contracts import deepseek_v4_state as state_lib
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.numerics import moves


class Columns(NamedTuple):
  """Where the tokens of a step stand.

  Attributes:
    before: [batch] int32: tokens seen before, L.
    padding: [batch] int32: columns of padding, p.
    after: [batch] int32: tokens seen after the step.
    position: [batch, token] int32: L + c - p; negative numbers are clipped.
    valid: [batch, token] bool.
  """

  before: jax.Array
  padding: jax.Array
  after: jax.Array
  position: jax.Array
  valid: jax.Array


def columns(valid: jax.Array, before: jax.Array) -> Columns:
  """Reads the layout of a step from its left-padded mask [batch, token]."""
  count = jnp.sum(valid, axis=-1, dtype=jnp.int32)
  padding = jnp.int32(valid.shape[1]) - count
  at = jnp.arange(valid.shape[1], dtype=jnp.int32) - padding[:, None]
  position = jnp.where(valid, before[:, None] + at, 0)
  return Columns(before, padding, before + count, position, valid)


def rows_at(
    old: jax.Array, old_row: jax.Array, new: jax.Array, wanted: jax.Array,
    cols: Columns,
) -> jax.Array:
  """The rows of positions, from the old buffer or from this step's columns.

  Args:
    old: [batch, row, ...].
    old_row: [batch, wanted] ints: where a position below L lies in it.
    new: [batch, token, ...].
    wanted: [batch, wanted] positions.
    cols: The step.

  Returns:
    [batch, wanted, ...].
  """
  is_new = wanted >= cols.before[:, None]
  column = wanted - cols.before[:, None] + cols.padding[:, None]
  return moves.where_rows(
      is_new, moves.gather_rows(new, column), moves.gather_rows(old, old_row)
  )


def latest(size: int, after: jax.Array) -> jax.Array:
  """[batch, size]: the latest position p < after with p mod size = row."""
  row = jnp.arange(size, dtype=jnp.int32)
  last = after[:, None] - 1
  return last - (last - row) % size


def ring(old: jax.Array, new: jax.Array, cols: Columns) -> jax.Array:
  """Writes a step into [batch, size, ...] where p lies in row p mod size."""
  size = old.shape[1]
  wanted = latest(size, cols.after)
  row = jnp.broadcast_to(jnp.arange(size), wanted.shape)
  return rows_at(old, row, new, wanted, cols)


def row_dtype(
    config: config_lib.DeepseekV4Config, graph: contract_lib.DeepseekV4Graph
) -> str:
  """The dtype of a compressor's rows: that in which the graph computes them."""
  return config.dtype if graph.compressor == "model" else "float32"


def empty(
    config: config_lib.DeepseekV4Config,
    batch: int,
    capacity: int,
    graph: contract_lib.DeepseekV4Graph = contract_lib.TRANSFORMERS,
) -> state_lib.DeepseekV4State:
  """Returns a state that has seen nothing, for `capacity` tokens."""
  dtype, rows_of = config.dtype, row_dtype(config, graph)

  def compressor(rate, series, dim):
    rows = jnp.zeros((batch, rate, series * dim), rows_of)
    # Minus infinity marks a row that was never written; it weighs nothing.
    unwritten = jnp.full(rows.shape, -jnp.inf, jnp.float32)
    return state_lib.CompressorState(
        kv=rows,
        gate=unwritten.astype(rows_of),
        previous_kv=rows if series == 2 else None,
        previous_score=unwritten if series == 2 else None,
        entries=jnp.zeros((batch, -(-capacity // rate), dim), dtype),
    )

  layers = []
  for index, kind in enumerate(config.attentions):
    rate = config.rate(index)
    series = 2 if kind == config_lib.CSA else 1
    layers.append(
        state_lib.LayerState(
            jnp.zeros((batch, config.window, config.head_dim), dtype),
            compressor(rate, series, config.head_dim) if rate else None,
            compressor(rate, series, config.index_dim)
            if kind == config_lib.CSA
            else None,
        )
    )
  return state_lib.DeepseekV4State(
      tuple(layers), jnp.zeros((batch,), jnp.int32)
  )
