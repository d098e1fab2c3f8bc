"""The packed layer: a literal element, the plan's effects, refusals."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import mpmath
import numpy as np

from moejax.contracts import packed_moe
from moejax.numerics.packed import activation
from moejax.numerics.packed import alignment
from moejax.numerics.packed import awq_format
from moejax.numerics.packed import gemm
from moejax.numerics.packed import mma16
from moejax.numerics.packed import oracle as lib
from moejax.numerics.packed import planner
from moejax.protocols import packed_fixture
from tests import bits

_SHAPE = packed_fixture.LayerShape(
    experts=6, embed=512, hidden=128, group_size=128
)


def _contract(dtype="float16", thread_k=64, thread_n=64, grid=10):
  return packed_moe.marlin(
      dtype=dtype, thread_k=thread_k, thread_n=thread_n, grid=grid
  )


def _fixture(dtype="float16", tokens=7, top_k=3):
  layer = packed_fixture.layer(1, _SHAPE, dtype)
  return layer, packed_fixture.request(2, tokens, top_k, _SHAPE, dtype)


def _run(contract, blocks, dtype="float16", tokens=7):
  layer, request = _fixture(dtype, tokens)
  return lib.packed_moe_oracle(
      request.x, request.gates, *layer, blocks, contract
  )


def _element(x, weight, pieces, column, contract):
  """One float32 accumulator by the loops of the specification."""
  def merge(c):
    return c[0] + c[1] if len(c) == 2 else c[0] + (c[1] + (c[3] + c[2]))

  partials = []
  for piece in pieces:
    streams = []
    for w in range(contract.thread_k // 32):
      c = np.zeros((1, 1), np.float32)
      for t in range(piece.k_start, piece.k_start + piece.k_len):
        for s in (0, 1):
          k0 = t * contract.thread_k + 32 * w + 16 * s
          c = mma16.mma16(
              c, x[None, k0 : k0 + 16], weight[k0 : k0 + 16, column, None],
              contract.mma,
          )
      streams.append(c[0, 0])
    partials.append(merge(streams))
  acc = partials[-1]
  for partial in partials[-2::-1]:
    acc = partial + acc
  return acc


class ElementTest(parameterized.TestCase):

  @parameterized.parameters(
      ("float16", 64, 128, 7), ("bfloat16", 64, 64, 40),
      ("float16", 128, 64, 9), ("bfloat16", 128, 128, 50),
  )
  def test_surfaces_are_the_loops_of_the_specification(
      self, dtype, thread_k, thread_n, grid
  ):
    contract = _contract(dtype, thread_k, thread_n, grid)
    (w13, w2), request = _fixture(dtype)
    ids = request.expert_ids
    blocks = alignment.route_blocks(ids, _SHAPE.experts, 8)
    found = _run(contract, blocks, dtype)
    half = np.dtype(getattr(ml_dtypes, dtype, dtype))
    seen = set()
    rng = np.random.default_rng(grid)
    for surface, part, operands, rows in (
        (found.w13, contract.w13, w13, np.repeat(request.x, 3, axis=0)),
        (found.routed_w2, contract.w2, w2, found.activation),
    ):
      k, n = operands[0].codes.shape
      work = planner.plan(blocks.num_blocks, n, k, part)
      for _ in range(25):
        block = int(rng.integers(blocks.num_blocks))
        route = int(rng.choice(blocks.routes(block)))
        column = int(rng.integers(n))
        weight = awq_format.dequantize(operands[ids.reshape(-1)[route]], dtype)
        pieces = work.block(block)[column // thread_n]
        seen.add(len(pieces))
        want = _element(rows[route], weight, pieces, column, part).astype(half)
        if part.gate_site == "after_rounding":
          gate = request.gates.reshape(-1)[route].astype(half)
          want = (want.astype(np.float32) * gate.astype(np.float32)).astype(
              half
          )
        bits.assert_same_bits(surface[route, column], want)
    self.assertGreater(max(seen), 1)
    total = np.zeros((7, _SHAPE.embed), np.float32)
    for slot in range(3):
      total = total + found.routed_w2[slot::3].astype(np.float32)
    bits.assert_same_bits(found.final, total.astype(half))


class PlanTest(absltest.TestCase):
  """Six experts, one of them owning blocks of different classes."""

  def setUp(self):
    super().setUp()
    self.contract = _contract(thread_n=128, grid=9)
    ids = np.zeros((20, 1), np.int64)
    self.ids = ids
    self.plan = alignment.route_blocks(ids, 1, 8)
    rng = np.random.default_rng(8)
    self.x = rng.standard_normal((20, 2048)).astype(np.float16)
    self.operand = awq_format.PackedOperand(
        rng.integers(0, 16, (2048, 384), np.uint8),
        rng.integers(0, 16, (16, 384), np.uint8),
        rng.uniform(0.002, 0.02, (16, 384)).astype(np.float16),
    )

  def _gemm(self, order=None, grid=5):
    orders = None if order is None else {0: order}
    blocks = alignment.route_blocks(self.ids, 1, 8, orders=orders)
    contract = dataclasses.replace(self.contract.w13, grid=grid)
    return gemm.packed_gemm_oracle(self.x, [self.operand], blocks, contract)

  def test_inside_a_block_the_order_changes_nothing(self):
    order = np.r_[np.arange(8)[::-1], np.arange(8, 20)]
    bits.assert_same_bits(self._gemm(order), self._gemm())

  def test_a_swap_changes_only_its_routes_in_the_predicted_tiles(self):
    contract = dataclasses.replace(self.contract.w13, grid=5)
    work = planner.plan(3, 384, 2048, contract)
    tiles = planner.moved_n_tiles(work, 0, 1)
    self.assertNotEmpty(tiles)
    order = np.arange(20)
    order[[3, 9]] = order[[9, 3]]
    rows, columns = np.nonzero(self._gemm(order) != self._gemm())
    self.assertNotEmpty(rows)
    self.assertContainsSubset(set(rows.tolist()), {3, 9})
    self.assertContainsSubset(set((columns // 128).tolist()), set(tiles))

  def test_one_piece_a_tile_makes_membership_irrelevant(self):
    order = np.random.default_rng(1).permutation(20)
    work = planner.plan(
        3, 384, 2048, dataclasses.replace(self.contract.w13, grid=9)
    )
    self.assertTrue(all(len(pieces) == 1 for pieces in work.tiles))
    bits.assert_same_bits(self._gemm(order, grid=9), self._gemm(grid=9))
    self.assertTrue((self._gemm(grid=5) != self._gemm(grid=9)).any())

  def test_merge_orders_are_observable(self):
    contract = dataclasses.replace(
        _contract(thread_k=128, thread_n=64, grid=70).w13
    )
    one = alignment.route_blocks(np.zeros((4, 1), int), 1, 8)

    def run(**change):
      return gemm.packed_gemm_oracle(
          self.x[:4], [self.operand], one,
          dataclasses.replace(contract, **change),
      )

    plain = run()
    self.assertTrue((run(slice_merge="lowest_k_first") != plain).any())
    self.assertTrue((run(stream_merge=((0, 1), (2, 3))) != plain).any())

  def test_a_token_alone_has_the_bits_it_has_in_a_block_of_its_class(self):
    contract = dataclasses.replace(self.contract.w13, grid=9)
    alone = gemm.packed_gemm_oracle(
        self.x[5:6], [self.operand],
        alignment.route_blocks(np.zeros((1, 1), int), 1, 8),
        dataclasses.replace(contract, grid=3),
    )
    bits.assert_same_bits(alone[0], self._gemm(grid=9)[5])

  def test_routes_in_no_block_are_zero(self):
    blocks = alignment.route_blocks(
        np.array([[0], [1]]), 2, 8, expert_map=np.array([-1, 0])
    )
    found = gemm.packed_gemm_oracle(
        self.x[:2], [self.operand], blocks, self.contract.w13
    )
    bits.assert_same_bits(found[0], np.zeros(384, np.float16))
    self.assertTrue(found[1].any())


class ActivationTest(parameterized.TestCase):

  @parameterized.parameters("float16", "bfloat16")
  def test_the_table_is_the_measured_one(self, dtype):
    table = activation.silu_table(dtype)
    self.assertEqual(
        activation.table_digest(table), packed_moe.SILU_TABLES[dtype]
    )

  @parameterized.parameters("float16", "bfloat16")
  def test_no_exponential_lies_near_a_boundary(self, dtype):
    # So that every float64 exponential within 2 ulp gives the same table.
    half = np.dtype(getattr(ml_dtypes, dtype, dtype))
    g = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(half)
    with np.errstate(all="ignore"):
      g = g.astype(np.float64)
      e = np.exp(-g)
    e = e[np.isfinite(e) & (e > 0) & (g != 0)]
    low, high = np.nextafter(e, 0), np.nextafter(e, np.inf)
    for _ in range(2):
      low, high = np.nextafter(low, 0), np.nextafter(high, np.inf)
    with np.errstate(over="ignore", under="ignore"):
      same = low.astype(np.float32) == high.astype(np.float32)
    # Arguments so small that exp is 1 to within float64 do cross at 1.
    self.assertTrue((np.abs(e[~same] - 1) < 2.0**-24 * 1.01).all())
    mpmath.mp.dps = 40
    for value in g[np.isfinite(g) & (abs(g) < 80)][::997]:
      exact = float(mpmath.exp(-mpmath.mpf(float(value))))
      self.assertLessEqual(abs(exact - np.exp(-value)), 2 * np.spacing(exact))

  def test_minus_zero_of_up_becomes_plus_zero(self):
    s1 = np.array([[2.0, -0.0]], np.float16)
    contract = _contract()
    bits.assert_same_bits(
        activation.silu_and_mul(s1, contract), np.zeros((1, 1), np.float16)
    )
    kept = dataclasses.replace(contract, up_zero="as_is")
    self.assertTrue(np.signbit(activation.silu_and_mul(s1, kept))[0, 0])

  def test_nan_has_the_bits_of_the_kernel(self):
    s1 = np.array([[-np.inf, 1.0]], np.float16)
    found = activation.silu_and_mul(s1, _contract())
    self.assertEqual(int(found.view(np.uint16)[0, 0]), 0x7FFF)

  def test_refusals(self):
    contract = _contract()
    with self.assertRaisesRegex(ValueError, r"float16\(1, 3\)"):
      activation.silu_and_mul(np.zeros((1, 3), np.float16), contract)
    other = dataclasses.replace(contract, silu_table="00")
    with self.assertRaisesRegex(NotImplementedError, "silu_table=00"):
      activation.silu_and_mul(np.zeros((1, 2), np.float16), other)


class CombineTest(absltest.TestCase):

  def test_slots_ascend_in_float32(self):
    terms = np.array([[32768], [2.0**-9], [-32768]], np.float16)
    found = lib.combine_slots(terms, 3, _contract())
    bits.assert_same_bits(found, np.zeros((1, 1), np.float16))
    swapped = lib.combine_slots(terms[::-1], 3, _contract())
    bits.assert_same_bits(swapped, np.full((1, 1), 2.0**-9, np.float16))


class OverflowTest(absltest.TestCase):

  def test_the_first_element_is_named(self):
    blocks = alignment.route_blocks(_fixture()[1].expert_ids, 6, 8)
    found = _run(_contract(), blocks)
    self.assertIsNone(lib.first_non_finite(found))
    layer, request = _fixture()
    x = request.x.copy()
    x[4] = 60000
    found = lib.packed_moe_oracle(
        x, request.gates, *layer, blocks, _contract()
    )
    surface, row, _ = lib.first_non_finite(found)
    self.assertEqual((surface, row // 3), ("w13", 4))


class RefusalTest(absltest.TestCase):

  def test_what_does_not_fit(self):
    (w13, _), request = _fixture()
    blocks = alignment.route_blocks(request.expert_ids, 6, 8)
    contract = _contract()
    gates = request.gates.reshape(-1)
    for message, x, operands, part, gate in (
        (r"float32\(7, 512\)", request.x.astype(np.float32), w13,
         contract.w13, None),
        (r"\(7, 256\) does not fit", request.x[:, :256], w13, contract.w13,
         None),
        ("not one", request.x, [w13[0], _fixture()[0][1][0]], contract.w13,
         None),
        ("group_size=64", request.x, w13,
         dataclasses.replace(contract.w13, group_size=64), None),
        ("21 routes are no multiple of 6", request.x[:6], w13, contract.w13,
         None),
        ("expert 5 of 2", request.x, w13[:2], contract.w13, None),
        ("'none' with gates float32", request.x, w13, contract.w13, gates),
        ("with gates None", request.x, w13, contract.w2, None),
        (r"float64\(21,\)", request.x, w13, contract.w2,
         gates.astype(np.float64)),
    ):
      with self.assertRaisesRegex(ValueError, message):
        gemm.packed_gemm_oracle(x, operands, blocks, part, gate)

  def test_a_plan_of_another_request(self):
    layer, request = _fixture()
    blocks = alignment.route_blocks(request.expert_ids[:6], 6, 8)
    with self.assertRaisesRegex(ValueError, "a plan of 18 routes"):
      lib.packed_moe_oracle(
          request.x, request.gates, *layer, blocks, _contract()
      )


if __name__ == "__main__":
  absltest.main()
