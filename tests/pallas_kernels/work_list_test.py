"""Plans and weights as the kernels read them. Needs no accelerator."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from moejax.contracts import packed_gemm
from moejax.numerics.packed import alignment
from moejax.numerics.packed import awq_format
from moejax.numerics.packed import planner
from pallas_kernels import launch
from pallas_kernels import packed_weight
from pallas_kernels import work_list as lib


def _contract(grid=9, thread_k=64):
  return packed_gemm.marlin(
      dtype="float16", thread_k=thread_k, thread_n=64, grid=grid
  )


def _made(tokens=9, top_k=2, per_row=2, grid=9, expert_map=None):
  rng = np.random.default_rng(tokens)
  ids = np.argsort(rng.random((tokens, 4)), axis=1)[:, :top_k]
  blocks = alignment.route_blocks(ids, 4, 8, expert_map=expert_map)
  contract = _contract(grid)
  work = lib.work_list(blocks, 256, 512, per_row, contract, 32)
  return ids, blocks, work, planner.plan(blocks.num_blocks, 256, 512, contract)


class WorkListTest(parameterized.TestCase):

  @parameterized.parameters(1, 5, 9, 40)
  def test_slots_of_a_tile_are_its_pieces_in_ascending_k(self, grid):
    _, _, work, plan = _made(grid=grid)
    for tile, pieces in enumerate(plan.tiles):
      first, count = work.tiles[tile]
      self.assertEqual(
          work.pieces[first : first + count].tolist(),
          [[*divmod(tile, 4), p.k_start, p.k_len] for p in pieces],
      )
    self.assertEqual(work.pieces[:, 3].sum(), len(plan.tiles) * 8)
    self.assertFalse(work.tiles[len(plan.tiles) :].any())

  def test_a_route_is_where_its_place_says_and_reads_its_row(self):
    ids, blocks, work, _ = _made()
    rows = work.block_rows.shape[1]
    for route, place in enumerate(work.places[:18]):
      block, row = divmod(int(place), rows)
      self.assertEqual(blocks.sorted_routes[block, row], route)
      self.assertEqual(work.block_experts[block], ids.reshape(-1)[route])
      self.assertEqual(work.block_rows[block, row], route // 2)
    self.assertTrue((work.places[18:] == -1).all())
    self.assertLen(set(work.places[:18].tolist()), 18)

  def test_a_route_in_no_block_has_no_place(self):
    expert_map = np.array([0, 1, -1, 2])
    ids, _, work, _ = _made(expert_map=expert_map)
    np.testing.assert_array_equal(
        work.places[:18] < 0, ids.reshape(-1) == 2
    )

  def test_a_padding_row_reads_a_row_that_exists(self):
    _, _, work, _ = _made(tokens=3, per_row=1)
    self.assertGreaterEqual(work.block_rows.min(), 0)
    self.assertLess(work.block_rows.max(), 6)

  def test_few_sizes(self):
    self.assertEqual(
        [launch.padded(n, 16) for n in (0, 16, 17, 64, 65)],
        [16, 16, 64, 64, 256],
    )


class PackedWeightTest(parameterized.TestCase):

  def test_a_byte_holds_the_same_place_of_two_streams(self):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (128, 8), np.uint8)
    operand = awq_format.PackedOperand(
        codes, rng.integers(0, 16, (4, 8), np.uint8),
        rng.random((4, 8)).astype(np.float16),
    )
    packed, zeros, scales = packed_weight.pack(operand, "float16")
    self.assertEqual(packed.shape, (2, 32, 8))
    for tile, j, column in np.ndindex(packed.shape):
      low = codes[64 * tile + j, column]
      high = codes[64 * tile + 32 + j, column]
      self.assertEqual(packed[tile, j, column], low + 16 * high)
    np.testing.assert_array_equal(zeros, operand.zeros)
    np.testing.assert_array_equal(scales.view(np.float16), operand.scales)

  def test_scales_are_rounded_to_the_dtype_of_the_computation(self):
    operand = awq_format.PackedOperand(
        np.zeros((64, 1), np.uint8), np.zeros((2, 1), np.uint8),
        np.float16([[1.001], [0.5]]),
    )
    *_, scales = packed_weight.pack(operand, "bfloat16")
    self.assertEqual(scales.tolist(), [[0x3F80], [0x3F00]])

  def test_sizes_follow_from_the_arrays(self):
    operand = awq_format.PackedOperand(
        np.zeros((128, 8), np.uint8), np.zeros((4, 8), np.uint8),
        np.zeros((4, 8), np.float16),
    )
    weight = packed_weight.from_operands([operand] * 3, "float16")
    self.assertEqual((weight.k, weight.n, weight.group_size), (128, 8, 32))
    with self.assertRaisesRegex(ValueError, "not one"):
      packed_weight.stack([
          packed_weight.pack(operand, "float16"),
          packed_weight.pack(
              awq_format.PackedOperand(
                  operand.codes[:64], operand.zeros[:2], operand.scales[:2]
              ),
              "float16",
          ),
      ])


if __name__ == "__main__":
  absltest.main()
