"""The first step of an optimiser in portable arithmetic.

Layer: numerics. Contract: contracts/gradients/optimizer.py.
"""

import jax
import jax.numpy as jnp

from moejax.contracts.gradients import optimizer
from moejax.numerics.portable import gradient_ops


def updated(
    parameter: jax.Array,
    gradient: jax.Array,
    step: optimizer.FirstStep,
    plain: gradient_ops.PortableGradientOps,
) -> jax.Array:
  """Returns the parameter after the step, in its own dtype."""
  one = jnp.ones((), parameter.dtype)
  if step.kind == "sgd":
    return plain.fused(parameter, -step.rate, gradient, one, False)
  if step.decay:
    parameter = plain.scale(parameter, 1 - step.rate * step.decay)
  zero = jnp.zeros_like(parameter)
  first = plain.lerp(zero, gradient, 1 - step.beta1)
  second = plain.scale(zero, step.beta2)
  second = plain.fused(second, 1 - step.beta2, gradient, gradient, False)
  root = plain.sqrt(second)
  # A power and not a root of the difference: that is how torch writes it.
  root = plain.divide(root, jnp.float64((1 - step.beta2) ** 0.5))
  divisor = plain.add_scalar(root, step.epsilon)
  change = -(step.rate / (1 - step.beta1))
  return plain.fused(parameter, change, first, divisor, True)
