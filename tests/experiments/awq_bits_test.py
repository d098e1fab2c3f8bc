"""The comparison end to end, on a machine without a device."""

import dataclasses

from absl.testing import absltest
import numpy as np

from experiments.support import pallas_backend
from moejax.contracts import refusal
from moejax.protocols import packed_fixture
from pallas_kernels import launch
from torch_bridge import awq_bits

_REQUEST = awq_bits.Request(
    fixtures=2, min_tokens=2, max_tokens=4, top_k=2, num_sms=3, workers=1,
    dtypes=("bfloat16",),
    shape=packed_fixture.LayerShape(
        experts=3, embed=256, hidden=128, group_size=128
    ),
)


class Wrong(pallas_backend.Pallas):
  """The kernels with one bit of S3 turned over."""

  def surfaces(self, inputs, blocks, contract):
    found = super().surfaces(inputs, blocks, contract)
    turned = found.routed_w2.copy()
    turned.view(np.uint16)[1, 2] ^= 1
    return found._replace(routed_w2=turned)


class AwqBitsTest(absltest.TestCase):

  def test_interpreted_kernels_are_the_oracle(self):
    backend = pallas_backend.Pallas(launch.LaunchConfig(interpret=True))
    found = awq_bits.run(_REQUEST, [backend])
    self.assertEqual(
        found["mismatches"],
        {"oracle_pallas": 0, "oracle_vllm": "unsupported",
         "pallas_vllm": "unsupported"},
    )
    self.assertEqual(
        [kind.split()[-1] for kind in found["kinds"]], ["shuffled", "stable"]
    )
    self.assertGreater(found["elements"], 0)

  def test_a_turned_bit_is_a_difference(self):
    request = dataclasses.replace(_REQUEST, fixtures=1)
    backend = Wrong(launch.LaunchConfig(interpret=True))
    found = awq_bits.run(request, [backend])
    self.assertEqual(found["mismatches"]["oracle_pallas"], 1)
    self.assertEqual(found["first_difference"]["surface"], "routed_w2")

  def test_no_device_is_refused_before_any_work(self):
    if pallas_backend.launch.jax.default_backend() != "cpu":
      self.skipTest("There is a device.")
    with self.assertRaisesRegex(refusal.UnsupportedError, "CUDA device"):
      pallas_backend.Pallas()


if __name__ == "__main__":
  absltest.main()
