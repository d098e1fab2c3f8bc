"""A decoder over the kernels, in the interpreter. Needs no accelerator."""

from absl.testing import absltest
import jax

from moejax.contracts import refusal
from pallas_kernels import decoder_layer
from tests.pallas_kernels import decoder_suite


class InterpreterTest(decoder_suite.DecoderSuite):
  interpret = True
  arithmetic = "native"
  device = jax.devices("cpu")[0]

  def test_says_that_it_is_interpreted(self):
    self.assertEqual(self.layer().name, "pallas, interpreted")


class RefusalTest(absltest.TestCase):

  def test_no_device(self):
    if jax.default_backend() != "cpu":
      self.skipTest("There is a device.")
    with self.assertRaisesRegex(refusal.UnsupportedError, "CUDA device"):
      decoder_layer.PallasLayer()


if __name__ == "__main__":
  absltest.main()
