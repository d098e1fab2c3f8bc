"""Softmax over blocks of keys, one after another; the sink joins last.

A query's slots are the `window` last rows, oldest first, then its compressed
entries: all of them by index, or those of an indexer by falling score. Slots
that hold nothing stand behind those that do, in each of the two parts, and
weigh nothing. The slots are cut into blocks b of `attention_block`:

  s = R(R(q . key) * head_dim^-1/2)
  m_b = max(m_{b-1}, max of s over the block)
  w = R(exp(R(s - m_b)))              its rounding to the model's dtype: w~
  c_b = R(exp(R(m_{b-1} - m_b)))
  l_b = R(R(l_{b-1} * c_b) + R(sum w))
  a_b = R(R(a_{b-1} * c_b) + R(sum w~ * key))
  out = R_dtype(R(a / R(l + R(exp(R(sink - m))))))

with every R to float32. The maximum knows nothing of the sink, the denominator
adds exponentials that were not rounded.

Source: the specification of DeepSeek-V4, section 6, step 4. It leaves open
whether l * c + sum is contracted (here it is not) and where the parts of a
window that is not full lie.

Layer: modules.
"""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import ops as ops_lib
from moejax.modules import tap as tap_lib
from moejax.numerics import moves


def attend(
    q: jax.Array,
    keys: jax.Array,
    slots: jax.Array,
    filled: jax.Array,
    sinks: jax.Array,
    block: int,
    ops: ops_lib.Operations,
    tap: tap_lib.Tap,
) -> jax.Array:
  """Attends; see the top of this file.

  Args:
    q: [batch, token, head, head_dim].
    keys: [batch, key, head_dim], values at once.
    slots: [batch, token, slot] ints: which key, in the order of the blocks.
    filled: The same, bool: whether the slot holds one. The first one does.
    sinks: [head] float32.
    block: Slots of a block.
    ops: The arithmetic.
    tap: Sees every step.

  Returns:
    [batch, token, head, head_dim] in q's dtype.
  """
  batch, tokens, heads, dim = q.shape
  slots, filled = _whole_blocks(slots, filled, block)
  blocks = slots.shape[-1] // block
  rows = moves.gather_rows(keys, slots.reshape(batch, -1))
  rows = rows.reshape(batch, tokens, -1, dim)
  wide = ops.cast(rows, "float32")
  scores = ops.matmul(
      ops.cast(q, "float32"), jnp.swapaxes(wide, -1, -2), "attention_scores"
  )
  scores = tap("scores", scores)
  scores = tap("scaled", ops.scale(scores, dim**-0.5))
  minus_infinity = jnp.full(scores.shape, -np.inf, jnp.float32)
  scores = moves.where(
      jnp.broadcast_to(filled[:, :, None], scores.shape),
      scores,
      minus_infinity,
  )
  scores = scores.reshape(batch, tokens, heads, blocks, block)
  peaks = _running(moves.largest(scores))
  shifted = ops.add(scores, -peaks).reshape(batch, tokens, heads, -1)
  weights = tap("exponentials", ops.exp(tap("shifted", shifted)))

  sums = ops.sum(
      weights.reshape(batch, tokens, heads, blocks, block), "attention_softmax"
  )
  sums = tap("sums", sums[..., 0])
  narrow = ops.cast(weights, q.dtype.name)
  if q.dtype != weights.dtype:
    narrow = tap("rounded", narrow)
  narrow = narrow.reshape(batch, tokens, heads, blocks, block)
  values = ops.matmul(
      ops.cast(jnp.swapaxes(narrow, 2, 3), "float32"),
      wide.reshape(batch, tokens, blocks, block, dim),
      "attention_values",
  )
  values = tap("values", jnp.swapaxes(values, 2, 3))
  total, value = sums[..., :1], values[..., :1, :]
  if blocks > 1:
    moved = ops.add(peaks[..., :-1, 0], -peaks[..., 1:, 0])
    rescale = tap("rescale", ops.exp(tap("moved", moved)))
    total = tap("denominators", _chain(sums, rescale, ops))[..., -1:]
    value = _chain(
        jnp.moveaxis(values, -2, -1), rescale[..., None, :], ops
    )
    value = tap("accumulated", jnp.moveaxis(value, -1, -2))[..., -1:, :]
  sink = ops.add(
      jnp.broadcast_to(sinks[:, None], total.shape), -peaks[..., -1, :]
  )
  sink = tap("sink_exponential", ops.exp(tap("sink_shifted", sink)))
  total = tap("denominator", ops.add(total, sink))
  out = tap("divided", ops.divide(value[..., 0, :], total))
  return ops.cast(out, q.dtype.name)


def in_order(
    visible: jax.Array, place: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
  """The first `count` of the visible, by falling place in the queue.

  Args:
    visible: [batch, token, key] bool.
    place: The same shape, ints: who comes first; all different.
    count: Slots, at least the visible ones of every query.

  Returns:
    (slots [batch, token, count] int32, filled bool).
  """
  last = jnp.iinfo(jnp.int32).max
  queue = jnp.where(visible, place.astype(jnp.int32), last)
  slots = jnp.argsort(queue, axis=-1, stable=True)[..., :count]
  number = jnp.sum(visible, axis=-1, keepdims=True, dtype=jnp.int32)
  filled = jnp.arange(slots.shape[-1], dtype=jnp.int32) < number
  return slots.astype(jnp.int32), filled


def _whole_blocks(slots, filled, block):
  """Adds slots that hold nothing, up to a multiple of the block."""
  more = [(0, 0), (0, 0), (0, -slots.shape[-1] % block)]
  return jnp.pad(slots, more), jnp.pad(filled, more)


def _running(peaks):
  """[..., block, 1]: the largest of a block and all before it."""
  out = [peaks[..., :1, :]]
  for index in range(1, peaks.shape[-2]):
    both = moves.concatenate([out[-1], peaks[..., index : index + 1, :]], -1)
    out.append(moves.largest(both))
  return moves.concatenate(out, -2)


def _chain(terms, rescale, ops):
  """a_b = R(R(a_{b-1} * c_b) + t_b) along the last axis, all of them."""
  out = [terms[..., 0]]
  for index in range(1, terms.shape[-1]):
    kept = ops.multiply(out[-1], rescale[..., index - 1])
    out.append(ops.add(kept, terms[..., index]))
  return jnp.stack(out, -1)
