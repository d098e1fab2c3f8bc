"""What is made small: cross entropy, imbalance, an indexer's divergence.

All sums are in float32. Shapes: logits [batch, token, vocab], targets [batch,
token].

Layer: training.
"""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """log(sum exp(logits)) - logits[target] in nats: [batch, token] float32."""
  wide = logits.astype(jnp.float32)
  vocab = jnp.arange(wide.shape[-1], dtype=targets.dtype)
  hit = targets[..., None] == vocab
  chosen = jnp.where(hit, wide, jnp.float32(0)).sum(-1)
  return jax.nn.logsumexp(wide, axis=-1) - chosen


def routed_fraction(ids: jax.Array, num_experts: int) -> jax.Array:
  """Routes of each expert over the number of tokens: [expert] float32.

  Args:
    ids: [..., slot] int32.
    num_experts: E.
  """
  counts = expert_counts(ids, num_experts).astype(jnp.float32)
  return counts * jnp.float32(ids.shape[-1] / ids.size)


def expert_counts(ids: jax.Array, num_experts: int) -> jax.Array:
  """Routes of each expert: [expert] int32."""
  experts = jnp.arange(num_experts, dtype=ids.dtype)
  hit = ids.reshape(-1, 1) == experts
  return hit.sum(0, dtype=jnp.int32)


def load_balance(fraction: jax.Array, probability: jax.Array) -> jax.Array:
  """E * sum_e fraction_e * probability_e.

  The least possible value is top_k, reached when both are even. The fractions
  pass no gradient: they are counts.

  Args:
    fraction: [expert], routes over tokens.
    probability: [expert], mean softmax of the router over the same tokens.

  Source: transformers 5.24, load_balancing_loss_func of Qwen3-MoE. It is called
  there with the tokens of all sparse layers at once.
  """
  experts = jnp.float32(fraction.shape[0])
  return experts * jnp.sum(jax.lax.stop_gradient(fraction) * probability)


def indexer_divergence(
    weights: jax.Array, scores: jax.Array, visible: jax.Array
) -> jax.Array:
  """Mean KL(p || q) over the queries of a layer that see an entry.

  p is what attention gives to the visible compressed entries, added over heads
  and normalised; it passes no gradient. q is the softmax of the indexer's
  scores over the same entries. So the indexer learns to score what attention
  reads; a hard selection itself has no gradient.

  Args:
    weights: [batch, head, token, slot], attention with the sink last and the
      entries in front of it.
    scores: [batch, token, entry] float32.
    visible: [batch, token, entry] of 0 and 1.
  """
  entries = scores.shape[-1]
  seen = visible != 0
  target = weights[..., -1 - entries : -1].astype(jnp.float32).sum(1)
  target = jnp.where(seen, jax.lax.stop_gradient(target), jnp.float32(0))
  total = target.sum(-1, keepdims=True)
  counted = total > 1e-6
  target = target / jnp.where(counted, total, jnp.float32(1))
  # A number in the place of minus infinity: a row that sees nothing would
  # have the gradient of 0 * infinity.
  hidden = jnp.where(seen, scores, jnp.float32(-1e30))
  log_q = jax.nn.log_softmax(hidden, axis=-1)
  log_p = jnp.log(jnp.where(target > 0, target, jnp.float32(1)))
  terms = jnp.where(target > 0, target * (log_p - log_q), jnp.float32(0))
  count = jnp.maximum(counted.sum(dtype=jnp.float32), jnp.float32(1))
  return terms.sum() / count
