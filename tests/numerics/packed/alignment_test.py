"""Route blocks: construction, identity, legal histories, refusals."""

import collections
import itertools
import math

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from moejax.numerics.packed import alignment as lib
from tests import bits

_C01 = np.array([0, 1, 0, 1, 0, 0, 1, 0, 1, 0])[:, None]


def _routing(seed, tokens=21, top_k=8, experts=128):
  """Skewed: low experts are chosen more often."""
  rng = np.random.default_rng(seed)
  weight = 1 / np.arange(1, experts + 1)
  rows = [
      rng.choice(experts, top_k, replace=False, p=weight / weight.sum())
      for _ in range(tokens)
  ]
  return np.stack(rows)


class StableTest(parameterized.TestCase):

  def test_case_c01(self):
    plan = lib.route_blocks(_C01, 2, 4)
    self.assertEqual(
        plan.sorted_routes.reshape(-1).tolist(),
        [0, 2, 4, 5, 7, 9, 10, 10, 1, 3, 6, 8],
    )
    self.assertEqual(plan.block_experts.tolist(), [0, 0, 1])
    self.assertEqual(plan.padded_length, 12)

  def test_case_c02_keeps_every_token(self):
    plan = lib.route_blocks(np.zeros((4, 1), int), 1, 16)
    self.assertEqual(
        plan.sorted_routes.tolist(), [[0, 1, 2, 3] + [4] * 12]
    )
    self.assertEqual(plan.block_experts.tolist(), [0])
    plan = lib.route_blocks(np.array([[0, 2], [2, 0], [1, 2]]), 4, 2)
    self.assertEqual(
        plan.sorted_routes.reshape(-1).tolist(), [0, 3, 4, 6, 1, 2, 5, 6]
    )
    self.assertEqual(plan.block_experts.tolist(), [0, 1, 2, 2])
    self.assertEqual(plan.padded_length, 8)

  @parameterized.parameters(*range(5))
  def test_valid_rows_are_the_routes_each_in_its_experts_block(self, seed):
    ids = _routing(seed)
    plan = lib.route_blocks(ids, 128, 8)
    seen = []
    for expert, j, routes in plan.membership():
      self.assertEqual(set(ids.reshape(-1)[list(routes)]), {expert})
      seen += routes
      self.assertEqual(plan.routes(j).tolist(), list(routes))
    self.assertEqual(sorted(seen), list(range(ids.size)))
    counts = collections.Counter(ids.reshape(-1).tolist())
    self.assertEqual(
        plan.num_blocks, sum(-(-n // 8) for n in counts.values())
    )

  def test_nothing_to_route(self):
    plan = lib.route_blocks(np.zeros((0, 8), int), 4, 8)
    self.assertEqual((plan.num_blocks, plan.padded_length), (0, 0))
    self.assertEqual(lib.num_memberships(plan), 1)


class IdentityTest(absltest.TestCase):

  def test_inside_a_block_the_order_is_free_and_across_it_is_not(self):
    plan = lib.route_blocks(_C01, 2, 4)
    inside = lib.route_blocks(_C01, 2, 4, orders={0: [0, 5, 4, 2, 7, 9]})
    across = lib.route_blocks(_C01, 2, 4, orders={0: [0, 2, 4, 7, 5, 9]})
    self.assertEqual(plan.identity(), inside.identity())
    self.assertNotEqual(plan.identity(), across.identity())
    self.assertEqual(
        across.membership()[:2], ((0, 0, (0, 2, 4, 7)), (0, 1, (5, 9)))
    )

  def test_the_number_of_memberships_is_that_of_an_enumeration(self):
    plan = lib.route_blocks(_C01, 2, 4)
    found = {
        lib.route_blocks(_C01, 2, 4, orders={0: order, 1: other}).identity()
        for order in itertools.permutations([0, 2, 4, 5, 7, 9])
        for other in itertools.permutations([1, 3, 6, 8])
    }
    self.assertLen(found, lib.num_memberships(plan))
    self.assertLen(found, math.comb(6, 4))

  def test_experts_that_fit_one_block_have_one_membership(self):
    plan = lib.route_blocks(_C01, 2, 8)
    self.assertEqual(lib.num_memberships(plan), 1)


class ExpertMapTest(absltest.TestCase):

  def test_routes_of_absent_experts_are_dropped(self):
    ids = np.array([[0, 2], [2, 3], [1, 0]])
    plan = lib.route_blocks(ids, 4, 2, expert_map=np.array([1, -1, 0, -1]))
    self.assertEqual(
        plan.membership(), ((0, 0, (1, 2)), (1, 1, (0, 5)))
    )
    self.assertEqual(plan.num_routes, 6)

  def test_refuses_a_map_that_is_none(self):
    ids = np.array([[0, 1]])
    for wrong, message in (
        ([0, 1, 2], r"2 local ids.*shape \(3,\)"),
        ([0, -2], "least -2"),
        ([0, 0], "twice"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        lib.route_blocks(ids, 2, 2, expert_map=np.array(wrong))


class BuffersTest(absltest.TestCase):

  def test_lengths_of_the_study(self):
    ids, experts = lib.route_blocks(_routing(0), 128, 8).buffers(128)
    self.assertLen(ids, 1064)
    self.assertLen(experts, 133)

  def test_round_trip_with_a_poisoned_tail(self):
    routing = _routing(1)
    plan = lib.route_blocks(routing, 128, 8)
    ids, experts = plan.buffers(128)
    ids[plan.padded_length :] = -7
    experts[plan.num_blocks :] = 99
    again = lib.from_buffers(ids, experts, plan.padded_length, 8, routing)
    bits.assert_same_bits(again.sorted_routes, plan.sorted_routes)
    bits.assert_same_bits(again.block_experts, plan.block_experts)

  def test_refuses_what_is_no_partition(self):
    plan = lib.route_blocks(_C01, 2, 4)
    good = plan.sorted_routes.reshape(-1)
    experts = plan.block_experts

    def refuses(message, rows=good, blocks=experts, length=12):
      with self.assertRaisesRegex(ValueError, message):
        lib.from_buffers(np.array(rows), np.array(blocks), length, 4, _C01)

    only_first = [0] + [10] * 3 + [7, 9, 10, 10, 1, 3, 6, 8]
    refuses("7 of 10 routes, missing .2, 4, 5.", only_first)
    refuses("no partition", [0, 2, 4, 4, 7, 9, 10, 10, 1, 3, 6, 8])
    refuses("route 1 of expert 1 .* expert 0",
            [0, 2, 4, 1, 7, 9, 10, 10, 5, 3, 6, 8])
    refuses("11 is neither", [0, 2, 4, 5, 7, 9, 11, 10, 1, 3, 6, 8])
    refuses("before a route", [0, 2, 4, 5, 7, 10, 9, 10, 1, 3, 6, 8])
    refuses("do not ascend", blocks=[0, 1, 0])
    refuses("no multiple", length=11)
    refuses("needs more", length=16)


class HistoryTest(absltest.TestCase):

  def test_small_path_is_ordered_by_thread(self):
    ids = np.zeros((70, 1), int)
    self.assertEqual(
        lib.small_path_orders(ids, 4)[0][:5].tolist(), [0, 32, 64, 1, 33]
    )

  def test_small_path_is_deterministic_and_not_stable(self):
    ids = _routing(2, tokens=40, experts=16)
    orders = lib.small_path_orders(ids, 16)
    plan = lib.route_blocks(ids, 16, 8, orders=orders)
    stable = lib.route_blocks(ids, 16, 8)
    self.assertNotEqual(plan.identity(), stable.identity())

  def test_large_path_has_no_order_of_its_own(self):
    with self.assertRaisesRegex(NotImplementedError, "128 experts"):
      lib.small_path_orders(_routing(3), 128)
    with self.assertRaisesRegex(NotImplementedError, "1024 routes"):
      lib.small_path_orders(np.zeros((128, 8), int), 8)


class BlockRowsTest(parameterized.TestCase):

  @parameterized.parameters(
      (115, 8), (116, 16), (230, 16), (231, 32), (460, 32), (461, 48),
      (691, 48), (692, 64), (4096, 64),
  )
  def test_of_128_experts_and_top_8(self, tokens, rows):
    self.assertEqual(lib.block_rows_for(tokens * 8, 128), rows)

  def test_a_block_filled_to_nine_tenths_is_full(self):
    self.assertEqual(lib.block_rows_for(36, 5), 16)


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
      (np.array([[0, 4]]), 8, r"expert_ids\[0, 1\]=4 is not in 0..3"),
      (np.array([[0], [-1]]), 8, r"expert_ids\[1, 0\]=-1"),
      (np.array([0, 1]), 8, r"\[token, slot\]"),
      (np.array([[0.0]]), 8, "float64"),
      (np.array([[0]]), 0, "block_rows=0"),
  )
  def test_routing(self, ids, rows, message):
    with self.assertRaisesRegex(ValueError, message):
      lib.route_blocks(ids, 4, rows)

  def test_order_of_other_routes(self):
    with self.assertRaisesRegex(ValueError, r"orders\[1\]=.* no order"):
      lib.route_blocks(_C01, 2, 4, orders={1: [1, 3, 6, 6]})


if __name__ == "__main__":
  absltest.main()
