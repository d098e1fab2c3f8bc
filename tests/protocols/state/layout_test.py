"""Layouts and sizes against a literal stepwise simulation.

Needs no accelerator.
"""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from moejax.contracts import refusal
from moejax.protocols.state import layout as lib
from moejax.protocols.state import sizes
from moejax.protocols.state import working_state
from tests import bits
from tests.protocols.state import sample

_CASES = [
    (config, length)
    for config in sample.CONFIGS
    for length in sample.LENGTHS
]


class FlashTest(parameterized.TestCase):

  @parameterized.parameters((4, 5_883_008), (128, 6_309_888))
  def test_raw_size_is_the_published_one(self, length, size):
    self.assertEqual(sizes.num_values(sample.FLASH, length, lib.RAW), size)
    self.assertEqual(sizes.raw_formula(sample.FLASH, length), size)

  @parameterized.parameters(1, 3, 4, 127, 128, 129, 515)
  def test_shapes_add_up_to_the_closed_forms(self, length):
    c = sample.FLASH
    raw = 5_869_568 + 13_440 * (length // 4) + 10_240 * (length // 128)
    self.assertEqual(sizes.num_values(c, length, lib.RAW), raw)
    self.assertEqual(sizes.raw_formula(c, length), raw)
    live = sizes.num_values(c, length, lib.LIVE)
    self.assertEqual(live, sizes.live_formula(c, length))
    gone = 43 * 512 if length >= 128 else 0
    self.assertEqual(sizes.num_values(c, length, lib.CARRIED), live - gone)

  def test_a_fork_in_layer_5_reaches_what_the_paper_leaves_room_for(self):
    self.assertEqual(sizes.reach(sample.FLASH, 4, 5), 146_816)
    self.assertEqual(
        sizes.reach(sample.FLASH, 4, 5, with_stale=False), 98_176
    )


class LayoutTest(parameterized.TestCase):

  @parameterized.parameters(*_CASES)
  def test_raw_is_the_stepwise_state(self, config, length):
    given, bias = sample.streams(config, length), sample.biases(config)
    state = working_state.capture(
        config, sample.working(config, given, bias), bias, (1,)
    )
    expected = sample.stepwise(config, given, bias)
    self.assertEqual(set(state.arrays), set(expected))
    for name, array in expected.items():
      bits.assert_same_bits(state.arrays[name], array)
    total = sum(array.size for array in expected.values())
    self.assertEqual(sizes.raw_formula(config, length), total)

  def test_bfloat16_is_widened_exactly(self):
    config = sample.tiny(dtype="bfloat16")
    given, bias = sample.streams(config, 13), sample.biases(config)
    state = working_state.capture(
        config, sample.working(config, given, bias), bias, (1,)
    )
    for name, array in sample.stepwise(config, given, bias).items():
      bits.assert_same_bits(state.arrays[name], array)

  def test_components_come_before_layers_and_kv_before_score(self):
    names = [part.name for part in lib.parts(sample.tiny(), 9, lib.RAW)]
    self.assertEqual(
        names,
        [f"layers.{i}.window_kv" for i in range(5)]
        + [f"layers.{i}.compressed_kv" for i in (1, 2, 3)]
        + [
            f"layers.{i}.compressor_state.{array}"
            for i in (1, 2, 3)
            for array in ("kv", "score")
        ]
        + [
            f"layers.{i}.indexer_state.{array}"
            for i in (1, 3)
            for array in ("kv", "score", "keys")
        ],
    )

  @parameterized.parameters(*_CASES)
  def test_live_is_what_later_tokens_can_read(self, config, length):
    """Every other value of the raw state may be anything."""
    given, bias = sample.streams(config, length), sample.biases(config)
    marks = lib.status(config, length)
    read = _run_on(config, given, bias, length, None)
    dead = {name: mark != lib.IN_USE for name, mark in marks.items()}
    spoilt = _run_on(config, given, bias, length, dead)
    for x, y in zip(read, spoilt, strict=True):
      bits.assert_same_bits(x, y)
    for name, mark in marks.items():
      for place in zip(*np.nonzero(mark == lib.IN_USE)):
        one = np.zeros(mark.shape, bool)
        one[place] = True
        spoilt = _run_on(config, given, bias, length, {name: one})
        equal = all(np.array_equal(x, y) for x, y in zip(read, spoilt))
        self.assertFalse(equal, f"{name} {place} is never read")

  @parameterized.parameters(*_CASES)
  def test_positions_are_those_of_the_last_writer(self, config, length):
    bias = sample.biases(config)
    base = sample.stepwise(config, sample.streams(config, length), bias)
    for part in lib.parts(config, length, lib.RAW):
      for row, p in enumerate(part.positions):
        given = sample.streams(config, length)
        if p >= 0:
          for rows in given[part.layer].values():
            rows[p + 1 :] += 1
        changed = sample.stepwise(config, given, bias)[part.name][row]
        bits.assert_same_bits(changed, base[part.name][row])
        if p >= 0:
          for rows in given[part.layer].values():
            rows[p] += 1
          changed = sample.stepwise(config, given, bias)[part.name][row]
          self.assertTrue((changed != base[part.name][row]).all())

  def test_refuses_an_unknown_layout(self):
    with self.assertRaisesRegex(refusal.HarnessError, "'dead'"):
      lib.parts(sample.tiny(), 3, "dead")
    with self.assertRaisesRegex(refusal.HarnessError, "length=-1"):
      lib.parts(sample.tiny(), -1, lib.RAW)


def _run_on(config, given, bias, length, spoil):
  """What 12 more tokens read, by the rule, after some values were spoilt."""
  raw = sample.stepwise(config, given, bias)
  for name, mask in (spoil or {}).items():
    if mask.any():
      raw[name].reshape(*mask.shape, -1)[mask] = 99
  later = sample.streams(config, length + 12, seed=5)
  return list(_reads(config, raw, later, bias, length))


def _reads(config, raw, later, bias, length):
  for layer, one in enumerate(later):
    window = raw[f"layers.{layer}.window_kv"]
    for p in range(length, length + 12):
      window[p % config.window] = one["window"][p]
      seen = range(max(0, p - config.window + 1), p + 1)
      yield window[[q % config.window for q in seen]].copy()
    for site in ("compressor", "indexer"):
      name = f"layers.{layer}.{site}_state"
      if f"{name}.kv" not in raw:
        continue
      keys = f"layers.{layer}.compressed_kv"
      yield raw[f"{name}.keys" if site == "indexer" else keys]
      kv, score = raw[f"{name}.kv"], raw[f"{name}.score"]
      rate, half = config.rate(layer), kv.shape[1]
      overlaps = config.attentions[layer] == "csa"
      half //= 1 + overlaps
      for p in range(length, length + 12):
        row = rate * overlaps + p % rate
        kv[row] = one[f"{site}.kv"][p]
        score[row] = one[f"{site}.gate"][p]
        if (p + 1) % rate == 0:
          for table in (kv, score):
            if not overlaps:
              yield table.copy()
              continue
            # In the first window the earlier half has no weight.
            if p + 1 > rate:
              yield table[:rate, :half].copy()
            yield table[rate:, half:].copy()
            table[:rate] = table[rate:]


class ReachTest(parameterized.TestCase):

  @parameterized.parameters(*_CASES)
  def test_a_fork_changes_as_many_values_as_it_can(self, config, length):
    given, bias = sample.streams(config, length), sample.biases(config)
    base = sample.stepwise(config, given, bias)
    marks = lib.status(config, length)
    for layer in range(config.num_layers):
      other = sample.stepwise(config, sample.forked(given, layer), bias)
      changed = fresh = 0
      for name, array in base.items():
        moved = array.view("u4") != other[name].view("u4")
        changed += int(moved.sum())
        live = marks[name][:, 0] != lib.STALE
        fresh += int(moved[live].sum())
      self.assertEqual(sizes.reach(config, length, layer), changed)
      self.assertEqual(
          sizes.reach(config, length, layer, with_stale=False), fresh
      )

  def test_refuses_a_fork_outside(self):
    with self.assertRaisesRegex(refusal.HarnessError, "fork_layer=5"):
      sizes.reach(sample.tiny(), 3, 5)
    with self.assertRaisesRegex(refusal.HarnessError, "length=0"):
      sizes.reach(sample.tiny(), 0, 1)


if __name__ == "__main__":
  absltest.main()
