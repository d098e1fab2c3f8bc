"""The packed expert layer on a GPU: the tensor core's bits are the oracle's."""

import dataclasses
import itertools

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest

from moejax.contracts import packed_gemm
from moejax.numerics.packed import awq_format
from moejax.protocols import packed_fixture
from tests import bits
from tests.pallas_kernels import packed_moe_suite as suite

pytestmark = pytest.mark.accelerator

_WIDE = packed_fixture.LayerShape(
    experts=8, embed=2048, hidden=768, group_size=128
)


class DeviceTest(suite.PackedMoeSuite):
  interpret = False

  @parameterized.parameters(
      ("float16", 128, 64, 528), ("bfloat16", 64, 128, 396)
  )
  def test_full_widths(self, *fields):
    self.assert_oracle_bits(*suite.case(*fields, shape=_WIDE, tokens=5))

  @parameterized.parameters("float16", "bfloat16")
  def test_subnormal_weights_and_activations(self, dtype):
    request, layer, blocks, contract = suite.case(dtype)
    least = {"float16": -14, "bfloat16": -126}[dtype]
    layer = [
        [
            awq_format.PackedOperand(
                o.codes, o.zeros,
                (o.scales.astype(np.float64) * 2.0 ** (least + 4)).astype(
                    o.scales.dtype
                ),
            )
            for o in part
        ]
        for part in layer
    ]
    request.x[:3] = (request.x[:3].astype(np.float64) * 2.0**least).astype(
        request.x.dtype
    )
    found = self.assert_oracle_bits(request, layer, blocks, contract)
    smallest = np.abs(found.w13[found.w13 != 0].astype(np.float64)).min()
    self.assertLess(smallest, 2.0**least)

  def test_no_launch_changes_a_bit(self):
    inputs = suite.case("float16", 64, 128, 5, shape=_WIDE, tokens=5)
    want = self.assert_oracle_bits(*inputs)
    for warps, stages, tile_n in itertools.product(
        (1, 2, 4, 8), (1, 2, 4), (32, 64, 128)
    ):
      if tile_n < 16 * warps:
        continue  # A warp's tile of the tensor core has 16 of these rows.
      found = self.run_kernels(
          *inputs, num_warps=warps, num_stages=stages, tile_n=tile_n
      )
      with self.subTest(f"{warps=}, {stages=}, {tile_n=}"):
        for a, b in zip(found, want, strict=True):
          bits.assert_same_bits(a, b)

  def test_twenty_runs_have_the_same_bits(self):
    inputs = suite.case(tokens=24, shape=_WIDE)
    want = self.run_kernels(*inputs)
    for _ in range(20):
      found = self.run_kernels(*inputs)
      for a, b in zip(found, want, strict=True):
        bits.assert_same_bits(a, b)

  def test_another_tensor_core_would_be_seen(self):
    request, layer, blocks, contract = suite.case(shape=_WIDE, tokens=5)
    found = self.run_kernels(request, layer, blocks, contract)
    for fields in ({"fraction_bits": 24}, {"final": "nearest_even"}):
      mma = dataclasses.replace(packed_gemm.HOPPER, **fields)
      other = suite.with_gemms(contract, mma=mma)
      want = suite.oracle.packed_moe_oracle(
          request.x, request.gates, *layer, blocks, other
      )
      self.assertGreater(np.count_nonzero(found.w13 != want.w13), 10)


if __name__ == "__main__":
  absltest.main()
