"""Manifold-constrained hyper-connections: several residual streams.

In front of a block a connection weighs the streams into one input (pre), and
computes how the block's output is spread over the streams (post) and how the
streams are mixed (comb, nearly doubly stochastic by Sinkhorn rounds). Behind
the block:

  stream_j = R(R(post_j * y) + R(sum_i comb[i, j] * stream_i))

with post and comb rounded to the model's dtype first. Under hyper_mix="float32"
all but the last R are to float32, and so is each comb[i, j] * stream_i.

Layer: modules. Contract: contracts/deepseek_v4.py.
"""

from flax import nnx
import jax
import jax.numpy as jnp

from moejax.contracts import ops as ops_lib
from moejax.modules import tap as tap_lib
from moejax.modules.deepseek_v4 import norm


class _Weights(nnx.Module):
  """Streams to mixes in float32.

  R(fn . bare_norm(streams)), or under hyper_scale="mixes"
  R(R(fn . streams) * R(1 / sqrt(mean(streams^2) + epsilon))).
  """

  def __init__(self, params, config, graph, operations):
    self.fn = nnx.Param(params["fn"])
    self.base = nnx.Param(params["base"])
    self.scale = nnx.Param(params["scale"])
    self.config = config
    self.graph = graph
    self.ops = operations

  def mixes(self, streams, tap):
    """[batch, token, stream, embed] to [batch, token, mix] float32."""
    flat = self.ops.cast(streams.reshape(*streams.shape[:2], -1), "float32")
    site, epsilon = "hyper_norm_mean", self.config.norm_epsilon
    inner = tap.within("norm")
    if self.graph.hyper_scale == "mixes":
      root = norm.reciprocal_root(flat, epsilon, site, self.ops, inner)
      mixes = self.ops.linear(flat, self.fn[...], "hyper_projection")
      mixes = self.ops.multiply(tap("projected", mixes), root)
      return tap("mixes", mixes)
    flat = norm.bare_norm(flat, epsilon, site, self.ops, inner)
    mixes = self.ops.linear(flat, self.fn[...], "hyper_projection")
    return tap("mixes", mixes)

  def gate(self, name, mixes, scale, base, tap):
    """sigmoid(R(R(mixes * scale) + base))."""
    x = tap(f"{name}_scaled", self.ops.multiply(mixes, scale))
    x = tap(f"{name}_shifted", self.ops.add(x, base))
    return tap(f"{name}_sigmoid", self.ops.sigmoid(x))

  def pre(self, mixes, scale, base, tap):
    """sigmoid(.) + epsilon: [batch, token, stream]."""
    gate = self.gate("pre", mixes, scale, base, tap)
    return tap("pre", self.ops.add_scalar(gate, self.config.hyper_epsilon))

  def collapse(self, pre, streams, tap):
    """R(sum_i R(pre_i * stream_i)): [batch, token, embed]."""
    ops = self.ops
    wide = ops.cast(streams, "float32")
    weighted = tap("weighted", ops.multiply(pre[..., None], wide))
    total = ops.sum(jnp.swapaxes(weighted, -1, -2), "hyper_collapse")
    total = tap("summed", total[..., 0])
    if streams.dtype != total.dtype:
      total = tap("collapsed", ops.cast(total, streams.dtype.name))
    return total


class HyperConnection(_Weights):
  """The connection around one block."""

  def __call__(
      self, streams: jax.Array, tap: tap_lib.Tap
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (post, comb, input) of [batch, token, stream, embed].

    post [batch, token, stream] and comb [batch, token, stream, stream_out] are
    float32.
    """
    ops, n = self.ops, self.config.streams
    mixes = self.mixes(streams, tap)
    base, scale = self.base[...], self.scale[...]
    pre = self.pre(mixes[..., :n], scale[0], base[:n], tap)
    post = self.gate(
        "post", mixes[..., n : 2 * n], scale[1], base[n : 2 * n], tap
    )
    post = tap("post", ops.scale(post, 2.0))
    comb = mixes[..., 2 * n :].reshape(*mixes.shape[:-1], n, n)
    comb = tap("comb_scaled", ops.multiply(comb, scale[2]))
    comb = tap("comb_shifted", ops.add(comb, base[2 * n :].reshape(n, n)))
    comb = tap("comb_softmax", ops.softmax(comb, "hyper_softmax"))
    comb = ops.add_scalar(comb, self.config.hyper_epsilon)
    rounds = ops.sinkhorn(
        tap("comb_plus_epsilon", comb),
        self.config.sinkhorn_iterations,
        self.config.hyper_epsilon,
        "sinkhorn",
    )
    comb = tap("sinkhorn", rounds)[..., -1, :, :]
    return post, comb, self.collapse(pre, streams, tap)


class HyperHead(_Weights):
  """The streams' last collapse, in front of the final norm."""

  def __call__(self, streams: jax.Array, tap: tap_lib.Tap) -> jax.Array:
    """[batch, token, stream, embed] to [batch, token, embed]."""
    mixes = self.mixes(streams, tap)
    pre = self.pre(mixes, self.scale[...], self.base[...], tap)
    return self.collapse(pre, streams, tap)


def mix(
    post: jax.Array,
    comb: jax.Array,
    block: jax.Array,
    streams: jax.Array,
    precision: str,
    ops: ops_lib.Operations,
    tap: tap_lib.Tap,
) -> jax.Array:
  """The new streams behind a block; see the top of this file.

  Args:
    post: [batch, token, stream] float32.
    comb: [batch, token, stream, stream_out] float32.
    block: [batch, token, embed], what the block returned.
    streams: [batch, token, stream, embed], what stood in front of it.
    precision: "model" or "float32".
    ops: The arithmetic.
    tap: Sees every step.
  """
  dtype = streams.dtype
  if precision == "float32":
    block, wide = (ops.cast(x, "float32") for x in (block, streams))
    expanded = ops.multiply(post[..., None], block[..., None, :])
    expanded = tap("expanded", expanded)
    weighted = ops.multiply(comb[..., None], wide[..., None, :])
    weighted = jnp.moveaxis(tap("weighted", weighted), -3, -1)
    mixed = tap("mixed", ops.sum(weighted, "hyper_mix")[..., 0])
    return ops.cast(tap("summed", ops.add(expanded, mixed)), dtype.name)
  if dtype != post.dtype:
    post = tap("post", ops.cast(post, dtype.name))
  expanded = ops.multiply(post[..., None], block[..., None, :])
  expanded = tap("expanded", expanded)
  if dtype != comb.dtype:
    comb = tap("comb", ops.cast(comb, dtype.name))
  mixed = ops.matmul(jnp.swapaxes(comb, -1, -2), streams, "hyper_mix")
  return ops.add(expanded, tap("mixed", mixed))


