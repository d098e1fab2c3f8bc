"""Studies of one request agree in bits, or the first place is named."""

import dataclasses

from absl.testing import absltest
import numpy as np
import safetensors.numpy

from moejax.contracts import refusal
from moejax.protocols.route_block import agreement
from moejax.protocols.route_block import score
from moejax.protocols.route_block import store
from tests.protocols.route_block import sample

_REQUEST = dataclasses.replace(sample.REQUEST, replicates=1)


def _studies(test):
  folder = sample.folder(test)
  return [
      sample.make(folder / name, _REQUEST) for name in ("one", "other")
  ]


def _change(place, change, cell="008_exchange_across_H0_0"):
  path = place / store.RAW / f"{cell}.safetensors"
  tensors = safetensors.numpy.load_file(path)
  change(tensors)
  path.write_bytes(safetensors.numpy.save(tensors))


class AgreementTest(absltest.TestCase):

  def test_every_element_of_every_cell_is_counted(self):
    one, other = _studies(self)
    found = agreement.count(_REQUEST, one, other)
    sizes = {"w13": 36 * 256, "activation": 36 * 128, "routed_w2": 36 * 512,
             "final": 9 * 512}
    self.assertEqual(
        found["elements"], {name: 14 * n for name, n in sizes.items()}
    )
    self.assertEqual(found["differing"], dict.fromkeys(sizes, 0))
    self.assertIsNone(found["first"])
    self.assertEqual((found["backend"], found["cells"]), ("oracle", 14))

  def test_a_sign_of_zero_and_a_nan_are_differences_and_the_first_is_named(
      self,
  ):
    one, other = _studies(self)

    def change(value):
      def put(tensors):
        tensors["activation"][3, 7] = value
        tensors["final"][2, 1] = value
      return put

    _change(one, change(0.0))
    _change(other, change(-0.0))
    found = agreement.count(_REQUEST, one, other)
    self.assertEqual(
        found["differing"],
        {"w13": 0, "activation": 1, "routed_w2": 0, "final": 1},
    )
    self.assertEqual(
        found["first"], "008_exchange_across_H0_0: activation[3, 7]"
    )
    _change(one, change(np.float16(np.nan)))
    _change(other, change(np.float16(np.nan)))
    self.assertIsNone(agreement.count(_REQUEST, one, other)["first"])

  def test_the_scorer_rejects_a_study_that_another_does_not_confirm(self):
    one, other = _studies(self)
    found = score.score(one, sample.SOURCE, against=[other])
    self.assertTrue(found["accepted"])
    self.assertLen(found["agreement"], 1)

    def turn(tensors):
      tensors["final"].view(np.uint16)[0, 0] ^= 1

    _change(other, turn)
    found = score.score(one, sample.SOURCE, against=[one, other])
    self.assertEqual((found["accepted"], found["reason"]), (False, "agreement"))
    self.assertIn("1 elements are not those of oracle", found["detail"])
    self.assertLen(found["agreement"], 2)

  def test_what_cannot_be_compared_is_no_disagreement(self):
    one, other = _studies(self)
    elsewhere = sample.make(
        sample.folder(self) / "else", dataclasses.replace(_REQUEST, seed=2)
    )
    with self.assertRaisesRegex(refusal.HarnessError, "another request"):
      agreement.count(_REQUEST, one, elsewhere)

    def widen(tensors):
      tensors["final"] = tensors["final"].astype(np.float32)

    _change(other, widen)
    with self.assertRaisesRegex(refusal.HarnessError, "float32"):
      agreement.count(_REQUEST, one, other)
    path = other / store.RAW / "008_exchange_across_H0_0.safetensors"
    path.unlink()
    with self.assertRaisesRegex(refusal.HarnessError, "008_exchange"):
      agreement.count(_REQUEST, one, other)


if __name__ == "__main__":
  absltest.main()
