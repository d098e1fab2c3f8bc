"""The twin of dequantisation has the oracle's bits. Needs float64."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.numerics.packed import awq_format
from moejax.numerics.packed import awq_twin as lib
from tests import bits

_HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def _experts(seed: int, dtype: str, experts: int = 3):
  """Words of every kind, and scales of every kind of 16 bits."""
  rng = np.random.default_rng(seed)
  k, n, groups = 32, 64, 4
  words = [
      rng.integers(-2**31, 2**31, (experts, rows, n // 8)).astype(np.int32)
      for rows in (k, groups)
  ]
  any_bits = rng.integers(0, 2**16, (experts, groups, n)).astype(np.uint16)
  scales = any_bits.view(_HALVES[dtype])
  with np.errstate(over="ignore"):
    finite = np.isfinite(scales.astype(np.float32).astype(np.float16))
  # A loader refuses scales that are not finite. Subnormals, zeros of both
  # signs, and scales whose products overflow are among the others.
  tail = np.array([0, 0x8000, 1, 0x8001, 0x7F, 0x03FF], np.uint16)
  scales = np.where(finite, scales, scales.dtype.type(0.5))
  scales[:, 0, : len(tail)] = tail.view(scales.dtype)
  return *words, scales


class TwinTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.product(scales=tuple(_HALVES), dtype=tuple(_HALVES))
  def test_has_the_oracle_bits(self, scales, dtype):
    qweight, qzeros, scale = _experts(7, scales)
    fn = self.variant(functools.partial(lib.dequantize, dtype=dtype))
    found = fn(*map(jnp.asarray, (qweight, qzeros, scale)))
    for expert in range(len(qweight)):
      operand = awq_format.from_checkpoint(
          qweight[expert], qzeros[expert], scale[expert], 8
      )
      expected = awq_format.dequantize(operand, dtype)
      bits.assert_same_bits(found[expert], expected.T)

  def test_unpacks_as_the_oracle_does(self):
    qweight, _, _ = _experts(8, "float16")
    bits.assert_same_bits(
        lib.unpack(jnp.asarray(qweight)), awq_format.unpack(qweight)
    )

  def test_refuses_other_words(self):
    with self.assertRaisesRegex(ValueError, "uint32, not int32"):
      lib.unpack(jnp.zeros((1, 2), jnp.uint32))


if __name__ == "__main__":
  absltest.main()
