"""Where rows lie: the properties of a plan, its tiles, and its checks.

Needs no accelerator.
"""

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis as hp
import hypothesis.strategies as hps
import jax
from jax.experimental import checkify
import jax.numpy as jnp
import numpy as np

from moejax.contracts import grouped_mlp
from moejax.numerics.grouped import checks
from moejax.numerics.grouped import mlp
from moejax.numerics.grouped import row_plan as lib
from moejax.numerics.grouped import tiles
from tests import bits
from tests.numerics.grouped import cases


def _ids(seed, tokens=7, top_k=3, experts=5, sentinel=True):
  rng = np.random.default_rng(seed)
  return rng.integers(0, experts + sentinel, (tokens, top_k)).astype(np.int32)


def _assert_bijective_and_grouped(pos, ids, experts):
  flat, rows = ids.reshape(-1), np.asarray(pos).reshape(-1)
  np.testing.assert_array_equal(np.sort(rows), np.arange(ids.size))
  ends = np.cumsum([np.sum(flat == e) for e in range(experts + 1)])
  starts = np.concatenate([[0], ends[:-1]])
  assert (starts[flat] <= rows).all() and (rows < ends[flat]).all()


def _expert_of_row(plan):
  """The expert of each row; the number of experts where there is none."""
  rows = np.arange(len(plan.slot_of_row))
  return np.searchsorted(np.asarray(plan.ends), rows, side="right")


