"""The planner: published digests, the study's facts, a literal simulation."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from moejax.contracts import packed_gemm
from moejax.numerics.packed import planner as lib

_W13, _W2 = (1536, 2048), (2048, 768)
# gemm, thread_k, thread_n, grid, tiles, waves, direct, stripe, first part-2
# (block, n tile), used CTAs, tiles of the stripes with 1/2/3 pieces, last
# block of the leading run of whole blocks, digest. Section 4.5, 50 blocks.
_TABLE = (
    (_W13, 64, 128, 132, 600, 4, 528, 18, (44, 0), 128, (0, 24, 48), 43,
     "6e39ca8d90941fa6"),
    (_W13, 64, 128, 200, 600, 2, 400, 32, (33, 4), 200, (200, 0, 0), 49,
     "462056e3a848666d"),
    (_W13, 64, 128, 246, 600, 2, 492, 16, (41, 0), 216, (0, 108, 0), 40,
     "7e13fcfb2c130d0e"),
    (_W13, 64, 128, 264, 600, 1, 264, 42, (22, 0), 256, (96, 240, 0), 21,
     "16c5a0a397109292"),
    (_W13, 64, 128, 396, 600, 1, 396, 18, (33, 0), 363, (0, 68, 136), 32,
     "d448ed80c6e7520e"),
    (_W13, 64, 128, 528, 600, 0, 0, 38, (0, 0), 506, (126, 474, 0), -1,
     "1b72d37052cd4d21"),
    (_W13, 128, 64, 132, 1200, 8, 1056, 18, (44, 0), 128, (32, 112, 0), 43,
     "fab87a36e0f6dbaa"),
    (_W13, 128, 64, 264, 1200, 4, 1056, 9, (44, 0), 256, (0, 48, 96), 43,
     "ee8f60cd34f884ad"),
    (_W13, 128, 64, 396, 1200, 2, 792, 17, (33, 0), 384, (48, 360, 0), 32,
     "85d3666e4071a034"),
    (_W13, 128, 64, 528, 1200, 1, 528, 21, (22, 0), 512, (192, 480, 0), 21,
     "1db5c40c0ffc2587"),
    (_W2, 64, 128, 132, 800, 5, 660, 14, (41, 4), 120, (40, 100, 0), 40,
     "d9c9a4d2a2ebc484"),
    (_W2, 64, 128, 200, 800, 3, 600, 12, (37, 8), 200, (200, 0, 0), 49,
     "22392afe3bea149e"),
    (_W2, 64, 128, 246, 800, 2, 492, 16, (30, 12), 231, (154, 154, 0), 29,
     "61731b8b124fce37"),
    (_W2, 64, 128, 264, 800, 2, 528, 14, (33, 0), 234, (77, 195, 0), 32,
     "47b77c42295a75fc"),
    (_W2, 64, 128, 396, 800, 1, 396, 14, (24, 12), 347, (115, 289, 0), 23,
     "e7816ea69efab55b"),
    (_W2, 64, 128, 528, 800, 1, 528, 8, (33, 0), 408, (0, 272, 0), 32,
     "393d31d33da7e6c1"),
    (_W2, 128, 64, 132, 1600, 11, 1452, 7, (45, 12), 127, (43, 105, 0), 44,
     "b1a145d688ed0f8c"),
    (_W2, 128, 64, 264, 1600, 5, 1320, 7, (41, 8), 240, (80, 200, 0), 40,
     "92f8c29322cc2b04"),
    (_W2, 128, 64, 396, 1600, 3, 1188, 7, (37, 4), 354, (117, 295, 0), 36,
     "cf6d6064a20261a1"),
    (_W2, 128, 64, 528, 1600, 2, 1056, 7, (33, 0), 467, (155, 389, 0), 32,
     "f11914ea84c26dc9"),
)


def _contract(thread_k, thread_n, grid, group_size=128):
  return packed_gemm.marlin(
      dtype="float16", thread_k=thread_k, thread_n=thread_n, grid=grid,
      group_size=group_size,
  )


def _plan(gemm, thread_k, thread_n, grid, blocks=50):
  return lib.plan(blocks, *gemm, _contract(thread_k, thread_n, grid))


def _simulate(num_blocks, n, k, contract):
  """Hands out one K-tile after another and reads the pieces off the owners.

  Returns [tile][(cta, k_start, k_len, pos)]. No formula of the planner.
  """
  depth = k // contract.thread_k
  total = num_blocks * (n // contract.thread_n)
  owner = np.full((total, depth), -1)
  first = 0  # A wave is taken while more than a third of the grid is left.
  while total - first > contract.grid and (
      3 * (total - first - contract.grid) > contract.grid
  ):
    for cta in range(contract.grid):
      owner[first + cta] = cta
    first += contract.grid
  queue = [(tile, j) for tile in range(first, total) for j in range(depth)]
  share = 0
  while share * contract.grid < len(queue):
    share += 1
  while share * contract.thread_k % contract.group_size and (
      contract.group_size > contract.thread_k
  ):
    share += 1
  for cta in range(contract.grid):
    for tile, j in queue[cta * share : (cta + 1) * share]:
      owner[tile, j] = cta
  found = []
  for row in owner:
    runs = [[row[0], 0, 0]]
    for j, cta in enumerate(row):
      if cta != runs[-1][0]:
        runs.append([cta, j, 0])
      runs[-1][2] += 1
    found.append(tuple(
        (int(cta), start, length, len(runs) - 1 - i)
        for i, (cta, start, length) in enumerate(runs)
    ))
  return tuple(found)


class TableTest(parameterized.TestCase):

  @parameterized.parameters(*_TABLE)
  def test_row(
      self, gemm, thread_k, thread_n, grid, tiles, waves, direct, stripe, first,
      used, counts, last_whole, digest,
  ):
    found = _plan(gemm, thread_k, thread_n, grid)
    self.assertLen(found.tiles, tiles)
    self.assertEqual(
        (found.waves, found.num_direct, found.stripe, found.num_used_ctas),
        (waves, direct, stripe, used),
    )
    self.assertEqual(divmod(direct, found.num_n_tiles), first)
    lengths = [len(pieces) for pieces in found.tiles[direct:]]
    self.assertEqual(tuple(map(lengths.count, (1, 2, 3))), counts)
    self.assertEqual(sum(counts), len(lengths))
    whole = [all(len(p) == 1 for p in found.block(b)) for b in range(50)]
    self.assertEqual((whole + [False]).index(False) - 1, last_whole)
    self.assertEqual(lib.digest(found.tiles), digest)

  @parameterized.parameters(
      (_W13, 64, 128, 396, 33, 0, ((0, 0, 18, 1), (1, 18, 14, 0))),
      (_W13, 64, 128, 396, 33, 1,
       ((1, 0, 4, 2), (2, 4, 18, 1), (3, 22, 10, 0))),
      (_W13, 64, 128, 396, 33, 2,
       ((3, 0, 8, 2), (4, 8, 18, 1), (5, 26, 6, 0))),
      (_W13, 64, 128, 396, 49, 11,
       ((360, 0, 2, 2), (361, 2, 18, 1), (362, 20, 12, 0))),
      (_W13, 64, 128, 264, 22, 3, ((2, 0, 30, 1), (3, 30, 2, 0))),
      (_W13, 128, 64, 528, 22, 1, ((0, 0, 5, 1), (1, 5, 11, 0))),
      (_W13, 128, 64, 528, 49, 23, ((511, 0, 16, 0),)),
      (_W2, 64, 128, 246, 30, 12, ((0, 0, 12, 0),)),
      (_W2, 64, 128, 246, 30, 13, ((0, 0, 4, 1), (1, 4, 8, 0))),
      (_W2, 64, 128, 246, 30, 14, ((1, 0, 8, 1), (2, 8, 4, 0))),
      (_W2, 64, 128, 246, 30, 15, ((2, 0, 12, 0),)),
      (_W2, 64, 128, 246, 49, 15, ((230, 0, 12, 0),)),
  )
  def test_spot_value(
      self, gemm, thread_k, thread_n, grid, block, n_tile, pieces
  ):
    found = _plan(gemm, thread_k, thread_n, grid)
    self.assertEqual(found.block(block)[n_tile], pieces)

  def test_few_blocks_are_cut_into_many_pieces(self):
    three = _plan(_W13, 64, 128, 246, blocks=3)
    self.assertEqual(three.stripe, 6)
    self.assertEqual(
        three.tiles[0],
        tuple((j, 6 * j, (6, 2)[j == 5], 5 - j) for j in range(6)),
    )
    one = _plan(_W13, 64, 128, 396, blocks=1)
    self.assertEqual(
        one.tiles[0], tuple((j, 2 * j, 2, 15 - j) for j in range(16))
    )

  def test_no_block_is_no_work(self):
    self.assertEqual(_plan(_W13, 64, 128, 246, blocks=0).tiles, ())


class StudyTest(absltest.TestCase):

  def test_grid_246_cuts_blocks_41_on_in_two_halves(self):
    found = _plan(_W13, 64, 128, 246)
    self.assertEqual(found.num_direct, 492)
    self.assertEqual(divmod(492, 12), (41, 0))
    for pieces in found.tiles[492:]:
      self.assertEqual(lib.cuts(pieces), ((0, 16), (16, 16)))
    self.assertEqual(found.tiles[491], ((245, 0, 32, 0),))
    self.assertEqual(found.tiles[492], ((0, 0, 16, 1), (1, 16, 16, 0)))
    self.assertEqual([p.cta for p in found.tiles[-1]], [214, 215])

  def test_grid_200_cuts_nothing(self):
    found = _plan(_W13, 64, 128, 200)
    self.assertEqual(divmod(found.num_direct, 12), (33, 4))
    self.assertTrue(all(len(pieces) == 1 for pieces in found.tiles))

  def test_w2_at_grid_246_repeats_every_four_tiles(self):
    found = _plan(_W2, 64, 128, 246)
    period = (((0, 12),), ((0, 4), (4, 8)), ((0, 8), (8, 4)), ((0, 12),))
    for t, pieces in enumerate(found.tiles[492:]):
      self.assertEqual(lib.cuts(pieces), period[t % 4])

  def test_blocks_40_and_41_differ_in_w13_only(self):
    w13, w2 = _plan(_W13, 64, 128, 246), _plan(_W2, 64, 128, 246)
    self.assertEqual(lib.moved_n_tiles(w13, 40, 41), tuple(range(12)))
    self.assertEqual(lib.moved_n_tiles(w2, 40, 41), ())
    self.assertEqual(lib.schedule_classes(w13), (0,) * 41 + (1,) * 9)

  def test_the_group_is_part_of_the_contract(self):
    loose = lib.plan(50, *_W13, _contract(64, 128, 246, group_size=64))
    self.assertEqual(loose.stripe, 15)
    self.assertIn(3, {len(pieces) for pieces in loose.tiles})

  def test_numbers_of_classes(self):
    counts = {
        case: len(set(lib.schedule_classes(_plan(*case))))
        for case in (
            (_W13, 64, 128, 246), (_W13, 64, 128, 200), (_W13, 64, 128, 132),
            (_W13, 64, 128, 396), (_W13, 64, 128, 264), (_W13, 128, 64, 528),
            (_W2, 128, 64, 528),
        )
    }
    self.assertEqual(list(counts.values()), [2, 1, 4, 4, 8, 8, 8])


class SimulationTest(absltest.TestCase):

  def test_closed_form_equals_the_simulation_on_2000_random_shapes(self):
    rng = np.random.default_rng(4)
    seen = set()
    for _ in range(2000):
      thread_k = int(rng.choice((64, 128)))
      thread_n = int(rng.choice((64, 128)))
      group = int(rng.choice((32, 64, 128)))
      contract = _contract(thread_k, thread_n, int(rng.integers(1, 300)), group)
      shape = (
          int(rng.integers(1, 40)), thread_n * int(rng.integers(1, 8)),
          128 * int(rng.integers(1, 12)),
      )
      found = lib.plan(*shape, contract)
      self.assertEqual(found.tiles, _simulate(*shape, contract), shape)
      for pieces in found.tiles:
        self.assertEqual(sum(p.k_len for p in pieces), found.num_k_tiles)
        for p in pieces:
          self.assertEqual(p.k_start * thread_k % group if group > thread_k
                           else 0, 0)
      seen |= {len(pieces) for pieces in found.tiles}
    self.assertContainsSubset({1, 2, 3, 4, 5, 6}, seen)


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
      (1500, 2048, "n=1500 .* thread_n=128"),
      (1536, 2000, "k=2000 .* thread_k=64"),
      (1536, 64, "k=64 .* group_size=128"),
      (0, 2048, "n=0"),
  )
  def test_shape(self, n, k, message):
    with self.assertRaisesRegex(ValueError, message):
      lib.plan(1, n, k, _contract(64, 128, 246))

  def test_unknown_block(self):
    with self.assertRaisesRegex(ValueError, "block 50"):
      lib.moved_n_tiles(_plan(_W13, 64, 128, 246), 50, 0)


class DigestTest(absltest.TestCase):

  def test_a_changed_piece_changes_the_digest(self):
    found = _plan(_W2, 64, 128, 246)
    first = ((found.tiles[0][0]._replace(cta=1),), *found.tiles[1:])
    changed = dataclasses.replace(found, tiles=first)
    self.assertNotEqual(lib.digest(found.tiles), lib.digest(changed.tiles))


if __name__ == "__main__":
  absltest.main()
