"""Root-mean-square norm with every rounding of the graph visible.

Layer: modules.
"""

from flax import nnx
import jax

from moejax.contracts import ops as ops_lib
from moejax.modules import tap as tap_lib
from moejax.numerics import declared_moves


class RMSNorm(nnx.Module):
  """y = weight * R(x / sqrt(mean(x^2) + epsilon)), over the last axis.

  In float32: square, mean, + epsilon, reciprocal root, product; then rounded
  to the input's dtype and multiplied by the weight.
  """

  def __init__(
      self, weight: jax.Array, epsilon: float, operations: ops_lib.Operations
  ):
    self.weight = nnx.Param(weight)
    self.epsilon = epsilon
    self.ops = operations

  def __call__(
      self, x: jax.Array, tap: tap_lib.Tap = tap_lib.SILENT
  ) -> jax.Array:
    """Normalises [..., embed]; one rounding a line."""
    return self._run(x, tap, 0)[0]

  def beside(
      self, x: jax.Array, tap: tap_lib.Tap
  ) -> tuple[jax.Array, jax.Array]:
    """Normalises x, and returns it as well for the residual addition."""
    normal, (x,) = self._run(x, tap, 1)
    return normal, x

  def _run(self, x, tap, others):
    ops, share = self.ops, declared_moves.of(self.ops).share
    # Who uses x itself: a float32 x is not cast, so square and product do.
    if x.dtype == "float32":
      wide, again, *rest = share(x, 2 + others)
    else:
      narrow, *rest = share(x, 1 + others)
      wide, again = share(ops.cast(narrow, "float32"), 2)
    square = tap("square", ops.multiply(wide, wide))
    mean = tap("mean", ops.mean(square, "norm_mean"))
    shifted = tap("plus_epsilon", ops.add_scalar(mean, self.epsilon))
    root = tap("rsqrt", ops.rsqrt(shifted))
    normal = tap("normalized", ops.multiply(again, root))
    if x.dtype != again.dtype:
      normal = tap("rounded", ops.cast(normal, x.dtype.name))
    return tap("output", ops.multiply(self.weight[...], normal)), rest
