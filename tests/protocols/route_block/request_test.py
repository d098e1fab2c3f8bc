"""The request, its cells, and the facts that its planner must show."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import document
from moejax.contracts import refusal
from moejax.numerics.packed import planner
from moejax.protocols import packed_fixture
from moejax.protocols.route_block import fixture as lib
from moejax.protocols.route_block import record
from moejax.protocols.route_block import request as request_lib
from tests.protocols.route_block import sample

_STUDY = request_lib.StudyRequest()


class RequestTest(parameterized.TestCase):

  def test_seven_arms_two_histories_five_replicates(self):
    cells = _STUDY.cells()
    self.assertLen(cells, 70)
    self.assertLen({cell.name for cell in cells}, 70)
    self.assertEqual([c.ordinal for c in cells], list(range(70)))
    self.assertLen({(c.arm, c.history) for c in cells}, 14)

  def test_replicates_take_the_histories_in_turn(self):
    first = [c.history for c in _STUDY.cells() if c.arm == "stable"][::2]
    self.assertEqual(first, ["H0", "H1", "H0", "H1", "H0"])

  def test_json_and_back(self):
    values = document.to_dict(sample.REQUEST)
    self.assertEqual(
        document.from_dict(request_lib.StudyRequest, values), sample.REQUEST
    )

  @parameterized.parameters(
      ({"tokens": 0}, "tokens=0"),
      ({"replicates": 0}, "replicates=0"),
      ({"grid": 0}, "grid=0"),
      ({"thread_k": 96}, "thread_k=96"),
      ({"dtype": "float32"}, "float32"),
      ({"seed": -1}, "seed=-1"),
      ({"seed": 1.5}, "seed=1.5"),
      ({"shape": None}, "LayerShape"),
  )
  def test_refuses(self, change, message):
    with self.assertRaisesRegex(refusal.HarnessError, message):
      dataclasses.replace(_STUDY, **change)

  @parameterized.parameters(
      {"tokens": 11},  # Fewer than an expert of two blocks has routes.
      {"split_expert": 128},
      {"split_expert": 30},  # 36 experts must lie before it.
      {"num_blocks": 80},
      {"low_blocks": 7},
      {"other_experts": 0},
      {"moved_pairs": 20},
      {"block_rows": 2},
  )
  def test_no_fixture_has_that_structure(self, **change):
    with self.assertRaisesRegex(refusal.HarnessError, "no fixture"):
      lib.make(dataclasses.replace(_STUDY, **change))


class StudyFactsTest(parameterized.TestCase):
  """Numbers of the published study; integers, so no kernel is needed."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.made = lib.make(_STUDY)

  def test_168_routes_400_rows_50_blocks(self):
    for plan in self.made.histories.values():
      self.assertEqual(
          (plan.num_routes, plan.padded_length, plan.num_blocks),
          (168, 400, 50),
      )
      self.assertEqual(plan.block_experts[40:42].tolist(), [106, 106])
      self.assertEqual((plan.block_experts == 106).sum(), 2)

  @parameterized.parameters(
      (246, 492, 41, 0, ((0, 16), (16, 16))), (200, 400, 33, 4, ((0, 32),))
  )
  def test_w13(self, grid, direct, block, n_tile, cuts):
    plan = self.made.histories["H0"]
    work = record.schedules(_STUDY, plan, grid)["w13"]
    self.assertLen(work.tiles, 600)
    self.assertEqual(work.num_direct, direct)
    self.assertEqual(divmod(work.num_direct, 12), (block, n_tile))
    self.assertEqual({planner.cuts(t) for t in work.tiles[direct:]}, {cuts})

  def test_w13_has_two_classes_at_246_and_one_at_200(self):
    plan = self.made.histories["H1"]
    classes = {
        grid: planner.schedule_classes(
            record.schedules(_STUDY, plan, grid)["w13"]
        )
        for grid in (246, 200)
    }
    self.assertEqual(classes[246], (0,) * 41 + (1,) * 9)
    self.assertEqual(classes[200], (0,) * 50)

  def test_w2_repeats_with_period_4_and_cuts_both_blocks_alike(self):
    plan = self.made.histories["H0"]
    work = record.schedules(_STUDY, plan, 246)["w2"]
    self.assertEqual(divmod(work.num_direct, 16), (30, 12))
    split = [planner.cuts(t) for t in work.tiles[work.num_direct :]]
    period = [((0, 12),), ((0, 4), (4, 8)), ((0, 8), (8, 4)), ((0, 12),)]
    self.assertEqual(split, period * 77)
    self.assertEqual(planner.moved_n_tiles(work, 40, 41), ())

  @parameterized.parameters((528, 132, 128, 64), (396, 132, 64, 128))
  def test_multiples_of_132_processors_separate_and_join_the_blocks(
      self, grid, other, thread_k, thread_n
  ):
    request = dataclasses.replace(
        _STUDY, grid=grid, other_grid=other, thread_k=thread_k,
        thread_n=thread_n,
    )
    plan = self.made.histories["H0"]
    first, second = (
        planner.schedule_classes(record.schedules(request, plan, g)["w13"])
        for g in (grid, other)
    )
    self.assertNotEqual(first[40], first[41])
    self.assertEqual(second[40], second[41])
    low = {c[:_STUDY.low_blocks] for c in (first, second)}
    self.assertEqual(low, {(0,) * _STUDY.low_blocks})

  def test_the_weights_have_a_digest_each_bit_takes_part_in(self):
    shape = packed_fixture.LayerShape(2, 64, 32, 32)
    w13, w2 = packed_fixture.layer(1, shape, "float16")
    before = lib.weights_digest(w13, w2)
    w2[1].zeros[0, 3] ^= 1
    self.assertNotEqual(lib.weights_digest(w13, w2), before)


if __name__ == "__main__":
  absltest.main()
