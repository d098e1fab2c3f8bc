"""Clauses are computed from contracts and from what a run's plan cuts."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from moejax.contracts import named_combines
from moejax.contracts import packed_moe
from moejax.protocols import capture as capture_lib
from moejax.protocols.packed import clause as lib
from tests.modules import packed_decoders

_WORK = lib.Work({"w13": (128, 128), "w2": (128, 64)}, (5, 2))


def _gemms(contract, **fields):
  experts = dataclasses.replace(
      contract.experts,
      w13=dataclasses.replace(contract.experts.w13, **fields),
      w2=dataclasses.replace(contract.experts.w2, **fields),
  )
  return dataclasses.replace(contract, experts=experts)


def _differing(ours, reference, work=_WORK):
  return lib.differing(ours, reference, work)


class DifferingTest(parameterized.TestCase):

  @parameterized.parameters("portable", "native", "sequential")
  def test_dequantised_experts_have_the_clauses_of_wide_ones(self, arithmetic):
    self.assertEmpty(_differing(
        packed_decoders.dequantized(arithmetic),
        packed_decoders.plain(arithmetic),
    ))

  def test_marlin_against_wide_experts(self):
    found = _differing(
        packed_decoders.marlin("portable"), packed_decoders.plain("portable")
    )
    self.assertEqual(
        set(found),
        {
            "w13.k_streams", "w13.k_slices", "w13.k_step", "w2.k_streams",
            "w2.k_step", "activation.silu_table", "activation.up_zero",
            "router.gate_dtype", "combine.round_before_shared", "combine.nan",
        },
    )
    self.assertEqual(found["w13.k_streams"], ("2, added (c0 + c1)", "1"))
    # 14 tiles of two K-tiles on a grid of 7.
    self.assertRegex(found["w13.k_slices"][0], "up to 2 .*highest_k_first")
    self.assertEqual(found["router.gate_dtype"], ("float32", "bfloat16"))

  def test_a_grid_that_cuts_nothing_is_no_difference(self):
    found = _differing(
        packed_decoders.marlin("portable", grid=1),
        packed_decoders.plain("portable"),
    )
    self.assertNotIn("w13.k_slices", found)
    self.assertIn("w13.k_streams", found)

  def test_native_sums_have_no_declared_order(self):
    found = _differing(
        packed_decoders.marlin("native"), packed_decoders.plain("native")
    )
    self.assertEqual(found["w2.k_slices"], ("1", "undeclared"))
    self.assertEqual(found["activation.silu_table"][1], "undeclared")

  @parameterized.parameters(
      ({"slice_merge": "lowest_k_first"}, {"w13.k_slices"}),
      ({"stream_merge": (1, 0)}, {"w13.k_streams", "w2.k_streams"}),
      ({"grid": 1}, {"w13.k_slices"}),
  )
  def test_one_field_of_two_marlins(self, fields, names):
    ours = packed_decoders.marlin("portable")
    self.assertEmpty(_differing(ours, ours))
    self.assertEqual(set(_differing(ours, _gemms(ours, **fields))), names)

  def test_the_rounding_of_the_gate(self):
    reference = dataclasses.replace(
        packed_decoders.plain("portable"),
        combine=dataclasses.replace(
            named_combines.named("transformers_grouped_mm"),
            gate_dtype="float32",
        ),
    )
    found = _differing(packed_decoders.marlin("portable"), reference)
    self.assertEqual(found["gate.gate_dtype"], ("bfloat16", "float32"))
    self.assertIn(
        "gate.gate_dtype: ours bfloat16, reference float32",
        lib.clause("moe.experts.terms", found),
    )

  def test_another_activation_and_sign_of_zero(self):
    ours = packed_decoders.marlin("portable")
    other = dataclasses.replace(
        ours,
        experts=dataclasses.replace(
            ours.experts, up_zero="as_is",
            silu_table=packed_moe.SILU_TABLES["float16"],
        ),
    )
    self.assertEqual(
        set(_differing(ours, other)),
        {"activation.silu_table", "activation.up_zero"},
    )


class ClauseTest(parameterized.TestCase):

  @parameterized.parameters(
      ("moe.experts.gate_up", ["w13.k_streams", "w13.k_slices", "w13.k_step"]),
      ("moe.experts.activation",
       ["activation.silu_table", "activation.up_zero"]),
      ("moe.experts.terms", ["w2.k_streams", "w2.k_step"]),
      ("moe.experts.combine", ["combine.nan", "combine.round_before_shared"]),
      ("moe.router.gates", ["router.gate_dtype"]),
      ("attention.scores", []),
      ("logits", []),
  )
  def test_a_tap_has_the_clauses_that_decide_it(self, tap, names):
    found = _differing(
        packed_decoders.marlin("portable"), packed_decoders.plain("portable")
    )
    text = lib.clause(tap, found)
    parts = text.split("; ") if text else []
    self.assertEqual([p.split(":")[0] for p in parts], names)
    self.assertTrue(all(": ours " in p and ", reference " in p for p in parts))


class WorkTest(absltest.TestCase):

  def test_routes_of_all_prompts_of_a_step_are_planned_together(self):
    def one(*ids):
      steps = [
          capture_lib.Step(0, (), 0, {"layers.0.moe.router.ids": i}, "")
          for i in ids
      ]
      return capture_lib.Capture("p", (), steps, {})

    captures = [
        one(np.int32([[0, 1], [0, 2]]), np.int32([[3, 4]])),
        one(np.int32([[1, 0]]), np.int32([[3, 0]])),
    ]
    work = lib.work(captures, packed_decoders.CONFIG)
    # Experts 0 to 2 in prefill; 0, 3 and 4 in the step: one block each.
    self.assertEqual(work.num_blocks, (3,))
    many = np.int32([[0, 1]] * 9)  # Nine more rows of two experts.
    work = lib.work([*captures, one(many, many)], packed_decoders.CONFIG)
    self.assertEqual(work.num_blocks, (5, 6))
    self.assertEqual(work.sizes, {"w13": (128, 128), "w2": (128, 64)})
    contract = packed_decoders.marlin("native", grid=1).experts
    self.assertEqual(work.pieces("w13", contract.w13), (22, 0, 1))


if __name__ == "__main__":
  absltest.main()
