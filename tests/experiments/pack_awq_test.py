"""The binary that packs: one JSON line, exit codes, a folder that loads."""

import json
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest

from experiments.support import shipped
from torch_bridge.hf import checkpoint
from torch_bridge.hf.awq import loader

_ROOT = pathlib.Path(__file__).parents[2]


def _run(*arguments: str) -> subprocess.CompletedProcess:
  return subprocess.run(
      [sys.executable, "-m", "experiments.pack_awq", *arguments],
      cwd=_ROOT, capture_output=True, text=True, check=False,
  )


class PackAwqTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    parent = self.enterContext(tempfile.TemporaryDirectory())
    self.out = pathlib.Path(parent) / "packed"

  def test_packs_the_shipped_checkpoint(self):
    run = _run(
        f"--checkpoint={shipped.TINY}", f"--out={self.out}",
        "--group_size=32",
    )
    self.assertEqual(run.returncode, 0, run.stderr)
    summary = json.loads(run.stdout.splitlines()[-1])
    self.assertEqual(summary["schema"], "pack_awq/1")
    # 4 layers of 16 experts of 3 projections of 64 by 32.
    self.assertEqual(summary["packed_modules"], 4 * 16 * 3)
    self.assertEqual(summary["packed_weights"], 4 * 16 * 3 * 64 * 32)
    packed = checkpoint.Checkpoint(self.out)
    self.assertEqual(packed.digest(), summary["result"])
    original = checkpoint.Checkpoint(shipped.TINY)
    self.assertEqual(original.digest(), summary["source"])
    self.assertLen(loader.load(packed, original).packed, 4 * 16 * 3)

  def test_exit_codes_of_refusals(self):
    for flag, code, message in (
        ("--group_size=128", 2, "want a multiple of group_size=128"),
        ("--modules_to_not_convert=self_attn", 4, "is a router"),
    ):
      run = _run(
          f"--checkpoint={shipped.TINY}", f"--out={self.out}",
          "--group_size=32", flag,
      )
      self.assertEqual(run.returncode, code, run.stderr)
      self.assertIn(message, run.stderr)
      self.assertFalse(self.out.exists())


if __name__ == "__main__":
  absltest.main()
