"""Batches follow from seed and step; each pass shows every window once."""

from absl.testing import absltest
import numpy as np

from moejax.training import batches as lib
from tests import bits

_TOKENS = np.arange(1000, dtype=np.uint16)


class BatchesTest(absltest.TestCase):

  def test_a_step_does_not_depend_on_those_before_it(self):
    first = lib.Batches(_TOKENS, 3, 4, 9)
    expected = {step: first.at(step) for step in range(60)}
    for step in (59, 0, 31, 30):
      bits.assert_same_bits(
          lib.Batches(_TOKENS, 3, 4, 9).at(step), expected[step]
      )
    self.assertEqual(expected[0].dtype, np.int32)
    other = lib.Batches(_TOKENS, 4, 4, 9).at(0)
    self.assertFalse(np.array_equal(other, expected[0]))

  def test_a_pass_shows_every_window_once_and_the_next_cuts_elsewhere(self):
    made = lib.Batches(_TOKENS, 3, 5, 9)  # 110 windows, 22 steps a pass.
    self.assertEqual(made.windows_of_pass, 110)
    cuts = []
    for turn in range(2):
      rows = np.concatenate([made.at(22 * turn + i) for i in range(22)])
      # Windows are what lies side by side: token i + 1 follows token i.
      np.testing.assert_array_equal(np.diff(rows, axis=1), 1)
      starts = np.sort(rows[:, 0])
      np.testing.assert_array_equal(np.diff(starts), 9)
      cuts.append(starts[0] % 9)
    self.assertNotEqual(*cuts)
    self.assertEqual(made.position(23), {"pass": 1, "window": 5})

  def test_a_batch_may_end_one_pass_and_begin_the_next(self):
    made = lib.Batches(_TOKENS, 3, 7, 9)
    rows = [made.at(i) for i in range(32)]
    flat = np.concatenate(rows)[:, 0]
    self.assertLen(set(flat[:110].tolist()), 110)
    self.assertLen(set(flat[110:220].tolist()), 110)

  def test_a_short_text_is_refused(self):
    with self.assertRaisesRegex(ValueError, "19 tokens are too few"):
      lib.Batches(_TOKENS[:19], 0, 1, 9)
    self.assertEqual(lib.Batches(_TOKENS[:20], 0, 1, 9).at(0).shape, (1, 10))


if __name__ == "__main__":
  absltest.main()
