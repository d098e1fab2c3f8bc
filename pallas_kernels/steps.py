"""The two steps that only hardware takes, and their exact stand-ins.

A kernel's arithmetic is float32 operations that any IEEE machine rounds alike,
but for two: a tensor core's k16 step, and a fused multiply-add. DEVICE takes
them in hardware; EMULATED computes them exactly in float64, for the
interpreter, so that an interpreted kernel has the oracle's bits on real data
too. That DEVICE has the same bits is shown on a device (tests marked
`accelerator`); an interpreter cannot show it.

Layer: pallas_kernels.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental.pallas import triton as pltriton
import jax.numpy as jnp

from moejax.contracts import packed_gemm
from moejax.contracts import refusal
from moejax.numerics import rounding
from moejax.numerics.packed import mma16_twin
from pallas_kernels import half_words


class Steps(NamedTuple):
  """The steps.

  Attributes:
    mma: (c [m, n] float32, a [k, m], b [k, n], Mma16Contract) to c + a^T b, as
      a chain of k16 steps in ascending k.
    fma: (a, b, c) float32 to R_FP32(a * b + c).
  """

  mma: Callable
  fma: Callable


def check_mma(contract: packed_gemm.Mma16Contract, interpret: bool) -> None:
  """Checks that a tensor core takes the contract's step.

  Raises:
    UnsupportedError: the contract is not that of the one measured chip; the
      interpreter takes any.
  """
  measured = packed_gemm.HOPPER
  if not interpret and any(
      getattr(contract, field) != getattr(measured, field)
      for field in packed_gemm.Mma16Contract.__dataclass_fields__
      if field != "name"
  ):
    raise refusal.UnsupportedError(
        f"no measured tensor core takes the step of {contract}; {measured} is"
        " the one that was measured."
    )


def _device_mma(c, a, b, contract):
  """One dot.

  Pallas starts a dot from zero; Triton's combine pass makes its accumulator of
  the addition, so that c takes part in every k16 step, as in the contract. A
  compiler without that pass would add c afterwards, in other bits: the tests on
  a device would see it.
  """
  del contract  # `check_mma` has compared it.
  return c + lax.dot_general(
      a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
  )


def _device_fma(a, b, c):
  (result,) = pltriton.elementwise_inline_asm(
      "fma.rn.f32 $0, $1, $2, $3;",
      args=(a, b, c),
      constraints="=f,f,f,f",
      pack=1,
      result_shape_dtypes=[jax.ShapeDtypeStruct(c.shape, c.dtype)],
  )
  return result


def _emulated_fma(a, b, c):
  """The product is exact in float64; the sum is rounded to odd, then once."""
  product = rounding.widen(a) * rounding.widen(b)
  c = rounding.widen(c)
  # A compiler may drop an addition of zero, and with it the sign of the sum.
  negative = (_bits(product) < 0) & (_bits(c) < 0)
  zero = jnp.where(negative, jnp.float64(-0.0), jnp.float64(0))
  total = jnp.where((product == 0) & (c == 0), zero, product + c)
  back = total - product
  error = (product - (total - back)) + (c - back)
  bits = _bits(total)
  inexact = (error != 0) & jnp.isfinite(total) & (bits & 1 == 0)
  away = (error > 0) == (total > 0)
  bits = jnp.where(inexact, jnp.where(away, bits + 1, bits - 1), bits)
  total = lax.bitcast_convert_type(bits, jnp.float64)
  return rounding.pack(rounding.round_value(total, "float32"), "float32")


def _bits(x):
  return lax.bitcast_convert_type(x, jnp.int64)


def _emulated_mma(c, a, b, contract):
  """The k16 steps in a loop, so that a compiler sees one; moved as words."""
  words = tuple(
      half_words.to_words(x).reshape(-1, 16, x.shape[1]) for x in (a, b)
  )

  def k16(c, pair):
    halves = (half_words.from_words(x, a.dtype.name) for x in pair)
    return mma16_twin.step(c, *halves, contract), None

  return lax.scan(k16, c, words)[0]


DEVICE = Steps(_device_mma, _device_fma)
EMULATED = Steps(_emulated_mma, _emulated_fma)


def of(interpret: bool) -> Steps:
  """Returns the steps of the interpreter or of the device."""
  return EMULATED if interpret else DEVICE
