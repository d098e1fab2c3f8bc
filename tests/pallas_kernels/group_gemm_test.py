"""The grouped GEMM kernels in the interpreter: the suite of the twin.

Proven here: indexing, masks, coverage and the chains of the definition on
normal numbers. That a device takes the same steps is shown on a device alone.
Needs no accelerator.
"""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

from moejax.contracts import refusal
from moejax.numerics.grouped import tiles
from pallas_kernels import group_gemm as lib
from pallas_kernels import launch
from tests import bits
from tests.numerics.grouped import group_gemm_suite as suite

_CONFIG = launch.LaunchConfig(interpret=True, tile_n=16)


@functools.partial(jax.jit, static_argnames=("contract", "transpose_b"))
def _same_nk(a, b, plan, contract, transpose_b=False, memory=None):
  return lib.group_gemm_same_nk(
      a, b, plan, contract, transpose_b=transpose_b, config=_CONFIG,
      memory=memory,
  )


@functools.partial(jax.jit, static_argnames="contract")
def _same_mn(a, b, plan, contract, memory=None):
  return lib.group_gemm_same_mn(
      a, b, plan, contract, config=_CONFIG, memory=memory
  )


class InterpreterTest(suite.GroupGemmSuite):
  chains = (("bfloat16", "mma16"), ("float32", "sequential"))

  def same_nk(self, a, b, plan, contract, transpose_b=False):
    out, count = _same_nk(a, b, plan, contract, transpose_b)
    wanted = tiles.coverage(
        tiles.of_contract(plan, contract), a.shape[0], contract.block_rows
    )
    np.testing.assert_array_equal(
        count, np.broadcast_to(np.asarray(wanted)[:, None], count.shape)
    )
    valid = int(plan.ends[-1])
    # No tile owns a row without an expert; what reads it selects.
    held = np.isnan(np.asarray(out[valid:], np.float32))
    self.assertTrue(held.all() or contract.unwritten != "nan")
    return jnp.asarray(np.where(
        np.arange(a.shape[0])[:, None] < valid, out, np.zeros((), out.dtype)
    ))

  def same_mn(self, a, b, plan, contract, dtype=None):
    return _same_mn(a, b, plan, contract)

  @parameterized.parameters(("bfloat16", "mma16"), ("float32", "sequential"))
  def test_m12_results_do_not_depend_on_what_memory_held(self, dtype, chain):
    sizes = suite.SIZES["first_and_last_empty"]
    plan, contract = suite.plan_of(sizes), suite.contract_of(chain)
    a = jnp.asarray(suite.draw(suite.ROWS, 16, dtype=dtype))
    b = jnp.asarray(suite.draw(5, 16, 16, dtype=dtype, seed=1))
    rows, weights = [], []
    for fill in (np.nan, 1e4):
      memory = jnp.full((suite.ROWS, 16), fill, a.dtype)
      rows.append(_same_nk(a, b, plan, contract, memory=memory)[0])
      memory = jnp.full((5, 16, 16), fill, a.dtype)
      weights.append(_same_mn(a, a, plan, contract, memory=memory))
    bits.assert_same_bits(rows[0][:34], rows[1][:34])
    bits.assert_same_bits(*weights)
    for expert in (0, 4):
      bits.assert_same_bits(weights[0][expert], np.zeros((16, 16), a.dtype))


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
