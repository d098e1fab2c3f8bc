"""Runs of a decoder: batches, replays, taps, state."""

import copy
import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from moejax.protocols import capture
from moejax.protocols import compare
from moejax.protocols import outcome
from moejax.protocols import trajectory
from tests import bits
from tests.protocols import sample


def _same(left, right):
  found = compare.compare(left, right)
  return found.first is None and not found.missing and found.states_equal


class TrajectoryTest(parameterized.TestCase):

  @parameterized.parameters("portable", "sequential")
  def test_a_sequence_alone_has_the_bits_it_has_in_a_batch(self, arithmetic):
    decoder = sample.decoder(arithmetic)
    batch = trajectory.run(decoder, sample.PROMPTS, 3)
    for index, prompt in enumerate(sample.PROMPTS):
      alone = trajectory.run(decoder, [prompt], 3)
      self.assertTrue(_same([batch[index]], alone), prompt.id)

  def test_decoding_step_by_step_gives_the_bits_of_one_prefill(self):
    decoder = sample.decoder()
    run = trajectory.run(decoder, sample.PROMPTS[:1], 3)[0]
    tokens = run.prompt + run.generated[:-1]
    whole = trajectory.run(decoder, [trajectory.Prompt("w", tokens)], 0)[0]
    for step in run.steps:
      last = step.start + len(step.tokens)
      bits.assert_same_bits(
          step.taps["logits"][-1], whole.steps[0].taps["logits"][last - 1]
      )
    self.assertEqual(run.steps[-1].state, whole.steps[0].state)

  @parameterized.parameters("portable", "native")
  def test_taps_on_and_off_give_the_same_logits(self, arithmetic):
    decoder = sample.decoder(arithmetic)
    on = trajectory.run(decoder, sample.PROMPTS, 2)
    off = trajectory.run(
        decoder, sample.PROMPTS, 2, wanted=trajectory.keep_none
    )
    for a, b in zip(on, off, strict=True):
      self.assertGreater(len(a.steps[0].taps), 80)
      self.assertEqual(list(b.steps[0].taps), ["logits"])
      for left, right in zip(a.steps, b.steps, strict=True):
        bits.assert_same_bits(left.taps["logits"], right.taps["logits"])

  def test_taps_come_in_order_of_execution(self):
    step = trajectory.run(sample.decoder(), sample.PROMPTS, 0)[0].steps[0]
    names = list(step.taps)
    order = [
        "embed",
        "layers.0.input_norm.square",
        "layers.0.attention.q_proj",
        "layers.0.output",
        "layers.1.moe.router.ids",
        "layers.1.moe.experts.combine",
        "logits",
    ]
    self.assertEqual(sorted(order, key=names.index), order)

  def test_padding_and_dead_keys_are_cut_off(self):
    long, short = trajectory.run(sample.decoder(), sample.PROMPTS, 1)
    self.assertEqual(long.steps[0].taps["embed"].shape, (7, 16))
    self.assertEqual(short.steps[0].taps["embed"].shape, (3, 16))
    scores = "layers.0.attention.scores"
    self.assertEqual(short.steps[0].taps[scores].shape, (4, 3, 3))
    self.assertEqual(short.steps[1].taps[scores].shape, (4, 1, 4))
    self.assertEqual(short.final_state["layers.1.keys"].shape, (4, 2, 8))
    np.testing.assert_array_equal(short.steps[0].taps["positions"], [0, 1, 2])
    self.assertEqual([s.start for s in short.steps], [0, 3])

  def test_a_replay_of_its_own_values_changes_nothing(self):
    decoder = sample.decoder()
    run = trajectory.run(decoder, sample.PROMPTS, 2)
    replay = trajectory.run(decoder, sample.PROMPTS, 2, given=run)
    self.assertTrue(_same(replay, run))

  def test_a_replay_runs_each_operation_on_the_given_input(self):
    decoder = sample.decoder()
    run = trajectory.run(decoder, sample.PROMPTS, 0)
    name = "layers.0.mlp_norm.output"
    for one in run:
      value = one.steps[0].taps[name]
      one.steps[0].taps[name] = (value.astype(np.float32) * 2).astype(
          value.dtype
      )
    replay = trajectory.run(decoder, sample.PROMPTS, 0, given=run)
    found = compare.compare(replay, run)
    differing = {
        (c.layer, c.tap) for c in found.counts.values() if c.differing
    }
    self.assertEqual(
        differing,
        {(0, "mlp_norm.output"), (0, "mlp.gate_proj"), (0, "mlp.up_proj")},
    )

  def test_given_tokens_are_fed_and_own_choices_recorded(self):
    decoder = sample.decoder()
    run = trajectory.run(decoder, sample.PROMPTS, 2, tokens=[[1, 2, 3]] * 2)
    self.assertEqual([s.tokens for s in run[1].steps[1:]], [(1,), (2,)])
    free = trajectory.run(decoder, sample.PROMPTS, 0)
    self.assertEqual(run[0].steps[0].chosen, free[0].steps[0].chosen)

  def test_the_first_of_equal_logits_is_chosen(self):
    self.assertEqual(
        trajectory.first_largest(np.float32([0, 2, 1, 2])), 1
    )

  def test_a_sliding_window_keeps_one_row_less_than_it_sees(self):
    config = dataclasses.replace(sample.CONFIG, sliding_window=4)
    decoder = sample.decoder(config=config)
    run = trajectory.run(decoder, sample.PROMPTS, 1)
    self.assertEqual(run[0].final_state["layers.0.keys"].shape[0], 3)
    plain = trajectory.run(sample.decoder(), sample.PROMPTS, 1)
    # Below the window nothing changes, above it something does.
    bits.assert_same_bits(
        run[1].steps[0].taps["logits"], plain[1].steps[0].taps["logits"]
    )
    self.assertFalse(
        compare.same_bits(
            run[0].steps[0].taps["logits"], plain[0].steps[0].taps["logits"]
        )
    )

  def test_no_prompts_are_refused(self):
    with self.assertRaisesRegex(ValueError, "no prompts"):
      trajectory.run(sample.decoder(), [], 1)

  def test_another_final_state_is_no_operator_at_fault(self):
    run = trajectory.run(sample.decoder(), sample.PROMPTS, 0)
    other = copy.deepcopy(run)
    other[0].final_state["layers.0.keys"] += 1
    found = compare.compare(other, run)
    self.assertEqual(found.first.operator, "state.keys")
    self.assertEqual(outcome.causes(found), [])

  def test_the_state_fingerprint_covers_order_layers_and_bits(self):
    zero = np.zeros((2, 1, 4), np.float32)
    state = {"layers.0.keys": zero, "layers.0.values": zero + 1}
    base = capture.state_fingerprint(state)
    self.assertEqual(
        base, capture.state_fingerprint(dict(reversed(state.items())))
    )
    for changed in (
        {**state, "layers.0.keys": -zero},
        {"layers.1.keys": zero, "layers.1.values": zero + 1},
        {"layers.0.keys": zero + 1, "layers.0.values": zero},
    ):
      self.assertNotEqual(base, capture.state_fingerprint(changed))


if __name__ == "__main__":
  absltest.main()
