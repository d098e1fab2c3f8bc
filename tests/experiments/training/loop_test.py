"""A run that was killed goes on with the bits of one that was not."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

from absl.testing import absltest
import numpy as np

from experiments.training import corpus as corpus_lib
from experiments.training import loop as lib
from moejax.contracts import refusal
from moejax.training import checkpoints
from moejax.training import models
from tests.experiments.training import tiny_corpus
from tests.training import tiny

_ROOT = pathlib.Path(__file__).parents[3]
_TINY = "tests.experiments.training.run_tiny"


def _start(corpus, run, steps=400, dtype="bfloat16", flags=""):
  return subprocess.Popen(
      [sys.executable, "-m", _TINY, corpus, run, str(steps), dtype],
      cwd=_ROOT,
      env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
      stdout=subprocess.PIPE,
      text=True,
  )


def _last_digest(run: pathlib.Path) -> str:
  place = sorted(run.glob("step_*"))[-1]
  manifest = json.loads((place / checkpoints.MANIFEST).read_text("utf-8"))
  return manifest["digest"]


class LoopTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.scratch = pathlib.Path(tempfile.mkdtemp())
    cls.addClassCleanup(shutil.rmtree, cls.scratch)
    cls.folder = tiny_corpus.make(cls.scratch / "corpus")
    cls.corpus = corpus_lib.load(cls.folder)
    cls.model = models.of(dataclasses.replace(
        tiny.QWEN3_MOE, vocab_size=cls.corpus.vocab_size
    ))

  def _train(self, run, recipe=tiny.RECIPE, **options):
    return lib.train(
        self.model, recipe, self.corpus, self.scratch / run, **options
    )

  def test_killed_and_resumed_is_bit_for_bit_never_killed(self):
    whole = _start(self.folder, self.scratch / "whole")
    broken = _start(self.folder, self.scratch / "broken")
    for line in broken.stdout:
      if int(line) >= 108:  # Between two checkpoints.
        broken.send_signal(signal.SIGKILL)
        break
    broken.stdout.close()
    self.assertEqual(broken.wait(60), -signal.SIGKILL)
    metrics = lib.read_metrics(self.scratch / "broken")
    self.assertLess(metrics[-1]["step"], 400)
    again = _start(self.folder, self.scratch / "broken")
    first = int(again.stdout.readline())
    self.assertGreater(first, 4)  # It did not begin anew.
    self.assertLessEqual(first, metrics[-1]["step"] + 4)
    for process in (again, whole):
      process.communicate(timeout=120)
      self.assertEqual(process.returncode, 0)
    ours, theirs = (
        lib.read_metrics(self.scratch / run) for run in ("broken", "whole")
    )
    self.assertEqual([line["step"] for line in ours], [*range(4, 401, 4)])
    for mine, other in zip(ours, theirs, strict=True):
      for field in ("step", "loss", "gradient_norm", "auxiliary", "experts"):
        self.assertEqual(mine[field], other[field])
    self.assertEqual(
        _last_digest(self.scratch / "broken"),
        _last_digest(self.scratch / "whole"),
    )
    self.assertLess(ours[-1]["loss"][-1], ours[0]["loss"][0] - 1.0)

  def test_two_devices_take_the_steps_of_one(self):
    one = _start(self.folder, self.scratch / "one", 8, "float32")
    flags = "--xla_force_host_platform_device_count=2"
    two = _start(self.folder, self.scratch / "two", 8, "float32", flags)
    for process in (one, two):
      process.communicate(timeout=120)
      self.assertEqual(process.returncode, 0)
    first, second = (
        lib.read_metrics(self.scratch / run) for run in ("one", "two")
    )
    # Sums of float32 in another order: 2e-7 of a gradient, which Adam carries
    # on through eight steps.
    for mine, other in zip(first, second, strict=True):
      for field in ("loss", "gradient_norm"):
        np.testing.assert_allclose(mine[field], other[field], rtol=1e-4)
      np.testing.assert_allclose(
          mine["auxiliary"]["balance"], other["auxiliary"]["balance"],
          rtol=1e-4,
      )

  def test_a_time_limit_ends_a_run_that_goes_on_and_other_settings_do_not(self):
    result = self._train("limited", time_limit=0.0)
    self.assertEqual((result.steps, result.complete), (0, False))
    other = dataclasses.replace(tiny.RECIPE, peak=0.5)
    with self.assertRaisesRegex(
        refusal.HarnessError, r"recipe\.peak was 0\.01, not 0\.5"
    ):
      self._train("limited", other)
    result = self._train("limited")
    self.assertEqual((result.steps, result.complete), (8, True))
    again = self._train("limited")  # Nothing is left to do.
    self.assertEqual((again.steps, again.complete), (8, True))
    self.assertLess(again.compile_seconds, result.compile_seconds)
    for name, value in checkpoints.flatten(again.state).items():
      np.testing.assert_array_equal(
          value, checkpoints.flatten(result.state)[name]
      )

  def test_what_is_not_finite_is_named_and_the_last_checkpoint_stays(self):
    # The first rate is zero, the second throws every weight out of range, the
    # third step sees it.
    recipe = dataclasses.replace(tiny.RECIPE, chunk=1, peak=1e36, warm_up=1)
    with self.assertRaisesRegex(
        lib.NotFinite, r"step 3: not finite: gradients of .*embedding.*router"
    ):
      self._train("bad", recipe, checkpoint_every=1)
    kept = sorted(p.name for p in (self.scratch / "bad").glob("step_*"))
    self.assertEqual(kept, ["step_00000001", "step_00000002"])

  def test_a_damaged_or_empty_corpus_is_refused(self):
    for name, damage, message in (
        ("cut", lambda f: (f / "train.tokens.npy").write_bytes(b""), "SHA-256"),
        ("absent", lambda f: (f / "LICENSES.md").unlink(), "is no corpus"),
        ("json", lambda f: (f / "corpus.json").write_text("{"), "is damaged"),
    ):
      with self.subTest(name):
        copy = self.scratch / name
        shutil.copytree(self.folder, copy)
        damage(copy)
        with self.assertRaisesRegex(refusal.HarnessError, message):
          corpus_lib.load(copy)
    short = dataclasses.replace(self.corpus, train=self.corpus.train[:20])
    with self.assertRaisesRegex(refusal.HarnessError, "20 tokens are too few"):
      lib.train(self.model, tiny.RECIPE, short, self.scratch / "short")


if __name__ == "__main__":
  absltest.main()
