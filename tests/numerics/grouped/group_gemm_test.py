"""Grouped GEMMs: the twin against the definition, and the native form.

Needs no accelerator.
"""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import grouped_mlp
from moejax.numerics.grouped import group_gemm as lib
from moejax.numerics.grouped import group_gemm_oracle as definition
from tests import bits
from tests.numerics.grouped import group_gemm_suite as suite

_same_nk = suite.jitted(lib.group_gemm_same_nk, "transpose_b")
_same_mn = suite.jitted(lib.group_gemm_same_mn, "dtype")


class TwinTest(suite.GroupGemmSuite):

  def same_nk(self, a, b, plan, contract, transpose_b=False):
    return _same_nk(a, b, plan, contract=contract, transpose_b=transpose_b)

  def same_mn(self, a, b, plan, contract, dtype=None):
    return _same_mn(a, b, plan, contract=contract, dtype=dtype)

  @parameterized.parameters(
      ("bfloat16", "mma16"), ("float16", "mma16"), ("bfloat16", "portable"),
      ("float16", "sequential"),
  )
  def test_every_chain(self, dtype, chain):
    self.assert_oracle_bits(
        suite.SIZES["first_and_last_empty"], 43, 16, dtype,
        suite.contract_of(chain), transpose_b=True,
    )

  def test_chains_differ(self):
    # Same data, three sums: the terms are large beside their total.
    a = suite.draw(8, 64, dtype="bfloat16") * jnp.bfloat16(64)
    b = suite.draw(64, 8, dtype="bfloat16", seed=1)
    b = np.concatenate([b, -b, b], axis=0)
    a = np.concatenate([a, a, a], axis=1)
    found = [
        definition.matmul_oracle(a, b, suite.contract_of(chain), "float32")
        for chain in ("sequential", "portable", "mma16")
    ]
    for i, j in ((0, 1), (0, 2), (1, 2)):
      self.assertTrue((found[i] != found[j]).any())

  def test_m21_repeated_runs(self):
    plan, contract = suite.plan_of((31, 20, 29)), suite.contract_of()
    a = suite.draw(80, 16, dtype="float32")
    first = _same_mn(a, a, plan, contract=contract)
    for _ in range(20):
      # A large array that is freed again, so that memory is not fresh.
      np.full(1 << 16, np.nan).sum()
      bits.assert_same_bits(_same_mn(a, a, plan, contract=contract), first)


class NativeTest(parameterized.TestCase):

  @parameterized.product(
      dtype=("float64", "float32", "bfloat16"), transpose_b=(False, True)
  )
  def test_close_to_the_definition_and_tails_are_zero(self, dtype, transpose_b):
    sizes = suite.SIZES["alternating"]
    plan, contract = suite.plan_of(sizes), grouped_mlp.GroupGemmContract()
    a = suite.draw(suite.ROWS, 8, dtype=dtype)
    other = suite.draw(suite.ROWS, 8, dtype=dtype, seed=1)
    a[24:], other[24:] = np.nan, np.nan
    b = suite.draw(5, 8, 8, dtype=dtype, seed=2)
    exact = suite.contract_of("portable")
    close = {
        "float64": 1e-12, "float32": 1e-5, "bfloat16": 2.0**-6
    }[dtype]
    for found, wanted in (
        (
            _same_nk(a, b, plan, contract=contract, transpose_b=transpose_b),
            definition.same_nk_oracle(
                a, b, sizes, exact, transpose_b=transpose_b
            ),
        ),
        (
            _same_mn(a, other, plan, contract=contract),
            definition.same_mn_oracle(a, other, sizes, exact, dtype),
        ),
    ):
      found = np.asarray(found)
      np.testing.assert_allclose(
          found.astype(np.float64), wanted.astype(np.float64),
          rtol=close, atol=close,
      )
      zero = wanted == 0
      bits.assert_same_bits(found[zero], wanted[zero])

  def test_wide_weights_are_rounded_inside_and_get_wide_gradients(self):
    plan, gemm = suite.plan_of((3, 5), 8), suite.contract_of()
    a = suite.draw(8, 4, dtype="bfloat16")
    b = suite.draw(2, 4, 3, dtype="float32", seed=1)
    d = suite.draw(8, 3, dtype="bfloat16", seed=2)

    @jax.jit
    def run(a, b, d):
      y, vjp = jax.vjp(
          lambda u, w: lib.grouped_matmul(u, w, plan, gemm, gemm, gemm), a, b
      )
      return y, *vjp(d)

    y, d_a, d_b = run(a, b, d)
    narrow = b.astype(jnp.bfloat16)
    bits.assert_same_bits(
        y, definition.same_nk_oracle(a, narrow, (3, 5), gemm)
    )
    bits.assert_same_bits(
        d_a,
        definition.same_nk_oracle(d, narrow, (3, 5), gemm, transpose_b=True),
    )
    bits.assert_same_bits(
        d_b, definition.same_mn_oracle(a, d, (3, 5), gemm, "float32")
    )


class RefusalTest(parameterized.TestCase):

  def test_operands_that_do_not_fit(self):
    plan, gemm = suite.plan_of((3, 5), 8), grouped_mlp.GroupGemmContract()
    a = jnp.zeros((8, 4), jnp.float32)
    with self.assertRaisesRegex(ValueError, r"\(8, 4\).*\(2, 3, 5\)"):
      lib.group_gemm_same_nk(a, jnp.zeros((2, 3, 5), jnp.float32), plan, gemm)
    with self.assertRaisesRegex(ValueError, "float32 and bfloat16"):
      lib.group_gemm_same_mn(a, a.astype(jnp.bfloat16), plan, gemm)
    with self.assertRaisesRegex(ValueError, "plan of 8 rows"):
      lib.group_gemm_same_mn(a[:7], a[:7], plan, gemm)

  def test_no_tensor_core_takes_float32(self):
    plan = suite.plan_of((3, 5), 8)
    a = jnp.zeros((8, 16), jnp.float32)
    with self.assertRaisesRegex(ValueError, "no tensor-core step"):
      lib.group_gemm_same_mn(a, a, plan, suite.contract_of("mma16"))

  def test_the_native_chain_has_no_bound_and_no_definition(self):
    with self.assertRaisesRegex(ValueError, "no launch bound"):
      grouped_mlp.GroupGemmContract(bound="total_rows")
    with self.assertRaises(NotImplementedError):
      definition.matmul_oracle(
          np.ones((1, 1)), np.ones((1, 1)), grouped_mlp.GroupGemmContract(),
          "float64",
      )


if __name__ == "__main__":
  absltest.main()
