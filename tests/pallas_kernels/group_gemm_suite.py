"""The suite of grouped GEMMs on the kernels, with coverage and poisoned memory.

Subclasses say where it runs.
"""

import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from moejax.numerics.grouped import tiles
from pallas_kernels import group_gemm as lib
from pallas_kernels import launch
from tests import bits
from tests.numerics.grouped import group_gemm_suite as suite


@functools.partial(
    jax.jit, static_argnames=("contract", "config", "transpose_b")
)
def _same_nk(
    a, b, plan, contract, config, transpose_b=False, memory=None
):
  return lib.group_gemm_same_nk(
      a, b, plan, contract, transpose_b=transpose_b, config=config,
      memory=memory,
  )


@functools.partial(jax.jit, static_argnames=("contract", "config"))
def _same_mn(a, b, plan, contract, config, memory=None):
  return lib.group_gemm_same_mn(
      a, b, plan, contract, config=config, memory=memory
  )


class KernelSuite(suite.GroupGemmSuite):
  """Not collected itself."""

  config: launch.LaunchConfig
  chains = (("bfloat16", "mma16"), ("float32", "sequential"))

  def same_nk(self, a, b, plan, contract, transpose_b=False):
    out, count = _same_nk(a, b, plan, contract, self.config, transpose_b)
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
    return _same_mn(a, b, plan, contract, self.config)

  @parameterized.parameters(("bfloat16", "mma16"), ("float32", "sequential"))
  def test_m12_results_do_not_depend_on_what_memory_held(self, dtype, chain):
    sizes = suite.SIZES["first_and_last_empty"]
    plan, contract = suite.plan_of(sizes), suite.contract_of(chain)
    a = jnp.asarray(suite.draw(suite.ROWS, 16, dtype=dtype))
    b = jnp.asarray(suite.draw(5, 16, 16, dtype=dtype, seed=1))
    rows, weights = [], []
    for fill in (np.nan, 1e4):
      memory = jnp.full((suite.ROWS, 16), fill, a.dtype)
      rows.append(
          _same_nk(a, b, plan, contract, self.config, memory=memory)[0]
      )
      memory = jnp.full((5, 16, 16), fill, a.dtype)
      weights.append(
          _same_mn(a, a, plan, contract, self.config, memory=memory)
      )
    bits.assert_same_bits(rows[0][:34], rows[1][:34])
    bits.assert_same_bits(*weights)
    for expert in (0, 4):
      bits.assert_same_bits(weights[0][expert], np.zeros((16, 16), a.dtype))
