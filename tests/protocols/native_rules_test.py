"""The three native rules: each accepts what it should and refuses the rest."""

import copy

from absl.testing import absltest
import numpy as np

from moejax.contracts import verdict
from moejax.numerics import native_ops
from moejax.numerics.portable import bound_ops
from moejax.numerics.portable import portable_ops
from moejax.protocols import compare
from moejax.protocols import native_rules
from moejax.protocols import taps as taps_lib
from moejax.protocols import trajectory
from tests.protocols import sample


def _decoder(operations):
  return sample.decoder("native", operations=operations)


class RulesTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.reference = trajectory.run(
        _decoder(native_ops.NativeOperations()), sample.PROMPTS, 1
    )
    options = dict(given=cls.reference)
    cls.portable = trajectory.run(
        _decoder(portable_ops.PortableOperations()),
        sample.PROMPTS,
        1,
        **options,
    )
    cls.bounds = trajectory.run(
        _decoder(bound_ops.BoundOperations()),
        sample.PROMPTS,
        1,
        any_dtype=True,
        **options,
    )

  def _judge(self, replay, accumulator="float32"):
    comparison = compare.compare(replay, self.reference)
    native_rules.judge_by_bounds(
        comparison,
        replay,
        self.portable,
        self.bounds,
        self.reference,
        accumulator,
    )
    return comparison

  def _changed(self, name, change):
    replay = copy.deepcopy(self.reference)
    value = replay[0].steps[0].taps[name]
    index = np.unravel_index(int(np.abs(value).argmax()), value.shape)
    value[index] = change(value[index])
    return replay

  def test_every_operation_has_a_bound_of_its_own_shape(self):
    for name, _, _, bound, value in native_rules.pairs(
        self.bounds, self.reference
    ):
      if taps_lib.level(name) == "L4" and not name.endswith(
          ("ids", "positions", "embed", "inverse_frequencies")
      ):
        self.assertEqual(bound.shape, value.shape, name)
        self.assertEqual(bound.dtype, np.float64, name)
        if name.endswith(("experts.terms", "experts.combine")):
          self.assertFalse(bound.any(), name)
        else:
          self.assertTrue((bound > 0).all(), name)

  def test_native_operations_lie_within_their_bounds(self):
    comparison = self._judge(self.portable)
    verdicts = {
        c.verdict for c in comparison.counts.values() if c.level == "L4"
    }
    self.assertNotIn(verdict.BEYOND_RULE, verdicts)

  def test_an_operation_beyond_its_bound_is_found(self):
    for name in (
        "layers.0.attention.q_proj",
        "layers.0.attention.softmax",
        "layers.1.moe.experts.silu",
        "layers.1.mlp_norm.rsqrt",
        "rotary.inverse_frequencies",
        "layers.1.moe.experts.combine",
    ):
      replay = self._changed(name, lambda v: v * v.dtype.type(1.25))
      comparison = self._judge(replay)
      bad = [
          (c.layer, c.tap)
          for c in comparison.counts.values()
          if c.level == "L4" and c.verdict == verdict.BEYOND_RULE
      ]
      self.assertEqual(bad, [taps_lib.split(name)])

  def test_a_combine_may_only_be_a_rounding_of_a_float32_sum(self):
    """One bfloat16 step is beyond, unless the sum stands at the boundary."""
    key = (1, "moe.experts.combine")
    name = "layers.1.moe.experts.combine"
    replay = copy.deepcopy(self.reference)
    replay[0].steps[0].taps[name].view(np.uint16)[0, 0] ^= 1
    count = self._judge(replay).counts[key]
    self.assertEqual(
        (count.verdict, count.rule), ("beyond_rule", native_rules.CONTRACT)
    )

    at_boundary = copy.deepcopy(self.reference)
    terms = at_boundary[0].steps[0].taps["layers.1.moe.experts.terms"]
    terms[0, :, 0] = (1.0, 2**-8, 0.0)  # Half way from 1 to the next number.
    for one, value in ((at_boundary, 1.0), (replay, 1.0 + 2**-7)):
      one[0].steps[0].taps[name][0, 0] = value
    for accumulator, expected in (
        ("float32", "within_rule"),
        ("bfloat16", "beyond_rule"),
    ):
      with self.subTest(accumulator):
        kept, self.reference = self.reference, at_boundary
        try:
          count = self._judge(replay, accumulator).counts[key]
        finally:
          self.reference = kept
        self.assertEqual(count.verdict, expected)

  def test_the_bound_is_near_what_it_bounds(self):
    """Two bfloat16 steps away is within for one rounding, eight are not."""
    name = "layers.0.attention.o_proj"
    for factor, expected in ((1 + 2**-7, "within"), (1 + 2**-4, "beyond")):
      replay = self._changed(
          name, lambda v, f=factor: np.asarray(float(v) * f, v.dtype)
      )
      found = self._judge(replay).counts[taps_lib.split(name)].verdict
      self.assertEqual(found, f"{expected}_rule")

  def test_the_envelope_is_twice_the_references_own_spread(self):
    legal = copy.deepcopy(self.reference)
    legal[0].steps[0].taps["logits"][0, 0] += np.asarray(0.5, "bfloat16")
    limits = native_rules.envelope(self.reference, [legal])
    self.assertEqual(limits[(None, "logits")], 0.5)
    self.assertEqual(limits[(0, "output")], 0.0)
    for shift, expected in ((1.0, "within_rule"), (1.5, "beyond_rule")):
      ours = copy.deepcopy(self.reference)
      logits = ours[1].steps[0].taps["logits"]
      logits[0, 0] = np.asarray(float(logits[0, 0]) + shift, logits.dtype)
      gap = float(logits[0, 0]) - float(
          self.reference[1].steps[0].taps["logits"][0, 0]
      )
      comparison = compare.compare(ours, self.reference)
      native_rules.judge_by_envelope(comparison, limits)
      count = comparison.counts[(None, "logits")]
      self.assertEqual(count.verdict, expected, gap)
      self.assertEqual(count.limit, 1.0)

  def test_an_exchange_is_legal_only_within_the_margin(self):
    name = "layers.1.moe.router.ids"
    scores = "layers.1.moe.router.scores"
    ours = copy.deepcopy(self.reference)
    ids = ours[0].steps[0].taps[name]
    rejected = next(i for i in range(6) if i not in ids[0])
    row = self.reference[0].steps[0].taps[scores][0].astype(np.float64)
    gap = abs(row[ids[0, 2]] - row[rejected])
    ids[0, 2] = rejected
    for spread, legal in ((gap, True), (gap / 2.5, False)):
      limits = {(1, "moe.router.scores"): spread}
      found = native_rules.exchanges(ours, self.reference, limits)
      self.assertLen(found, 1)
      self.assertEqual(found[0].legal, legal)
      self.assertAlmostEqual(found[0].margin, gap)
      comparison = compare.compare(ours, self.reference)
      native_rules.judge_selections(comparison, found)
      self.assertEqual(
          comparison.counts[(1, "moe.router.ids")].verdict,
          "within_rule" if legal else "beyond_rule",
      )

  def test_another_token_is_judged_by_its_logits(self):
    ours = copy.deepcopy(self.reference)
    logits = self.reference[0].steps[1].taps["logits"][-1].astype(np.float64)
    order = np.argsort(-logits, kind="stable")
    ours[0].steps[1].chosen = int(order[1])
    gap = logits[order[0]] - logits[order[1]]
    for spread, level in ((gap, "within_rule"), (gap / 3, "beyond_rule")):
      found = native_rules.exchanges(
          ours, self.reference, {(None, "logits"): spread}
      )
      levels = native_rules.levels(
          compare.compare(ours, self.reference), found, ours, self.reference
      )
      self.assertEqual(levels["L0"], level)


if __name__ == "__main__":
  absltest.main()
