"""The tensor-core step in JAX has the oracle's bits. Needs no accelerator."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import jax
import ml_dtypes
import numpy as np

from moejax.contracts import packed_gemm
from moejax.numerics.packed import mma16
from moejax.numerics.packed import mma16_twin as lib
from tests import bits

_HOPPER = packed_gemm.HOPPER
_CONTRACTS = {
    "hopper": _HOPPER,
    "group_8": dataclasses.replace(_HOPPER, group=8, fraction_bits=24),
    "renormalized": dataclasses.replace(_HOPPER, exponents="renormalized"),
    "unclamped": dataclasses.replace(_HOPPER, operand_exponents="unclamped"),
    "nearest": dataclasses.replace(_HOPPER, final="nearest_even"),
    "nan": dataclasses.replace(_HOPPER, nan="0x7fc00000"),
}


def _operands(dtype, spread, special=False):
  rng = np.random.default_rng(7)
  half = np.dtype(getattr(ml_dtypes, dtype, dtype))

  def draw(columns):
    shape = (16, columns)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(*spread, shape)
    x = np.where(rng.random(shape) < 0.2, 0, x)
    if special:
      odd = rng.choice([np.inf, -np.inf, np.nan, -0.0, 3e38, 1e-40], shape)
      x = np.where(rng.random(shape) < 0.02, odd, x)
    with np.errstate(over="ignore"):
      return x.astype(half)

  c = rng.standard_normal((24, 40)) * 2.0 ** rng.integers(*spread, (24, 40))
  c[:, 30:] *= 2.0 ** -(130 + spread[0])  # Subnormal accumulators.
  return c.astype(np.float32), draw(24), draw(40)


class TwinTest(parameterized.TestCase):

  @parameterized.product(
      contract=tuple(_CONTRACTS),
      case=(
          ("float16", (-4, 4)), ("float16", (-24, -12)),
          ("bfloat16", (-20, 20)), ("bfloat16", (-134, -120)),
          ("bfloat16", (-72, -60)), ("bfloat16", (55, 66)),
      ),
      special=(False, True),
      compiled=(False, True),
  )
  def test_equals_the_oracle(self, contract, case, special, compiled):
    chosen = _CONTRACTS[contract]
    c, a, b = _operands(*case, special)
    run = lambda *x: lib.step(*x, chosen)
    found = (jax.jit(run) if compiled else run)(c, a, b)
    bits.assert_same_bits(found, mma16.step(
        c,
        mma16.Terms(*(x.T[:, :, None] for x in mma16.terms(a, chosen))),
        mma16.terms(b, chosen),
        chosen,
    ))

  def test_refuses_other_shapes_and_float32_alone(self):
    half = np.zeros((16, 2), np.float16)
    with self.assertRaisesRegex(ValueError, r"float16\(8, 2\)"):
      lib.step(np.zeros((2, 2), np.float32), half[:8], half, _HOPPER)
    jax.config.update("jax_enable_x64", False)
    try:
      with self.assertRaisesRegex(ValueError, "jax_enable_x64 is off"):
        lib.step(np.zeros((2, 2), np.float32), half, half, _HOPPER)
    finally:
      jax.config.update("jax_enable_x64", True)


if __name__ == "__main__":
  absltest.main()
