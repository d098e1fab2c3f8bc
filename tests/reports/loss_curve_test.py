"""The picture of a training run."""

from absl.testing import absltest

from moejax.reports import loss_curve


class LossCurveTest(absltest.TestCase):

  def test_equal_runs_give_equal_bytes_and_lines_have_their_names(self):
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
      first, again, other = (
          loss_curve.draw(losses, {"bigram": 4.5}, "a model", kind)
          for losses in ([6.0, 5.0, 4.0], [6.0, 5.0, 4.0], [6.0, 5.5, 4.0])
      )
      self.assertTrue(first.startswith(start))
      self.assertEqual(first, again)
      self.assertNotEqual(first, other)
    for text in (b"a model", b"bigram", b"training", b"nats per token"):
      self.assertIn(b"<!-- " + text + b" -->", first)


if __name__ == "__main__":
  absltest.main()
