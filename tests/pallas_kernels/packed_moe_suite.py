"""What every run of the packed expert layer owes its contract.

One suite, two machines: `packed_moe_test.py` runs it in the interpreter, where
the tensor core's step is computed exactly, and `packed_moe_device_test.py` on a
GPU, where it is the tensor core's. The interpreter shows plan, dequantization,
streams, partials, orders and roundings; only the device shows the step. XLA on
a CPU flushes subnormals, so operands that reach them are the device's alone.
"""

import dataclasses

from absl.testing import parameterized
import jax
import numpy as np

from moejax.contracts import packed_moe as contracts
from moejax.numerics.packed import alignment
from moejax.numerics.packed import awq_format
from moejax.numerics.packed import oracle
from moejax.protocols import packed_fixture
from pallas_kernels import launch
from pallas_kernels import packed_moe as lib
from pallas_kernels import packed_weight
from tests import bits

SHAPE = packed_fixture.LayerShape(
    experts=4, embed=256, hidden=128, group_size=128
)
CASES = (  # dtype, thread_k, thread_n, grid, group_size, block_rows
    ("float16", 128, 64, 9, 128, 8),
    ("bfloat16", 128, 64, 14, 64, 8),
    ("float16", 64, 128, 7, 32, 16),
    ("bfloat16", 64, 128, 3, 128, 8),
    ("float16", 64, 64, 40, 64, 48),
    ("bfloat16", 128, 128, 1, 32, 64),
)


def case(
    dtype="float16", thread_k=128, thread_n=64, grid=9, group_size=128,
    block_rows=8, tokens=7, top_k=2, shape=SHAPE, seed=2,
):
  """Returns (request, operands of both projections, plan, contract)."""
  shape = dataclasses.replace(shape, group_size=group_size)
  layer = packed_fixture.layer(1, shape, dtype)
  request = packed_fixture.request(seed, tokens, top_k, shape, dtype)
  blocks = alignment.route_blocks(request.expert_ids, shape.experts, block_rows)
  contract = contracts.marlin(
      dtype=dtype, thread_k=thread_k, thread_n=thread_n, grid=grid,
      group_size=group_size,
  )
  return request, layer, blocks, contract


def with_gemms(contract, **fields):
  """The contract with fields of both GEMMs replaced."""
  return dataclasses.replace(
      contract,
      w13=dataclasses.replace(contract.w13, **fields),
      w2=dataclasses.replace(contract.w2, **fields),
  )


