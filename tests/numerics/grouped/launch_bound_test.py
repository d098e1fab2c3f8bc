"""What a launch bound of one expert does to the gradient, right and stale.

The stale bound is the token count where an expert has more rows than tokens.
Memory that no program writes holds what it held, so each case runs under
several fills. Needs no accelerator.
"""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import grouped_mlp
from moejax.numerics.grouped import group_gemm
from moejax.numerics.grouped import mlp_oracle
from moejax.numerics.grouped import row_plan
from moejax.numerics.grouped import tiles
from tests.numerics.grouped import cases

_ONE = cases.one_expert
_BALANCED = np.tile(np.int32([0, 1]), (128, 1))


def _one_duplicate():
  ids = _BALANCED.copy()
  ids[5] = 0
  return ids


def _half_duplicates():
  ids = _BALANCED.copy()
  ids[:64] = 0
  return ids


# The table of the specification: ids, max_M, BM, rows that stay unwritten.
TABLE = (
    ("all_on_one", _ONE(128), 128, 128, range(128, 256)),
    ("balanced", _BALANCED, 128, 128, ()),
    ("one_duplicate", _one_duplicate(), 128, 128, (128,)),
    ("half", _half_duplicates(), 128, 128, range(128, 192)),
    ("t100", _ONE(100), 100, 128, range(128, 200)),
    ("t129", _ONE(129), 129, 128, range(256, 258)),
    ("top3", _ONE(128, 3), 128, 128, range(128, 384)),
    ("t64", _ONE(64), 64, 128, ()),
    ("blocks_of_64", _ONE(128), 128, 64, range(128, 256)),
    ("blocks_of_256", _ONE(128), 128, 256, ()),
)


def _stale(limit, fill="nan", block=128):
  """The contract of a GEMM with a stale bound."""
  return grouped_mlp.GroupGemmContract(
      chain="sequential", bound="limit", limit=limit, unwritten=fill,
      block_rows=block,
  )


def _with_dgrad(form, gemm):
  contract = cases.contract_of("sequential", form)
  return dataclasses.replace(contract, dgrad=gemm)


@functools.partial(jax.jit, static_argnames="gemm")
def _run(ids, a, b, gemm):
  plan = row_plan.row_plan(ids, 4)
  listed = tiles.of_contract(plan, gemm)
  count = tiles.coverage(listed, ids.size, gemm.block_rows)
  return count, group_gemm.group_gemm_same_nk(a, b, plan, gemm)


def _coverage_and_held(ids, gemm):
  """How often each row is written, and the rows that stay as they were.

  Ids are padded with "no expert", so that all cases share a shape.
  """
  tokens, top_k = ids.shape
  padded = np.full((130, 3), 4, np.int32)
  padded[:tokens, :top_k] = ids
  rng = np.random.default_rng(0)
  count, out = map(np.asarray, _run(
      padded, rng.standard_normal((390, 2)), rng.standard_normal((4, 2, 3)),
      gemm,
  ))
  np.testing.assert_array_equal(count[ids.size:], 0)
  np.testing.assert_array_equal(out[ids.size:], 0)
  held = np.isnan(out)
  np.testing.assert_array_equal(held.any(1), held.all(1))
  return count[: ids.size], np.flatnonzero(held.any(1)).tolist()


