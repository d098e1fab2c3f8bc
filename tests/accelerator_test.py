"""What an accelerator does to arithmetic, and that contracts hold there.

Run by `make test-gpu`, together with the tests of the numerics, the modules and
the golden bits, which run unchanged on whatever backend JAX has. The facts here
were measured on an NVIDIA H200 with jax 0.11.2; a test that fails says that
another device or compiler does something else, which is worth knowing before
the contracts are blamed.
"""

from absl.testing import absltest
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.contracts import named_combines
from moejax.numerics import ordered_combine
from moejax.numerics import rounding
from tests import bits

pytestmark = pytest.mark.accelerator


def _random(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class AcceleratorTest(absltest.TestCase):

  def test_the_backend_is_an_accelerator(self):
    self.assertNotEqual(jax.default_backend(), "cpu")

  def test_xla_removes_a_pair_of_casts_and_our_rounding_stays(self):
    x = _random(1024)
    pair = jax.jit(lambda v: v.astype(jnp.bfloat16).astype(jnp.float32))(x)
    bits.assert_same_bits(pair, x)  # The low bits survive: nothing rounded.
    ours = jax.jit(
        lambda v: lax.bitcast_convert_type(
            rounding.bf16_bits(v, "ieee"), jnp.bfloat16
        )
    )(x)
    bits.assert_same_bits(
        np.asarray(ours).view(np.uint16), rounding.bf16_bits_oracle(x, "ieee")
    )

  def test_products_and_sums_are_not_contracted(self):
    a, b, c = (_random(4096, seed=s) for s in range(3))
    found = jax.jit(lambda x, y, z: x * y + z)(a, b, c)
    bits.assert_same_bits(found, a * b + c)

  def test_subnormals_are_kept(self):
    x = np.float32([1e-20])
    bits.assert_same_bits(jax.jit(jnp.multiply)(x, x), x * x)

  def test_a_sum_has_another_order(self):
    x = _random(4096, 8)
    chain = np.zeros(4096, np.float32)
    for slot in range(8):
      chain = chain + x[:, slot]
    found = np.asarray(jax.jit(lambda v: v.sum(axis=1))(x))
    self.assertGreater(np.count_nonzero(found != chain), 100)

  def test_every_scheme_holds_its_bits_at_full_width(self):
    rng = np.random.default_rng(0)
    out = _random(64, 8, 2048).astype("bfloat16")
    gate = rng.random((64, 8), np.float32)
    ids = np.argsort(rng.random((64, 128)), -1)[:, :8].astype(np.int32)
    run = jax.jit(ordered_combine.ordered_combine, static_argnames="contract")
    for name in ("P32", "C", "A", "B", "transformers_eager"):
      contract = named_combines.named(name)
      with self.subTest(name):
        bits.assert_same_bits(
            run(out, gate, ids, contract=contract),
            ordered_combine.ordered_combine_oracle(out, gate, ids, contract),
        )


if __name__ == "__main__":
  absltest.main()