class PackedMoeSuite(parameterized.TestCase):
  """Subclasses say where it runs. Not collected itself."""

  interpret: bool
  device: jax.Device | None = None

  def run_kernels(
      self, request, layer, blocks, contract, x=None, **launch_fields
  ):
    """The kernels' surfaces as host arrays."""
    config = launch.LaunchConfig(interpret=self.interpret, **launch_fields)
    with jax.default_device(self.device):
      weights = [
          packed_weight.from_operands(part, contract.dtype) for part in layer
      ]
      found = lib.run(
          request.x if x is None else x, request.gates, *weights, blocks,
          contract, config,
      )
      return oracle.Surfaces(*map(np.asarray, found))

  def assert_oracle_bits(self, request, layer, blocks, contract, **fields):
    """Runs both and compares every surface; returns the kernels'."""
    found = self.run_kernels(request, layer, blocks, contract, **fields)
    want = oracle.packed_moe_oracle(
        request.x, request.gates, *layer, blocks, contract
    )
    for surface in want._fields:
      with self.subTest(surface):
        bits.assert_same_bits(getattr(found, surface), getattr(want, surface))
    return found

  @parameterized.parameters(*CASES)
  def test_surfaces_are_the_oracles(self, *fields):
    self.assert_oracle_bits(*case(*fields))

  def test_pieces_are_added_in_either_declared_order(self):
    # Tile 0 of W13 has K-tiles 0 to 2, 3 to 5, 6 and 7; its pieces are
    # 15 * 2**10, -15 * 2**10 and 15 * 2**-16, the last lost beside a large one.
    shape = dataclasses.replace(SHAPE, embed=512)
    request, layer, blocks, contract = case(
        thread_k=64, grid=12, group_size=32, tokens=1, top_k=1, shape=shape
    )
    w13 = [
        awq_format.PackedOperand(
            np.full((512, 256), 15, np.uint8), np.zeros((16, 256), np.uint8),
            np.ones((16, 256), np.float16),
        )
    ] * shape.experts
    request.x[:] = 0
    request.x[0, [0, 200, 511]] = 2.0**10, -(2.0**10), 2.0**-16
    for order, value in (
        ("highest_k_first", 0), ("lowest_k_first", 15 * 2.0**-16)
    ):
      found = self.assert_oracle_bits(
          request, (w13, layer[1]), blocks,
          with_gemms(contract, slice_merge=order),
      )
      bits.assert_same_bits(
          found.w13[0, :64], np.full(64, value, np.float16)
      )

  def test_streams_are_added_as_the_contract_nests_them(self):
    *inputs, contract = case()
    other = with_gemms(contract, stream_merge=(((0, 1), 2), 3))
    found = [
        self.assert_oracle_bits(*inputs, c).w13 for c in (contract, other)
    ]
    self.assertFalse(np.array_equal(*found))

  def test_the_sign_of_a_zero_up_value_follows_the_contract(self):
    # W13 is -2**-27 everywhere, which rounds to -0; silu(-0) is -0.
    request, layer, blocks, contract = case(tokens=3)
    w13 = [
        awq_format.PackedOperand(
            np.ones((256, 256), np.uint8), np.zeros((2, 256), np.uint8),
            np.full((2, 256), 2.0**-3, np.float16),
        )
    ] * SHAPE.experts
    request.x[:] = 0
    request.x[:, 9] = -(2.0**-24)
    for up_zero, word in (("added", 0x8000), ("as_is", 0)):
      found = self.assert_oracle_bits(
          request, (w13, layer[1]), blocks,
          dataclasses.replace(contract, up_zero=up_zero),
      )
      self.assertEqual(set(found.w13.view(np.uint16).flat), {0x8000})
      self.assertEqual(set(found.activation.view(np.uint16).flat), {word})

  def test_routes_in_no_block_are_plus_zero(self):
    request, layer, _, contract = case(tokens=9)
    blocks = alignment.route_blocks(
        request.expert_ids, 4, 8, expert_map=np.array([0, -1, 1, 2])
    )
    found = self.assert_oracle_bits(request, layer, blocks, contract)
    dropped = request.expert_ids.reshape(-1) == 1
    self.assertGreater(dropped.sum(), 0)
    self.assertFalse(found.routed_w2[dropped].view(np.uint16).any())

  def test_other_tokens_change_nothing_under_a_fixed_plan(self):
    request, layer, blocks, contract = case(tokens=9)
    batch = self.run_kernels(request, layer, blocks, contract)
    x = np.full_like(request.x, np.nan)
    x[4] = request.x[4]
    alone = self.run_kernels(request, layer, blocks, contract, x=x)
    for name in ("w13", "activation", "routed_w2"):
      bits.assert_same_bits(
          getattr(alone, name)[8:10], getattr(batch, name)[8:10]
      )
    bits.assert_same_bits(alone.final[4], batch.final[4])
    self.assertTrue(np.isnan(alone.final[3].astype(np.float32)).all())

  def test_a_token_alone_has_its_bits_where_no_tile_is_cut(self):
    request, layer, blocks, contract = case(tokens=9, grid=1)
    batch = self.run_kernels(request, layer, blocks, contract)
    one = dataclasses.replace(
        request, x=request.x[4:5], gates=request.gates[4:5],
        expert_ids=request.expert_ids[4:5],
    )
    alone_plan = alignment.route_blocks(one.expert_ids, 4, 8)
    alone = self.run_kernels(one, layer, alone_plan, contract)
    bits.assert_same_bits(alone.routed_w2, batch.routed_w2[8:10])
    bits.assert_same_bits(alone.final[0], batch.final[4])

  @parameterized.parameters("float16", "bfloat16")
  def test_nan_and_infinity(self, dtype):
    request, layer, blocks, contract = case(dtype)
    request.x[1, 5], request.x[2, 100], request.x[3, 7] = (
        np.inf, np.nan, -np.inf
    )
    found = self.assert_oracle_bits(request, layer, blocks, contract)
    words = found.w13.view(np.uint16)[4:6]
    self.assertTrue((words == 0x7FFF).all())

  def test_no_expert_has_a_route(self):
    request, layer, _, contract = case(tokens=2)
    blocks = alignment.route_blocks(
        request.expert_ids, 4, 8, expert_map=np.full(4, -1)
    )
    found = self.assert_oracle_bits(request, layer, blocks, contract)
    self.assertFalse(found.w13.view(np.uint16).any())
