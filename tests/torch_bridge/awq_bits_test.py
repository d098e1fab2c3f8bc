"""The proof's own machinery: fixtures, counting, refusals. Needs no device."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from moejax.contracts import refusal
from moejax.numerics.packed import alignment
from moejax.numerics.packed import oracle
from moejax.protocols import packed_fixture
from tests import bits
from torch_bridge import awq_bits as lib
from torch_bridge import vllm_marlin

_SHAPE = packed_fixture.LayerShape(
    experts=6, embed=128, hidden=128, group_size=128
)
_REQUEST = lib.Request(
    fixtures=8, max_tokens=5, top_k=2, shape=_SHAPE, num_sms=4
)


def _case(number=0):
  fixture = list(lib.fixtures(_REQUEST, "float16", True))[number]
  inputs = packed_fixture.request(
      fixture.seed, fixture.tokens, 2, _SHAPE, "float16"
  )
  blocks = alignment.route_blocks(inputs.expert_ids, 6, 8)
  layer = packed_fixture.layer(1, _SHAPE, "float16")
  surfaces = oracle.packed_moe_oracle(
      inputs.x, inputs.gates, *layer, blocks, fixture.contract
  )
  return dataclasses.replace(fixture, blocks=blocks), surfaces


class FixtureTest(absltest.TestCase):

  def test_configurations_and_alignments_take_turns(self):
    made = list(lib.fixtures(_REQUEST, "bfloat16", True))
    kinds = [
        (f.contract.w13.thread_k, f.contract.w13.grid, f.alignment)
        for f in made
    ]
    self.assertEqual(kinds[:4], kinds[4:])
    self.assertEqual(
        kinds[:4],
        [(128, 16, "stable"), (128, 16, "native"), (64, 12, "stable"),
         (64, 12, "native")],
    )
    alone = list(lib.fixtures(_REQUEST, "bfloat16", False))
    self.assertEqual(
        [f.alignment for f in alone[:2]], ["stable", "shuffled"]
    )
    self.assertTrue(all(1 <= f.tokens <= 5 for f in made))
    self.assertLen({f.seed for f in made}, 8)

  def test_plans_are_stable_shuffled_or_native(self):
    request = dataclasses.replace(
        _REQUEST, fixtures=2, min_tokens=40, max_tokens=40
    )
    stable, shuffled = (
        lib.planned(request, fixture, None).blocks
        for fixture in lib.fixtures(request, "float16", False)
    )
    ids = packed_fixture.request(
        request.seed + 1, 40, 2, _SHAPE, "float16"
    ).expert_ids
    self.assertEqual(
        stable.identity(),
        alignment.route_blocks(ids, 6, stable.block_rows).identity(),
    )
    self.assertGreater(alignment.num_memberships(shuffled), 1)
    again = lib.planned(
        request, list(lib.fixtures(request, "float16", False))[1], None
    ).blocks
    self.assertEqual(again.identity(), shuffled.identity())
    in_order = alignment.route_blocks(
        packed_fixture.request(
            request.seed + 2, 40, 2, _SHAPE, "float16"
        ).expert_ids, 6, shuffled.block_rows,
    )
    self.assertNotEqual(in_order.identity(), shuffled.identity())
    native = list(lib.fixtures(request, "float16", True))[1]
    made = lib.planned(request, native, lambda *_: stable)
    self.assertIs(made.blocks, stable)

  def test_a_fixture_is_a_function_of_its_seed(self):
    for seed, same in ((7, True), (8, False)):
      one = packed_fixture.request(7, 4, 2, _SHAPE, "bfloat16")
      two = packed_fixture.request(seed, 4, 2, _SHAPE, "bfloat16")
      self.assertEqual(one.x.tobytes() == two.x.tobytes(), same)
    a, b = (packed_fixture.layer(3, _SHAPE, "float16") for _ in range(2))
    bits.assert_same_bits(a[1][5].codes, b[1][5].codes)
    self.assertTrue((a[0][0].codes != a[0][1].codes).any())

  def test_a_tokens_experts_are_distinct_and_some_fill_several_blocks(self):
    shape = packed_fixture.LayerShape()
    made = packed_fixture.request(1, 64, 8, shape, "float16")
    self.assertTrue((np.diff(np.sort(made.expert_ids), axis=1) > 0).all())
    self.assertGreater(np.bincount(made.expert_ids.reshape(-1)).max(), 16)


def _found(surfaces, **others):
  """All three backends; those not named agree with the oracle."""
  return {"oracle": surfaces, "pallas": surfaces, "vllm": surfaces} | others


class CountsTest(parameterized.TestCase):

  def test_equal_surfaces(self):
    fixture, surfaces = _case()
    counts = lib.Counts()
    counts.add(fixture, _found(surfaces))
    found = counts.document()
    self.assertEqual(
        found["mismatches"],
        {"oracle_pallas": 0, "oracle_vllm": 0, "pallas_vllm": 0},
    )
    self.assertEqual(found["elements"], sum(s.size for s in surfaces))
    self.assertEqual(found["routes"], 2 * fixture.tokens)
    self.assertIsNone(found["first_difference"])
    self.assertFalse(lib.any_differ(found))

  @parameterized.product(
      name=oracle.Surfaces._fields, backend=("pallas", "vllm")
  )
  def test_one_flipped_bit_is_seen_and_named(self, name, backend):
    fixture, surfaces = _case()
    changed = getattr(surfaces, name).copy()
    changed.view(np.uint16)[0, 5] ^= 0x8000
    counts = lib.Counts()
    changed = surfaces._replace(**{name: changed})
    counts.add(fixture, _found(surfaces, **{backend: changed}))
    found = counts.document()
    want = {
        pair: int(backend in pair)
        for pair in ("oracle_pallas", "oracle_vllm", "pallas_vllm")
    }
    self.assertEqual(found["mismatches"], want)
    self.assertEqual(found["surfaces"][name]["mismatches"], want)
    first = found["first_difference"]
    self.assertEqual((first["surface"], first["row"], first["column"]),
                     (name, 0, 5))
    self.assertIn(backend, first)
    (kind,) = found["kinds"].values()
    self.assertEqual({pair: kind[pair] for pair in want}, want)
    self.assertTrue(lib.any_differ(found))

  def test_an_absent_backend_is_unsupported_and_no_difference(self):
    fixture, surfaces = _case()
    counts = lib.Counts()
    counts.add(fixture, {"oracle": surfaces, "pallas": surfaces})
    found = counts.document()
    want = {
        "oracle_pallas": 0, "oracle_vllm": "unsupported",
        "pallas_vllm": "unsupported",
    }
    self.assertEqual(found["mismatches"], want)
    self.assertEqual(found["surfaces"]["final"]["mismatches"], want)
    self.assertFalse(lib.any_differ(found))

  def test_a_sign_of_zero_is_a_bit(self):
    fixture, surfaces = _case()
    zero = np.zeros_like(surfaces.final)
    counts = lib.Counts()
    counts.add(
        fixture,
        _found(surfaces._replace(final=zero))
        | {"vllm": surfaces._replace(final=-zero)},
    )
    self.assertEqual(counts.document()["mismatches"]["oracle_vllm"], zero.size)

  def test_another_shape_is_no_mismatch_but_an_error(self):
    fixture, surfaces = _case()
    with self.assertRaisesRegex(ValueError, "final: oracle .* against vllm"):
      lib.Counts().add(fixture, _found(
          surfaces, vllm=surfaces._replace(final=surfaces.final[:, :-1])
      ))


class RefusalTest(absltest.TestCase):

  def test_request(self):
    with self.assertRaisesRegex(refusal.HarnessError, "max_tokens=1"):
      lib.Request("a", "b", min_tokens=2, max_tokens=1)
    self.assertEqual(
        lib.Request("/x/a.so", "/x/b.so").document()["moe_extension"], "a.so"
    )

  def test_missing_file(self):
    with self.assertRaisesRegex(refusal.HarnessError, "moe.so"):
      vllm_marlin.Kernels("moe.so")

  def test_no_device(self):
    if vllm_marlin.torch.cuda.is_available():
      self.skipTest("There is a CUDA device.")
    with self.assertRaisesRegex(refusal.UnsupportedError, "CUDA"):
      vllm_marlin.Kernels(__file__)


if __name__ == "__main__":
  absltest.main()
