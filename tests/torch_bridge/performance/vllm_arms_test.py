"""vLLM's arms over kernels made of the oracle: what they call, what they check.

What only a device shows: capture, the device's clock, the kernels themselves.
"""

import dataclasses
import hashlib

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import torch

from moejax.contracts import refusal
from moejax.numerics.packed import alignment
from moejax.numerics.packed import oracle
from moejax.protocols import packed_fixture
from moejax.protocols.performance import protocol as protocol_lib
from moejax.protocols.performance import run
from tests.torch_bridge.performance import kernels as kernels_lib
from torch_bridge.performance import vllm_arms as lib

# Few experts and blocks of 8: experts fill several blocks.
_PROTOCOL = protocol_lib.Protocol(
    points=(protocol_lib.Point(12, "bfloat16", 8, 64, 64, 3),),
    comparisons=(
        protocol_lib.Comparison("vllm_stable", "vllm_native", 1.05, False),
    ),
    shape=packed_fixture.LayerShape(
        experts=3, embed=128, hidden=64, group_size=64
    ),
    top_k=2,
    requests=2,
    rounds=5,
    confidence=0.9,
)
_POINT = _PROTOCOL.points[0]


class VllmArmsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.layer = packed_fixture.layer(
        _PROTOCOL.seed, _PROTOCOL.shape, _POINT.dtype
    )
    self.work = run.requests(_PROTOCOL, _POINT)
    self.kernels = kernels_lib.Kernels(self.layer, self.work.contract)
    self.arms = lib.VllmArms(self.kernels, "cpu", kernels_lib.Replayed)
    self.arms.load(*self.layer, _POINT.dtype)

  def _digest(self, surface):
    taken = hashlib.sha256()
    for inputs, blocks in zip(self.work.inputs, self.work.plans, strict=True):
      found = oracle.packed_moe_oracle(
          inputs.x, inputs.gates, *self.layer, blocks, self.work.contract
      )
      taken.update(np.ascontiguousarray(getattr(found, surface)).tobytes())
    return taken.hexdigest()

  @parameterized.parameters(
      ("vllm_stable_sort", "final"), ("vllm_layer", "final"),
      ("vllm_w13", "w13"),
  )
  def test_stable_arms_give_the_bits_of_the_stable_plan(self, arm, surface):
    prepared = self.arms.prepare(arm, self.work)
    self.assertEqual(prepared.output, self._digest(surface))
    self.assertEqual(prepared.sample(), 7)
    # Captured, replayed for the check, and once more by this test.
    aligned = 3 * 2 if arm == "vllm_stable_sort" else 0
    self.assertLen(self.kernels.plans, aligned)

  def test_the_native_arm_takes_the_plan_of_the_kernel(self):
    prepared = self.arms.prepare("vllm_native", self.work)
    self.assertLen(self.kernels.plans, 4)
    orders = {p.sorted_routes.tobytes() for p in self.kernels.plans}
    self.assertGreater(len(orders), 2)
    self.assertLen(prepared.output, 64)

  def test_the_one_launch_order_needs_a_device(self):
    if torch.cuda.is_available():
      self.skipTest("There is a device.")
    self.assertNotIn("vllm_stable", self.arms.arms)
    self.assertIn("cannot be compiled", self.arms.refused["vllm_stable"])

  def test_a_plan_that_is_not_stable_is_an_error(self):
    self.arms._ordered = lambda plan: plan
    with self.assertRaisesRegex(refusal.HarnessError, "not the stable one"):
      self.arms.prepare("vllm_stable", self.work)

  def test_a_capture_that_fails_is_unsupported(self):
    def fails(calls):
      raise RuntimeError("operation not permitted when stream is capturing")

    arms = lib.VllmArms(self.kernels, "cpu", fails)
    arms.load(*self.layer, _POINT.dtype)
    with self.assertRaisesRegex(refusal.UnsupportedError, "is capturing"):
      arms.prepare("vllm_layer", self.work)

  def test_a_sort_needs_unused_blocks_without_an_expert(self):
    align = self.kernels.align_on_device

    def named(*arguments):
      plan = align(*arguments)
      experts = plan.experts.masked_fill(plan.experts < 0, 0)
      return dataclasses.replace(plan, experts=experts)

    self.kernels.align_on_device = named
    # The sorted plan is wrong then, and only the kernels could bear it.
    self.kernels.gemm = lambda x, part, plan, *_: torch.zeros(
        (plan.num_routes, 128), dtype=torch.bfloat16
    )
    with self.assertRaisesRegex(refusal.UnsupportedError, r"not in use: \[0"):
      self.arms.prepare("vllm_stable_sort", self.work)

  def test_an_illegal_plan_is_an_error(self):
    wrong = alignment.route_blocks(
        (self.work.inputs[0].expert_ids + 1) % 3, 3, 8
    )
    self.kernels.align_on_device = lambda *_: (
        lib.vllm_marlin.to_device(wrong, 3, "cpu")
    )
    with self.assertRaisesRegex(refusal.HarnessError, "lies in a block"):
      self.arms.prepare("vllm_native", self.work)


if __name__ == "__main__":
  absltest.main()
