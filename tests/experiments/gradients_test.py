"""The gradients binary as a user runs it.

The one whole run takes most of a minute: each of some hundred shapes compiles.
"""

import json
import os
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from experiments.support import shipped

_ROOT = pathlib.Path(__file__).parents[2]


def _run(*flags):
  return subprocess.run(
      [sys.executable, "-m", "experiments.gradients", *flags],
      cwd=_ROOT,
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
      capture_output=True,
      text=True,
      timeout=900,
      check=False,
  )


class GradientsTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_a_step_of_the_tiny_checkpoint_has_the_same_bits(self):
    done = _run("--sequences=1", "--length=4", "--optimizer=sgd")
    self.assertEqual(done.returncode, 0, done.stderr[-2000:])
    last = json.loads(done.stdout.rstrip("\n").split("\n")[-1])
    self.assertEqual(last["schema"], "gradients/1")
    self.assertTrue(last["same_bits"])
    self.assertIsNone(last["first_difference"])
    self.assertEqual(last["loss"]["differing"], 0)
    self.assertEqual(last["backward"]["name"], "transformers_eager")
    kinds = [row["kind"] for row in last["places"]]
    # Eleven parameters in each of four layers, and three outside.
    self.assertEqual(kinds.count("gradient"), 4 * 11 + 3)
    self.assertEqual(kinds.count("updated"), 4 * 11 + 3)
    self.assertIn("gradient: 47 of 47 with the same bits", done.stdout)

  @parameterized.parameters(
      (("--length=999",), 2, "prompts of at least 999 tokens"),
      (("--checkpoint=/nowhere",), 2, "/nowhere"),
      (("--optimizer=lion",), 2, "lion"),
      ((f"--checkpoint={shipped.TINY_DEEPSEEK_V4}",), 4, "Qwen3-MoE only"),
  )
  def test_is_refused(self, flags, code, message):
    done = _run(*flags)
    self.assertEqual(done.returncode, code, done.stderr[-2000:])
    self.assertRegex(done.stderr, message)
    self.assertEqual(done.stdout, "")


if __name__ == "__main__":
  absltest.main()
