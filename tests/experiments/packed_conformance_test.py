"""The main job on a packed folder as a user runs it: pack, compare, read.

Both binaries, on the checkpoint that ships.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from experiments.support import shipped

_ROOT = pathlib.Path(__file__).parents[2]


def _run(binary, *flags):
  return subprocess.run(
      [sys.executable, "-m", f"experiments.{binary}", *flags],
      cwd=_ROOT,
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
      capture_output=True,
      text=True,
      timeout=900,
      check=False,
  )


class PackedConformanceTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    parent = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.parent = pathlib.Path(parent)
    done = _run(
        "pack_awq", f"--checkpoint={shipped.TINY}",
        f"--out={cls.parent / 'packed'}", "--group_size=32",
    )
    assert done.returncode == 0, done.stderr
    (cls.parent / "prompts.txt").write_text("why the sheep\n", "utf-8")

  def _conformance(self, *flags):
    return _run(
        "conformance",
        f"--checkpoint={self.parent / 'packed'}",
        f"--prompts={self.parent / 'prompts.txt'}",
        f"--out={self.parent / 'out'}",
        "--decode_steps=1",
        "--arithmetics=portable",
        *flags,
    )

  @pytest.mark.slow
  def test_conforms_and_proves_that_it_ran_packed(self):
    done = self._conformance()
    self.assertEqual(done.returncode, 0, done.stderr[-2000:])
    last = json.loads(done.stdout.rstrip("\n").split("\n")[-1])
    self.assertEqual(last["verdict"], "conformant")
    self.assertEqual(last["portable"], {f"L{i}": "same_bits" for i in range(5)})
    self.assertEqual(last["explained_contract"], "transformers_grouped_mm")
    self.assertTrue(last["packed"]["proven"])
    self.assertGreater(last["packed"]["elements"], 0)
    self.assertEqual(last["packed"]["elements"], last["packed"]["demanded"])
    self.assertIn("ran packed", done.stdout)
    page = (self.parent / "out" / "report.html").read_text("utf-8")
    report = json.loads((self.parent / "out/report.json").read_text("utf-8"))
    for name in ("packed_words_digest", "wide_weights_digest"):
      self.assertIn(report["reference"][name], page)
    self.assertIn('<section id="packed">', page)

  @parameterized.parameters(
      ("--packed_experts=marlin --grid=9", 4, "no multiple of thread_k=128"),
      ("--thread_k=64", 2, "'thread_k': 64.*experts is 'dequantized'"),
      ("--packed_layer=pallas", 2, "runs under experts='marlin' alone"),
  )
  def test_refusals(self, flags, code, message):
    done = self._conformance(*flags.split())
    self.assertEqual(done.returncode, code, done.stderr[-2000:])
    self.assertRegex(done.stderr, message)
    self.assertNotIn("Traceback", done.stderr)
    self.assertEqual(done.stdout, "")


if __name__ == "__main__":
  absltest.main()
