"""The grouped GEMM kernels in the interpreter: the suite of the twin.

Proven here: indexing, masks, coverage and the chains of the definition on
normal numbers. That a device takes the same steps is shown on a device alone.
Needs no accelerator.
"""

from absl.testing import absltest
import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

from moejax.contracts import refusal
from pallas_kernels import group_gemm as lib
from pallas_kernels import launch
from tests.numerics.grouped import group_gemm_suite as suite
from tests.pallas_kernels import group_gemm_suite as kernel_suite

_CONFIG = launch.LaunchConfig(interpret=True, tile_n=16)


class InterpreterTest(kernel_suite.KernelSuite):
  config = _CONFIG


class OffsetTest(absltest.TestCase):

  def test_m23_a_product_of_row_and_columns_in_64_bits(self):
    rows = np.int32([1_048_576, 524_288, 299_594, 262_144])
    columns = np.int32([2048, 4096, 7168, 8192])

    def kernel(rows_ref, columns_ref, wide_ref, narrow_ref):
      row, column = rows_ref[...], columns_ref[...]
      wide_ref[...] = row.astype(jnp.int64) * column.astype(jnp.int64)
      narrow_ref[...] = row * column

    wide, narrow = pl.pallas_call(
        kernel, interpret=True,
        out_shape=tuple(
            jax.ShapeDtypeStruct((4,), t) for t in (jnp.int64, jnp.int32)
        ),
    )(rows, columns)
    exact = [int(r) * int(c) for r, c in zip(rows, columns, strict=True)]
    self.assertEqual(np.asarray(wide).tolist(), exact)
    self.assertTrue((np.asarray(wide) >= 2**31).all())
    self.assertTrue((np.asarray(narrow) < 0).all())  # Thirty-two bits wrap.

  def test_m23_arrays_that_32_bits_do_not_reach_are_refused(self):
    plan = suite.plan_of((1,), 1_048_576)
    struct = jax.ShapeDtypeStruct
    with self.assertRaisesRegex(refusal.UnsupportedError, "2147483648"):
      jax.eval_shape(
          lambda a, b: lib.group_gemm_same_nk(
              a, b, plan, suite.contract_of("mma16"), config=_CONFIG
          ),
          struct((1_048_576, 2048), jnp.bfloat16),
          struct((1, 2048, 16), jnp.bfloat16),
      )


class RefusalTest(absltest.TestCase):

  def test_chains_dtypes_and_tiles_that_no_kernel_has(self):
    plan, a = suite.plan_of((3,), 8), jnp.zeros((8, 16), jnp.float32)
    b = jnp.zeros((1, 16, 16), jnp.float32)
    for chain in ("native", "portable", "mma16"):
      with self.assertRaisesRegex(refusal.UnsupportedError, chain):
        lib.group_gemm_same_nk(
            a, b, plan, suite.contract_of(chain), config=_CONFIG
        )
    small = suite.grouped_mlp.GroupGemmContract(
        chain="sequential", block_rows=8
    )
    with self.assertRaisesRegex(ValueError, "power of two from 16"):
      lib.group_gemm_same_nk(a, b, plan, small, config=_CONFIG)

  def test_no_device(self):
    if jax.default_backend() != "cpu":
      self.skipTest("There is a device.")
    a = jnp.zeros((8, 16), jnp.float32)
    with self.assertRaisesRegex(refusal.UnsupportedError, "CUDA device"):
      lib.group_gemm_same_mn(a, a, suite.plan_of((3,), 8), suite.contract_of())


if __name__ == "__main__":
  absltest.main()
