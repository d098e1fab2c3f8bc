"""Binds a rule for the way back to an operation on concrete arrays.

`jax.vjp` outside of `jit` calls the two rules of a `custom_vjp` with concrete
arrays, so portable arithmetic, which looks at its results, can run in both.

Layer: numerics.
"""

from collections.abc import Callable
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from moejax.contracts import refusal

_SymbolicZero = jax.custom_derivatives.SymbolicZero


def run(
    forward: Callable,
    backward: Callable,
    operands: Sequence[jax.Array],
) -> jax.Array | tuple[jax.Array, ...]:
  """Returns forward(*operands), differentiable by `backward`.

  Args:
    forward: Operands to an array, or to a tuple of arrays.
    backward: (cotangent, operands, result, needed) to one cotangent, or None,
      for each operand; `needed` says which operands have one. A result that is
      a tuple has a tuple of cotangents. Operands and cotangents are concrete.
    operands: Floating-point arrays have gradients, others have none.
  """
  if not any(isinstance(x, jax.core.Tracer) for x in operands):
    return forward(*operands)
  needed = []

  def rule_forward(*given):
    needed[:] = [x.perturbed for x in given]
    concrete = tuple(x.value for x in given)
    if any(isinstance(x, jax.core.Tracer) for x in concrete):
      raise NotImplementedError(
          "portable gradients run op by op: use jax.vjp outside of jit, and"
          " differentiate once."
      )
    result = forward(*concrete)
    return result, (concrete, result)

  def rule_backward(kept, cotangent):
    concrete, result = kept
    leaves = jax.tree.leaves(
        cotangent, is_leaf=lambda x: isinstance(x, _SymbolicZero)
    )
    if all(isinstance(x, _SymbolicZero) for x in leaves):
      return (None,) * len(concrete)
    cotangent = jax.tree.map(
        _instantiate, cotangent, is_leaf=lambda x: isinstance(x, _SymbolicZero)
    )
    return tuple(backward(cotangent, concrete, result, tuple(needed)))

  bound = jax.custom_vjp(forward)
  bound.defvjp(rule_forward, rule_backward, symbolic_zeros=True)
  return bound(*operands)


def _instantiate(x):
  if isinstance(x, _SymbolicZero):
    return jnp.zeros(x.shape, x.dtype)
  return x


def refuse(name: str, operands: Sequence) -> None:
  """Raises if a gradient passes an operation that has no declared rule.

  Raises:
    UnsupportedError: an operand has a gradient.
  """
  if any(isinstance(x, jax.core.Tracer) for x in operands):
    raise refusal.UnsupportedError(
        f"{name} has no rule in contracts/gradients/backward.py, and a"
        " parameter's gradient passes through it."
    )
