"""Comparison of captures: first difference, kinds, levels."""

import copy

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import numpy as np

from moejax.contracts import axes
from moejax.contracts import verdict
from moejax.protocols import capture
from moejax.protocols import compare
from moejax.protocols import deepseek_v4_taps
from moejax.protocols import taps


def _capture():
  values = np.arange(8, dtype=np.float32).reshape(2, 4)
  steps = [
      capture.Step(
          0,
          (1, 2),
          3,
          {
              "embed": values.copy(),
              "layers.0.attention.o_proj": values + 1,
              "layers.0.output": values + 2,
              "logits": values + 3,
          },
          "state",
      )
  ]
  return capture.Capture("p", (1, 2), steps, {})


class CompareTest(parameterized.TestCase):

  def test_equal_captures_have_the_same_bits_on_every_level(self):
    found = compare.compare([_capture()], [_capture()])
    self.assertIsNone(found.first)
    self.assertEqual(
        [found.levels()[level] for level in ("L0", "L1", "L3", "L4")],
        ["same_bits"] * 4,
    )

  def test_the_first_difference_in_execution_order_is_located(self):
    ours, theirs = _capture(), _capture()
    taps_ = ours.steps[0].taps
    taps_["logits"][0, 0] = 9
    taps_["layers.0.attention.o_proj"][1, 2] = np.nextafter(
        np.float32(7), np.float32(8)
    )
    found = compare.compare([ours], [theirs])
    first = found.first
    self.assertEqual(
        (first.layer, first.operator, first.index, first.axes),
        (0, "attention.o_proj", (1, 2), ("token", "embed")),
    )
    self.assertEqual((first.distance_ulp, first.differing), (1, 1))
    self.assertEqual(first.reference, "7.0")
    levels = found.levels()
    self.assertEqual(
        (levels["L1"], levels["L3"], levels["L4"]),
        ("beyond_rule", "same_bits", "beyond_rule"),
    )

  @parameterized.named_parameters(
      ("signed_zero", np.float32(-0.0), np.float32(0.0)),
      (
          "nan_payload",
          np.uint32(0x7FC00001).view(np.float32),
          np.float32("nan"),
      ),
  )
  def test_equal_values_with_other_bits_differ(self, ours_value, theirs_value):
    ours, theirs = _capture(), _capture()
    ours.steps[0].taps["embed"][0, 0] = ours_value
    theirs.steps[0].taps["embed"][0, 0] = theirs_value
    self.assertEqual(compare.compare([ours], [theirs]).first.operator, "embed")

  def test_another_dtype_or_shape_is_named_as_such(self):
    for change, kind, text in (
        (lambda v: v.astype(ml_dtypes.bfloat16), "dtype", "bfloat16"),
        (lambda v: v[:1], "shape", "(1, 4)"),
    ):
      ours = _capture()
      ours.steps[0].taps["embed"] = change(ours.steps[0].taps["embed"])
      first = compare.compare([ours], [_capture()]).first
      self.assertEqual((first.kind, first.ours), (kind, text))

  @parameterized.parameters("ours", "reference")
  def test_a_tap_of_one_side_only_is_missing(self, side):
    ours, theirs = _capture(), _capture()
    lacking = ours if side == "ours" else theirs
    del lacking.steps[0].taps["layers.0.attention.o_proj"]
    found = compare.compare([ours], [theirs])
    self.assertEqual(
        found.missing, [f"layers.0.attention.o_proj (not in {side})"]
    )
    self.assertEqual(found.levels()["L4"], "missing")
    self.assertIsNone(found.first)

  def test_tokens_and_states_decide_their_levels(self):
    ours = _capture()
    ours.steps[0].chosen, ours.steps[0].state = 4, "other"
    levels = compare.compare([ours], [_capture()]).levels()
    self.assertEqual(levels["L0"], "beyond_rule")
    self.assertEqual(levels["L2"], "beyond_rule")

  def test_what_is_left_after_the_run_is_compared_last(self):
    ours, theirs = _capture(), _capture()
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    ours.final_state = {"layers.1.window_kv": rows.copy()}
    theirs.final_state = {"layers.1.window_kv": rows.copy()}
    self.assertIsNone(compare.compare([ours], [theirs]).first)
    ours.final_state["layers.1.window_kv"][2, 1] = 9
    found = compare.compare([ours], [theirs])
    self.assertEqual(
        (found.first.layer, found.first.operator, found.first.index),
        (1, "state.window_kv", (2, 1)),
    )
    self.assertEqual(found.first.axes, ("row", "channel"))
    self.assertEqual(found.levels()["L2"], "beyond_rule")
    self.assertEqual(found.levels()["L4"], "same_bits")
    # A tap that differs came first.
    ours.steps[0].taps["layers.0.output"][0, 0] = 9
    found = compare.compare([ours], [theirs])
    self.assertEqual(found.first.operator, "output")

  @parameterized.parameters("ours", "theirs")
  def test_a_state_of_one_side_only_is_missing(self, side):
    ours, theirs = _capture(), _capture()
    one = ours if side == "ours" else theirs
    one.final_state = {"layers.0.keys": np.zeros((1, 1, 2), np.float32)}
    found = compare.compare([ours], [theirs])
    self.assertEqual(found.missing, ["layers.0.state.keys"])
    self.assertEqual(found.counts[0, "state.keys"].verdict, "missing")

  def test_captures_of_other_runs_are_refused(self):
    other = copy.deepcopy(_capture())
    other.prompt = (9,)
    with self.assertRaisesRegex(ValueError, "other runs"):
      compare.compare([other], [_capture()])

  def test_every_verdict_has_an_order_and_an_exit(self):
    self.assertEqual(
        verdict.worst(["same_bits", "missing", "within_rule"]), "missing"
    )
    self.assertEqual(verdict.worst(["missing", "beyond_rule"]), "beyond_rule")
    self.assertEqual(verdict.worst([]), "missing")
    codes = {
        level: verdict.EXIT_CODES[verdict.overall([level])]
        for level in verdict.ORDER
    }
    self.assertEqual(
        codes,
        {
            "same_bits": 0,
            "within_rule": 0,
            "beyond_rule": 1,
            "missing": 3,
            "unsupported": 4,
        },
    )

  def test_levels_and_axes_of_taps(self):
    self.assertEqual(taps.level("logits"), "L1")
    self.assertEqual(taps.level("layers.3.attention.state_keys"), "L2")
    self.assertEqual(taps.level("layers.3.output"), "L3")
    self.assertEqual(taps.level("layers.3.input_norm.output"), "L4")
    with self.assertRaisesRegex(ValueError, "layers.0.nothing"):
      taps.axes("layers.0.nothing")

  def test_every_axis_of_a_tap_is_in_the_legend(self):
    used = {axis for axes_ in taps.TAPS.values() for axis in axes_.split(",")}
    self.assertContainsSubset(used, axes.AXES)
    unused = set(axes.AXES) - used
    self.assertEqual(unused, {"batch", "route"})  # Docstrings use these.

  def test_a_name_of_two_architectures_has_the_same_axes_in_both(self):
    for name, axes_ in deepseek_v4_taps.TAPS.items():
      self.assertEqual(taps.TAPS[name], axes_, name)
    for name in taps._QWEN3_MOE:
      self.assertEqual(taps.TAPS[name], taps._QWEN3_MOE[name], name)

  def test_a_name_is_put_together_as_it_was_taken_apart(self):
    for name in ("logits", "layers.12.attention.q_norm.mean"):
      self.assertEqual(taps.join(*taps.split(name)), name)


if __name__ == "__main__":
  absltest.main()
