"""The two norms of a DeepSeek-V4 decoder, every rounding visible.

Layer: modules.
"""

from flax import nnx
import jax

from moejax.contracts import ops as ops_lib
from moejax.modules import tap as tap_lib


def reciprocal_root(
    x: jax.Array,
    epsilon: float,
    site: str,
    ops: ops_lib.Operations,
    tap: tap_lib.Tap,
) -> jax.Array:
  """R(1 / sqrt(R(R(mean of R(x^2)) + epsilon))) [..., 1], in x's dtype."""
  square = tap("square", ops.multiply(x, x))
  mean = tap("mean", ops.mean(square, site))
  shifted = tap("plus_epsilon", ops.add_scalar(mean, epsilon))
  return tap("rsqrt", ops.rsqrt(shifted))


def bare_norm(
    x: jax.Array,
    epsilon: float,
    site: str,
    ops: ops_lib.Operations,
    tap: tap_lib.Tap,
    precision: str = "float32",
) -> jax.Array:
  """R(x * R(1 / sqrt(mean(x^2) + epsilon))) over the last axis, no weight.

  Square, mean, + epsilon and reciprocal root in float32, the factor rounded to
  the dtype of x before it multiplies; or, with precision "model", each of them
  in the dtype of x.
  """
  wide = ops.cast(x, "float32") if precision == "float32" else x
  factor = reciprocal_root(wide, epsilon, site, ops, tap)
  if x.dtype != wide.dtype:
    factor = tap("rounded", ops.cast(factor, x.dtype.name))
  return tap("output", ops.multiply(x, factor))


class Norm(nnx.Module):
  """R(weight * (x / sqrt(mean(x^2) + epsilon))) over the last axis.

  Everything in float32, the weight too; one rounding to the dtype of x at the
  end.
  """

  def __init__(
      self, weight: jax.Array, epsilon: float, operations: ops_lib.Operations
  ):
    self.weight = nnx.Param(weight)
    self.epsilon = epsilon
    self.ops = operations

  def __call__(self, x: jax.Array, tap: tap_lib.Tap) -> jax.Array:
    """Normalises [..., width]; one rounding a line."""
    ops = self.ops
    wide = ops.cast(x, "float32")
    root = reciprocal_root(wide, self.epsilon, "norm_mean", ops, tap)
    normal = tap("normalized", ops.multiply(wide, root))
    out = tap("weighted", ops.multiply(self.weight[...], normal))
    if x.dtype != wide.dtype:
      out = tap("output", ops.cast(out, x.dtype.name))
    return out
