"""Selections: what decides them, when two are the same, what lies between."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from moejax.protocols import selections

_ROUTER = "layers.2.moe.router."
_SCORES = np.float32([4, 1, 3, 2, 0.5])


class SelectionsTest(parameterized.TestCase):

  def test_the_tap_that_decides(self):
    one = np.zeros(1)
    self.assertEqual(
        selections.scores_of(f"{_ROUTER}ids", {f"{_ROUTER}scores": one}),
        f"{_ROUTER}scores",
    )
    by_bias = {f"{_ROUTER}{n}": one for n in ("softplus", "scores", "biased")}
    self.assertEqual(
        selections.scores_of(f"{_ROUTER}ids", by_bias), f"{_ROUTER}biased"
    )
    del by_bias[f"{_ROUTER}biased"]  # A hash layer.
    self.assertIsNone(selections.scores_of(f"{_ROUTER}ids", by_bias))
    self.assertEqual(
        selections.scores_of("layers.1.attention.indexer.visible", {}),
        "layers.1.attention.indexer.index_scores",
    )

  def test_selections_are_told_from_values(self):
    for name, expected in (
        (f"{_ROUTER}ids", True),
        ("layers.1.attention.indexer.visible", True),
        (f"{_ROUTER}scores", False),
        ("logits", False),
    ):
      self.assertEqual(selections.is_selection(name), expected)

  @parameterized.parameters(
      ("a.scores", [0, 2], [2, 0], False, 1.0),
      ("a.scores", [0, 2], [0, 3], False, 1.0),
      ("a.biased", [0, 2], [2, 0], True, None),
      ("a.biased", [2, 0], [0, 3], False, 1.0),
      ("a.biased", [0, 1], [2, 4], False, 3.5),
      ("a.index_scores", [0, 2], [0, 2, 3], False, np.inf),
      (None, [0, 2], [2, 0], False, 1.0),
  )
  def test_distance(self, decides, ours, reference, same, gap):
    ours, reference = np.int32(ours), np.int32(reference)
    self.assertEqual(selections.same(decides, ours, reference), same)
    if not same:
      self.assertEqual(
          selections.gap(decides, ours, reference, _SCORES), gap
      )


if __name__ == "__main__":
  absltest.main()