class LaunchBoundTest(parameterized.TestCase):

  def test_m01_all_routes_on_one_expert(self):
    case = cases.problem(_ONE(128))
    np.testing.assert_array_equal(
        row_plan.expert_histogram(case.ids, 4), [256, 0, 0, 0]
    )
    cases.assert_right(case)
    cases.assert_right(case, chain="sequential", forms=cases.FORMS[2:4])

  @parameterized.parameters(*cases.FORMS[:4])  # An eager loop has no bound.
  def test_m02_a_stale_bound_fails(self, *form):
    case = cases.problem(_ONE(128))
    wanted = cases.reference(case)
    contract = _with_dgrad(form, _stale(128))
    # By rows: what the definition leaves unwritten in both input gradients.
    rows = mlp_oracle.moe_mlp_oracle(*case, contract)
    for name in ("d_fc2", "d_rows"):
      held = np.flatnonzero(np.isnan(rows[name]).any(1))
      self.assertEqual(held.tolist(), list(range(128, 256)), name)
    found = cases.results(case, contract)
    wrong = cases.beyond(found, wanted, "float64")
    # With the weight after fc2 the gradient of a gate reads complete rows.
    gates = {"d_gates"} if form[1] == "before_fc2" else set()
    self.assertEqual(set(wrong), {"dx", "d_gate_up"} | gates)
    self.assertTrue(np.isnan(found["d_gate_up"][0]).all())
    self.assertFalse(found["d_gate_up"][1:].any())
    tokens = np.isnan(found["dx"]).any(1)
    self.assertEqual(np.flatnonzero(tokens).tolist(), list(range(64, 128)))
    if form[1] == "before_fc2":
      slots = np.isnan(found["d_gates"]).reshape(-1)
      self.assertEqual(np.flatnonzero(slots).tolist(), list(range(128, 256)))

  @parameterized.parameters("zero", "1e4")
  def test_m03_a_finite_fill_hides_it_from_a_finiteness_check(self, fill):
    case = cases.problem(_ONE(128))
    found = cases.results(
        case, _with_dgrad(("split", "before_fc2"), _stale(128, fill))
    )
    self.assertTrue(all(np.isfinite(v).all() for v in found.values()))
    wrong = cases.beyond(found, cases.reference(case), "float64")
    self.assertEqual(set(wrong), {"dx", "d_gates", "d_gate_up"})

  def test_m03_a_bound_on_weight_gradients_is_finite_and_wrong(self):
    case = cases.problem(_ONE(6))  # 12 rows of one expert.
    contract = cases.contract_of(
        "sequential", ("merged", "before_fc2"), block_rows=4
    )
    wanted = cases.reference(case)
    found = cases.results(case, contract)
    self.assertEmpty(cases.beyond(found, wanted, "float64"))
    stale = dataclasses.replace(contract, wgrad=_stale(6, block=4))
    found = cases.results(case, stale)
    self.assertTrue(all(np.isfinite(v).all() for v in found.values()))
    self.assertEqual(
        set(cases.beyond(found, wanted, "float64")), {"d_gate_up", "d_down"}
    )

  @parameterized.parameters(
      ("all_distinct", 128), ("hidden_by_rounding", 64)
  )
  def test_m04_blind_spots_where_a_stale_bound_is_right(self, name, tokens):
    ids = _BALANCED if name == "all_distinct" else _ONE(tokens)
    case = cases.problem(ids)
    for form in cases.FORMS[:4]:
      contract = _with_dgrad(form, _stale(tokens))
      found = cases.results(case, contract)
      self.assertEmpty(
          cases.beyond(found, cases.reference(case), "float64"), form
      )

  def test_m05_one_duplicate_leaves_one_row(self):
    case = cases.problem(_one_duplicate())
    np.testing.assert_array_equal(
        row_plan.expert_histogram(case.ids, 4), [129, 127, 0, 0]
    )
    contract = _with_dgrad(("merged", "before_fc2"), _stale(128))
    rows = mlp_oracle.moe_mlp_oracle(*case, contract)
    for name in ("d_fc2", "d_rows"):
      held = np.flatnonzero(np.isnan(rows[name]).any(1)).tolist()
      self.assertEqual(held, [128], name)
    self.assertTrue(np.isnan(cases.results(case, contract)["dx"]).any())

  @parameterized.parameters("tile_list", "total_rows")
  def test_m06_no_row_is_left_and_none_written_twice(self, bound):
    for name, ids, _, block, _ in TABLE:
      gemm = grouped_mlp.GroupGemmContract(
          chain="sequential", bound=bound, block_rows=block
      )
      count, held = _coverage_and_held(ids, gemm)
      np.testing.assert_array_equal(count, np.ones(ids.size), name)
      self.assertEmpty(held, name)

  def test_m06_rows_without_an_expert_are_covered_by_no_tile(self):
    ids = np.int32([[0, 4], [4, 1], [4, 4]])
    plan = row_plan.row_plan(jnp.asarray(ids), 4)
    count = tiles.coverage(tiles.flattened(plan, 4), 6, 4)
    np.testing.assert_array_equal(count, [1, 1, 0, 0, 0, 0])

  def test_m06_the_right_bounds_give_the_right_gradient(self):
    case = cases.problem(_ONE(128))
    for bound in ("tile_list", "total_rows"):
      gemm = grouped_mlp.GroupGemmContract(
          chain="sequential", bound=bound, block_rows=128
      )
      found = cases.results(
          case, _with_dgrad(("merged", "before_fc2"), gemm)
      )
      self.assertEmpty(cases.beyond(found, cases.reference(case), "float64"))

  @parameterized.named_parameters(*TABLE)
  def test_m07_rows_that_a_stale_bound_leaves(self, ids, limit, block, rows):
    count, held = _coverage_and_held(ids, _stale(limit, block=block))
    self.assertEqual(held, list(rows))
    self.assertEqual(np.flatnonzero(count == 0).tolist(), list(rows))
    self.assertEqual(set(count.tolist()) - {0}, {1})

  @parameterized.parameters(100, 129)
  def test_m07_token_counts_that_are_no_multiple_of_a_tile(self, tokens):
    cases.assert_right(cases.problem(_ONE(tokens)), forms=cases.FORMS[2:3])

  def test_m07_three_slots(self):
    cases.assert_right(cases.problem(_ONE(128, 3)), forms=cases.FORMS[2:3])


if __name__ == "__main__":
  absltest.main()
