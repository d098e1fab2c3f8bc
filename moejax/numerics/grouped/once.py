"""Functions that are differentiated by hand: once, and over one batch.

A hand-written backward pass is right for what it was written for. Mapping over
it, or differentiating it again, would run the same lines on something else;
both raise instead.

Layer: numerics.
"""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp


def refuse_transformations(function: Callable, name: str) -> Callable:
  """Returns the function over arrays, which vmap and derivatives refuse.

  Raises:
    NotImplementedError: when transformed.
  """

  @jax.custom_batching.custom_vmap
  @functools.wraps(function)
  def single(*arguments):
    return function(*arguments)

  @single.def_vmap
  def _(axis_size, in_batched, *arguments):
    del axis_size, in_batched, arguments
    raise NotImplementedError(
        f"{name} has no batching rule: give it all tokens as one batch."
    )

  @jax.custom_jvp
  @functools.wraps(function)
  def once(*arguments):
    return single(*arguments)

  @once.defjvp
  def _(primals, tangents):
    del primals, tangents
    raise NotImplementedError(
        f"{name} is differentiated by hand, once and in reverse; a second"
        " derivative, or forward mode, is not defined."
    )

  return once


def differentiated(
    forward: Callable, backward: Callable, name: str
) -> Callable:
  """Returns a function with a hand-written derivative in reverse mode.

  Args:
    forward: Arguments to (output, residuals); arrays, or trees of them.
    backward: (residuals, cotangent of the output) to one cotangent for each
      argument; None for integers.
    name: Of the operation, for messages.

  Raises:
    ValueError: in the backward pass: the cotangent has another dtype than the
      output. JAX itself would go on with it.
  """
  forward = refuse_transformations(forward, name)
  backward = refuse_transformations(backward, f"the gradient of {name}")

  @jax.custom_vjp
  def operation(*arguments):
    return forward(*arguments)[0]

  def keep(*arguments):
    out, residuals = forward(*arguments)
    return out, (residuals, jnp.zeros((0,), out.dtype))

  def cotangents(kept, cotangent):
    residuals, like = kept
    if cotangent.dtype != like.dtype:
      raise ValueError(
          f"{name}: a {cotangent.dtype} cotangent for a {like.dtype} output;"
          " cast where the loss reads it, not in the gradient."
      )
    return backward(residuals, cotangent)

  operation.defvjp(keep, cotangents)
  return operation
