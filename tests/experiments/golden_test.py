"""The bits of the shipped checkpoint in portable arithmetic, on this machine.

Runs wherever JAX runs, on a CPU and on an accelerator: the fingerprints in
tests/golden were written on a CPU.
"""

import copy
import json

from absl.testing import absltest

from experiments.support import shipped
from experiments import write_golden
from moejax.protocols import golden


class GoldenTest(absltest.TestCase):

  def test_this_machine_computes_the_golden_bits(self):
    written = json.loads(shipped.GOLDEN.read_text("utf-8"))
    found = json.loads(json.dumps(write_golden.fingerprints()))
    self.assertEmpty(golden.differences(written, found))

  def test_a_single_changed_fingerprint_is_seen(self):
    written = json.loads(shipped.GOLDEN.read_text("utf-8"))
    for key in ("chosen", "state", "logits", "taps"):
      changed = copy.deepcopy(written)
      changed["prompts"]["en_sheep"]["steps"][3][key] = "other"
      self.assertEqual(
          golden.differences(written, changed), [f"en_sheep, step 3: {key}"]
      )
    del changed["prompts"]["en_sheep"]
    self.assertLen(golden.differences(written, changed), 1)


if __name__ == "__main__":
  absltest.main()