class RowPlanTest(parameterized.TestCase):

  @hp.given(seed=hps.integers(0, 2**16))
  def test_m20_a_plan_is_a_bijection_grouped_and_stable(self, seed):
    ids = _ids(seed)
    pos = np.asarray(lib.scatter_index(ids, 5))
    _assert_bijective_and_grouped(pos, ids, 5)
    for expert in range(6):
      rows = pos.reshape(-1)[ids.reshape(-1) == expert]
      self.assertTrue((np.diff(rows) == 1).all())
    bits.assert_same_bits(pos, lib.scatter_index_oracle(ids, 5))

  def test_m20_slots_of_a_token_are_neighbours_in_order(self):
    pos = lib.scatter_index(jnp.int32([[1, 1], [0, 2], [1, 0]]), 2)
    np.testing.assert_array_equal(pos, [[2, 3], [0, 5], [4, 1]])

  @hp.given(seed=hps.integers(0, 2**16))
  def test_m20_counts_and_slots_are_those_of_the_definition(self, seed):
    ids = _ids(seed)
    plan = lib.row_plan(jnp.asarray(ids), 5)
    counts = lib.expert_histogram_oracle(ids, 5)
    bits.assert_same_bits(plan.counts, counts)
    bits.assert_same_bits(plan.ends, np.cumsum(counts).astype(np.int32))
    valid = int(counts.sum())
    slots = np.asarray(plan.slot_of_row)
    self.assertTrue((slots[valid:] == ids.size).all())
    expert = _expert_of_row(plan)
    np.testing.assert_array_equal(
        expert[:valid], ids.reshape(-1)[slots[:valid]]
    )
    self.assertTrue((expert[valid:] == 5).all())

  def test_m20_the_reserved_order_is_grouped_but_not_stable(self):
    ids = _ids(0, tokens=150, sentinel=False)  # 450 ids: four blocks.
    orders = {}
    for blocks in ((0, 1, 2, 3), (2, 0, 3, 1)):
      pos = lib.reserved_order(ids, 5, list(blocks))
      _assert_bijective_and_grouped(pos, ids, 5)
      orders[blocks] = pos
    stable = lib.scatter_index_oracle(ids, 5)
    for pos in orders.values():
      self.assertTrue((pos != stable).any())
    self.assertTrue((orders[0, 1, 2, 3] != orders[2, 0, 3, 1]).any())
    # The last block first: ranges counted down from the end are then in order.
    last_first = lib.reserved_order(ids, 5, [3, 2, 1, 0])
    bits.assert_same_bits(last_first, stable)

  @parameterized.parameters("before_fc2", "after_fc2")
  def test_m20_only_weight_gradients_see_the_order_of_rows(self, placement):
    ids = _ids(1, tokens=100, experts=3, sentinel=False)
    case = cases.problem(ids, experts=3, dtype="float32")
    contract = grouped_mlp.of_chain(
        "sequential", weight_placement=placement, block_rows=32
    )

    @jax.jit
    def run(operands, pos, dy):
      plan = lib.of_positions(pos, lib.expert_histogram(jnp.asarray(ids), 3))
      y, vjp = jax.vjp(lambda *a: mlp.of_plan(*a, plan, contract), *operands)
      return (y, *vjp(dy))

    found = [
        run(case.operands, jnp.asarray(pos), case.dy)
        for pos in (
            lib.scatter_index_oracle(ids, 3),
            lib.reserved_order(ids, 3, [1, 0, 2]),
        )
    ]
    for stable, other in list(zip(*found, strict=True))[:3]:
      bits.assert_same_bits(other, stable)
    for stable, other in list(zip(*found, strict=True))[3:]:
      self.assertTrue((stable != other).any())
      np.testing.assert_allclose(other, stable, rtol=0, atol=1e-5)

  @hp.given(
      counts=hps.lists(hps.integers(0, 70), min_size=1, max_size=6),
      block=hps.sampled_from((1, 4, 16, 64)),
      spare=hps.integers(0, 5),
  )
  def test_m24_the_tile_list_is_long_enough(self, counts, block, spare):
    length = tiles.list_length(sum(counts) + spare, len(counts), block)
    needed = sum(-(-n // block) for n in counts)
    self.assertLessEqual(needed, length)
    # And no longer than one tile an expert more than whole tiles need.
    self.assertLessEqual(
        length, (sum(counts) + spare) // block + len(counts)
    )

  @hp.given(seed=hps.integers(0, 2**16), block=hps.sampled_from((1, 4, 16)))
  def test_m24_every_row_lies_in_one_tile_of_its_expert(self, seed, block):
    ids = _ids(seed)
    plan = lib.row_plan(jnp.asarray(ids), 5)
    listed = tiles.flattened(plan, block)
    expert = _expert_of_row(plan)
    seen = np.zeros(ids.size, int)
    for e, first, end in zip(*map(np.asarray, listed), strict=True):
      self.assertLessEqual(end - first, block)
      self.assertTrue((expert[first:end] == e).all())
      seen[first:end] += 1
    np.testing.assert_array_equal(seen, expert < 5)


class ChecksTest(parameterized.TestCase):

  @parameterized.parameters(-1, 5)
  def test_m08_ids_outside_are_refused(self, wrong):
    ids = np.int32([[0, 4], [2, wrong]])
    with self.assertRaisesRegex(ValueError, "0..4"):
      checks.check_ids(jnp.asarray(ids), 4)
    case = cases.problem(ids)
    with self.assertRaisesRegex(ValueError, "expert ids"):
      mlp.moe_mlp(
          *map(jnp.asarray, case.operands), jnp.asarray(ids),
          grouped_mlp.GroupedMlpContract(), checked=True,
      )

  def test_m08_counts_that_do_not_sum_to_the_rows(self):
    plan = lib.row_plan(jnp.int32([[0, 1], [1, 4]]), 4)
    checks.check_plan(plan)
    more = plan._replace(counts=plan.counts.at[2].add(1))
    with self.assertRaisesRegex(ValueError, "sum to 4.*3 slots"):
      checks.check_plan(more)
    ends = plan._replace(ends=plan.ends.at[0].add(1))
    with self.assertRaisesRegex(ValueError, "counts"):
      checks.check_plan(ends)

  @parameterized.parameters(1, -1, 9)
  def test_m08_rows_that_are_no_bijection(self, wrong):
    plan = lib.row_plan(jnp.int32([[0, 1], [1, 3]]), 4)
    broken = plan._replace(pos=plan.pos.at[0, 0].set(wrong))
    with self.assertRaisesRegex(ValueError, "bijection"):
      checks.check_plan(broken)

  @parameterized.parameters(
      ("limit", 128, True), ("limit", 129, False), ("distinct", None, True),
      ("total_rows", None, False), ("tile_list", None, False),
  )
  def test_m08_a_bound_that_leaves_rows_is_refused(self, bound, limit, raises):
    gemm = grouped_mlp.GroupGemmContract(
        chain="sequential", bound=bound, limit=limit
    )
    plan = lib.row_plan(jnp.asarray(cases.one_expert(128)), 4)
    if not raises:
      checks.check_bound(plan, gemm)
      return
    with self.assertRaisesRegex(ValueError, "reaches 128 rows.*has 256"):
      checks.check_bound(plan, gemm)

  @parameterized.parameters("forward", "dgrad", "wgrad")
  def test_m08_checked_mode_looks_at_every_gemm(self, field):
    stale = grouped_mlp.GroupGemmContract(
        chain="sequential", bound="limit", limit=128
    )
    case = cases.problem(cases.one_expert(128))
    contract = grouped_mlp.GroupedMlpContract(**{field: stale})
    with self.assertRaisesRegex(ValueError, "reaches 128"):
      mlp.moe_mlp(
          *map(jnp.asarray, case.operands), jnp.asarray(case.ids), contract,
          checked=True,
      )

  def test_m08_checks_reach_into_compiled_gradients(self):
    case = cases.problem(np.int32([[0, 1], [2, 3]]))

    def loss(operands, ids):
      y = mlp.moe_mlp(
          *operands, ids, grouped_mlp.GroupedMlpContract(), checked=True
      )
      return jnp.sum(y)

    step = jax.jit(checkify.checkify(jax.grad(loss)))
    error, _ = step(case.operands, jnp.asarray(case.ids))
    error.throw()
    error, _ = step(case.operands, jnp.asarray(case.ids + 3))
    with self.assertRaisesRegex(checkify.JaxRuntimeError, "expert ids"):
      error.throw()

  def test_unchecked_ids_outside_count_as_no_expert(self):
    # By itself JAX wraps -1 to the last bin and drops the id behind it.
    plan = lib.row_plan(jnp.int32([[0, 9], [-1, 1]]), 3)
    np.testing.assert_array_equal(plan.counts, [1, 1, 0])
    np.testing.assert_array_equal(plan.slot_of_row, [0, 3, 4, 4])


if __name__ == "__main__":
  absltest.main()
