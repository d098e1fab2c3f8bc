"""The binary: what it refuses, and how."""

import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from experiments.training import loop

_ROOT = pathlib.Path(__file__).parents[3]


class TrainTest(parameterized.TestCase):

  @parameterized.parameters(
      ((), r"--model is needed"),
      (("--model=small_qwen3_moe", "--corpus=none", "--run=none"),
       r"none is no corpus"),
      (("--model=large",), r"(?s)large.*Try --help"),
  )
  def test_refuses_with_exit_code_two_and_no_traceback(self, flags, message):
    with tempfile.TemporaryDirectory() as folder:
      done = subprocess.run(
          [sys.executable, "-m", "experiments.train", *flags],
          cwd=_ROOT,
          env={**os.environ, "JAX_PLATFORMS": "cpu", "TMPDIR": folder},
          capture_output=True,
          text=True,
          timeout=120,
          check=False,
      )
    self.assertEqual(done.returncode, 2, done.stderr)
    self.assertRegex(done.stderr, message)
    self.assertNotIn("Traceback", done.stderr)
    self.assertEqual(done.stdout, "")

  def test_compiler_flags_join_those_that_are_given(self):
    given = "--xla_gpu_autotune_level=2 --xla_cpu_enable_fast_math=false"
    with absltest.mock.patch.dict(os.environ, {"XLA_FLAGS": given}):
      loop.set_compiler_flags()
      loop.set_compiler_flags()
      self.assertEqual(
          os.environ["XLA_FLAGS"],
          f"{given} {loop.XLA_FLAGS[0]} {loop.XLA_FLAGS[2]}",
      )


if __name__ == "__main__":
  absltest.main()
