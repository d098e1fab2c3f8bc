"""The main job as a user runs it: a process, its exit code, its files."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from experiments.support import shipped
from experiments.training import finish

_ROOT = pathlib.Path(__file__).parents[2]
_TINY = f"--checkpoint={shipped.TINY}"
_FILES = {
    "report.html",
    "report.md",
    "report.json",
    "junit.xml",
    "capsule_ours",
    "capsule_reference",
}


def _run(*flags, **environment):
  return subprocess.run(
      [sys.executable, "-m", "experiments.conformance", *flags],
      cwd=_ROOT,
      env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
      capture_output=True,
      text=True,
      timeout=900,
      check=False,
  )


class MainJobTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp())
    self.addCleanup(shutil.rmtree, self.folder)
    self.out = self.folder / "out"

  def _assert_refused(self, done, code, message):
    self.assertEqual(done.returncode, code, done.stderr[-2000:])
    self.assertRegex(done.stderr, message)
    self.assertNotIn("Traceback", done.stderr)
    self.assertEqual(done.stdout, "")
    left = {p.name for p in self.folder.iterdir()}
    self.assertNoCommonElements(left, {"out"})
    self.assertEmpty([n for n in left if n.startswith(".out")], left)

  def test_the_trained_default_conforms(self):
    done = _run(f"--out={self.out}", "--decode_steps=1")
    self.assertEqual(done.returncode, 0, done.stderr[-2000:])
    report = json.loads((self.out / "report.json").read_text("utf-8"))
    self.assertEqual(report["verdict"], "conformant")
    ids = [p["id"] for p in report["prompts"]]
    self.assertEqual(ids, list(finish.PROMPTS))

  @pytest.mark.slow
  def test_the_tiny_checkpoint_conforms(self):
    done = _run(f"--out={self.out}", _TINY)
    self.assertEqual(done.returncode, 0, done.stderr[-2000:])
    lines = done.stdout.rstrip("\n").split("\n")
    last = json.loads(lines[-1])
    same = {f"L{i}": "same_bits" for i in range(5)}
    self.assertEqual(last["schema"], "conformance/1")
    self.assertEqual(last["verdict"], "conformant")
    self.assertEqual(last["portable"], same)
    self.assertContainsSubset(
        set(last["native"].values()), {"same_bits", "within_rule"}
    )
    self.assertEqual(last["explained_contract"], "transformers_grouped_mm")
    self.assertEqual(last["uncertain"]["unresolved"], 0)
    self.assertIsNone(last["first_difference"])
    self.assertEqual({p.name for p in self.out.iterdir()}, _FILES)
    report = json.loads((self.out / "report.json").read_text("utf-8"))
    trajectories = report["arithmetics"]["portable"]["trajectories"]
    self.assertLen(trajectories, 6)
    self.assertEqual({len(t["ours"]) for t in trajectories}, {17})
    self.assertEqual(report["environment"]["x64"], True)
    pickles = [
        p for p in self.out.rglob("*")
        if p.suffix in (".pkl", ".pickle", ".pt", ".bin", ".npy", ".npz")
    ]
    self.assertEmpty(pickles)

  @pytest.mark.slow
  def test_a_short_run_against_eager_ends_with_1_and_replaces_the_report(self):
    prompts = self.folder / "prompts.txt"
    prompts.write_text("why the sheep\n", "utf-8")
    flags = (
        f"--out={self.out}",
        _TINY,
        f"--prompts={prompts}",
        "--decode_steps=1",
        "--arithmetics=portable",
        "--experts_implementation=eager",
    )
    done = _run(*flags)
    self.assertEqual(done.returncode, 1, done.stderr[-2000:])
    last = json.loads(done.stdout.rstrip("\n").split("\n")[-1])
    self.assertEqual(last["explained_contract"], "transformers_eager")
    first = last["first_difference"]
    self.assertEqual((first["layer"], first["operator"]),
                     (0, "moe.experts.combine"))
    again = _run(*flags, "--combine=transformers_eager")
    self.assertEqual(again.returncode, 0, again.stderr[-2000:])
    report = json.loads((self.out / "report.json").read_text("utf-8"))
    self.assertEqual(report["verdict"], "conformant")

  def test_an_unknown_flag_is_no_verdict(self):
    self._assert_refused(_run("--expert=eager"), 2, "expert")

  def test_an_absent_checkpoint_is_named(self):
    missing = self.folder / "nowhere"
    done = _run(f"--checkpoint={missing}", f"--out={self.out}")
    self._assert_refused(done, 2, str(missing))

  def test_an_empty_prompt_is_named(self):
    prompts = self.folder / "prompts.txt"
    prompts.write_text("one\n\nthree\n", "utf-8")
    done = _run(f"--prompts={prompts}", f"--out={self.out}")
    self._assert_refused(done, 2, "line_2")

  def test_a_prompt_that_does_not_fit_is_refused_with_its_numbers(self):
    prompts = self.folder / "prompts.txt"
    prompts.write_text("why the sheep\n" + "sheep " * 1100, "utf-8")
    done = _run(f"--prompts={prompts}", f"--out={self.out}")
    self._assert_refused(done, 2, r"line_2.*1024 positions")

  def test_a_folder_that_holds_something_else_is_left_alone(self):
    other = self.folder / "precious"
    other.mkdir()
    (other / "thesis.txt").write_text("mine", "utf-8")
    done = _run(f"--out={other}")
    self._assert_refused(done, 2, "thesis.txt")
    self.assertEqual((other / "thesis.txt").read_text("utf-8"), "mine")

  def test_a_damaged_checkpoint_leaves_nothing_behind(self):
    copy = self.folder / "copy"
    shutil.copytree(shipped.TINY, copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = _run(f"--checkpoint={copy}", f"--out={self.out}")
    self._assert_refused(done, 2, "model.safetensors")

  def test_without_transformers_the_reference_is_unsupported(self):
    blocked = self.folder / "transformers.py"
    blocked.write_text("raise ImportError('not here')\n", "utf-8")
    done = _run(f"--out={self.out}", PYTHONPATH=str(self.folder))
    self._assert_refused(done, 4, "transformers")


if __name__ == "__main__":
  absltest.main()
