"""Faults planted in the training path, each seen by a test with a name.

A mutant replaces one function for as long as its test runs; without the mutant
the same test passes. Needs no accelerator.
"""

import functools
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp

from moejax.numerics.grouped import activation
from moejax.numerics.grouped import group_gemm
from moejax.numerics.grouped import row_moves
from moejax.numerics.grouped import row_plan
from moejax.numerics.grouped import tiles
from tests.numerics.grouped import activation_test
from tests.numerics.grouped import group_gemm_test
from tests.numerics.grouped import launch_bound_test
from tests.numerics.grouped import mlp_test
from tests.numerics.grouped import row_moves_test
from tests.numerics.grouped import row_plan_test


def _last_tile_dropped(true, plan, block_rows):
  listed = true(plan, block_rows)
  used = jnp.sum(listed.first < listed.end)
  last = jnp.arange(listed.first.shape[0]) == used - 1
  return listed._replace(end=jnp.where(last, listed.first, listed.end))


def _no_zero_store(true, a, b, plan, contract, dtype):
  out = true(a, b, plan, contract, dtype)
  return jnp.where((plan.counts == 0)[:, None, None], jnp.nan, out).astype(
      dtype
  )


def _last_written_weight(true, gates, plan):
  """The gates of one token and expert go through one place of a map."""
  pos, top_k = plan.pos, plan.pos.shape[1]
  expert = jnp.searchsorted(plan.ends, pos, side="right")
  kept = gates
  for later in range(1, top_k):
    for slot in range(later):
      same = expert[:, slot] == expert[:, later]
      kept = kept.at[:, slot].set(
          jnp.where(same, jnp.zeros((), gates.dtype), kept[:, slot])
      )
  return true(kept, plan)


def _bounded_by_tokens(true, plan, contract):
  block = contract.block_rows
  tokens = -(-plan.pos.shape[0] // block) * block
  return jnp.minimum(true(plan, contract), jnp.int32(tokens))


def _strict_clamp_mask(true, gate, up, d_out, contract, zero):
  d_gate, d_up = true(gate, up, d_out, contract, zero)
  limit = contract.clamp_limit
  if limit is not None:
    d_gate = jnp.where(gate == limit, jnp.zeros((), d_gate.dtype), d_gate)
    d_up = jnp.where(jnp.abs(up) == limit, jnp.zeros((), d_up.dtype), d_up)
  return d_gate, d_up


def _descending_rows(true, ids, num_experts):
  flipped = true(ids.reshape(-1)[::-1], num_experts)
  return flipped[::-1].reshape(ids.shape)


def _sum_in_storage_dtype(true, v, plan):
  del true
  total = jnp.zeros((plan.pos.shape[0], v.shape[1]), v.dtype)
  for slot in range(plan.pos.shape[1]):
    total = total + v[plan.pos[:, slot]]
  return total


# The mutant's name, the function it replaces, and the test that sees it.
MUTANTS = (
    ("drops_the_last_tile", tiles, "flattened", _last_tile_dropped,
     launch_bound_test.LaunchBoundTest,
     "test_m06_rows_without_an_expert_are_covered_by_no_tile"),
    ("skips_the_zero_store", group_gemm, "_row_chain", _no_zero_store,
     group_gemm_test.TwinTest, "test_experts_that_saw_no_token0"),
    ("last_write_of_weights", row_moves, "gate_rows", _last_written_weight,
     mlp_test.FormsTest, "test_m11_a_case_by_hand2"),
    ("max_k_is_the_token_count", tiles, "written_rows", _bounded_by_tokens,
     launch_bound_test.LaunchBoundTest,
     "test_m03_a_bound_on_weight_gradients_is_finite_and_wrong"),
    ("strict_clamp_mask", activation, "backward", _strict_clamp_mask,
     activation_test.ClampTest, "test_m17_a_tie_passes_the_gradient0"),
    ("rows_descend", row_plan, "scatter_index", _descending_rows,
     row_plan_test.RowPlanTest,
     "test_m20_slots_of_a_token_are_neighbours_in_order"),
    ("sums_in_the_storage_dtype", row_moves, "gather_rows",
     _sum_in_storage_dtype, row_moves_test.RowMovesTest,
     "test_slots_add_in_order_and_round_once"),
)


def _passes(test_class, name: str) -> bool:
  """Whether one test passes, with nothing compiled before it."""
  jax.clear_caches()
  result = unittest.TestResult()
  test_class(name).run(result)
  if result.testsRun != 1 or result.skipped:
    raise AssertionError(f"{name} did not run.")
  return result.wasSuccessful()


class MutationTest(parameterized.TestCase):

  @parameterized.named_parameters(*MUTANTS)
  def test_m28(self, module, function, mutant, test_class, name):
    self.assertTrue(_passes(test_class, name))
    true = getattr(module, function)
    with mock.patch.object(
        module, function, functools.partial(mutant, true)
    ):
      self.assertFalse(_passes(test_class, name))
    jax.clear_caches()


if __name__ == "__main__":
  absltest.main()
