"""The route-block study and its scorer as programs, on a small fixture."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import jax

from experiments.support import environment
from experiments.support import pallas_backend
from experiments.support import study_backends
from moejax.contracts import document
from moejax.contracts import refusal
from moejax.protocols.route_block import arms
from moejax.protocols.route_block import fixture
from moejax.protocols.route_block import score
from moejax.protocols.route_block import store
from moejax.protocols.route_block import study
from moejax.protocols.route_block import tables
from pallas_kernels import launch
from tests import bits
from tests.protocols.route_block import sample

_ROOT = pathlib.Path(__file__).parents[2]


def _program(name: str, *arguments: str):
  """(exit code, stdout, stderr) of a program."""
  done = subprocess.run(
      [sys.executable, "-m", f"experiments.{name}", *arguments],
      cwd=_ROOT, capture_output=True, text=True, check=False,
  )
  return done.returncode, done.stdout, done.stderr


class ProgramsTest(absltest.TestCase):

  def test_a_study_is_made_scored_and_a_changed_one_rejected(self):
    folder = sample.folder(self)
    request = folder / "request.json"
    request.write_text(json.dumps(document.to_dict(sample.REQUEST)))
    place, out = folder / "study", folder / "tables"
    code, stdout, stderr = _program(
        "route_block_study", "--backend=oracle", f"--request={request}",
        f"--out={place}", "--replicates=1", "--workers=2",
    )
    self.assertEqual(code, 0, stderr)
    run = json.loads(stdout.splitlines()[-1])
    self.assertEqual((run["schema"], run["cells"]), ("route_block_run/1", 14))
    self.assertEqual(run["request"]["replicates"], 1)
    self.assertEqual(run["binary"]["device"], "cpu")

    code, stdout, stderr = _program(
        "score_route_block", f"--study={place}", f"--out={out}",
        f"--binary={run['binary']['digest']}", "--replay", "--workers=1",
        f"--against={place}",
    )
    self.assertEqual(code, 0, stderr)
    found = json.loads(stdout.splitlines()[-1])
    self.assertEqual(found["schema"], "route_block_score/1")
    self.assertTrue(found["accepted"] and found["binary_pinned"])
    self.assertTrue(found["replayed"])
    self.assertEqual(found["agreement"][0]["backend"], "oracle")
    self.assertEqual(found["source"], environment.source())
    self.assertCountEqual((p.name for p in out.iterdir()), tables.NAMES)

    raw = next((place / store.RAW).iterdir())
    raw.write_bytes(raw.read_bytes()[:-1])
    code, stdout, stderr = _program(
        "score_route_block", f"--study={place}", f"--out={folder / 'none'}"
    )
    self.assertEqual(code, 1, stderr)
    self.assertEqual(
        json.loads(stdout.splitlines()[-1])["reason"], "raw_tensor"
    )
    self.assertFalse((folder / "none").exists())

  def test_another_backend_and_a_foreign_folder_are_usage_errors(self):
    folder = sample.folder(self)
    (folder / "notes.txt").write_text("x")
    for arguments, message in (
        (("--backend=triton", f"--out={folder / 'a'}"), "--backend=triton"),
        ((f"--out={folder}",), "notes.txt"),
    ):
      code, stdout, stderr = _program("route_block_study", *arguments)
      self.assertEqual((code, stdout), (2, ""))
      self.assertIn(message, stderr)
    self.assertEqual([p.name for p in folder.iterdir()], ["notes.txt"])

  def test_the_scorer_needs_no_torch(self):
    done = subprocess.run(
        [sys.executable, "-c", "import sys, experiments.score_route_block;"
         " sys.exit('torch' in sys.modules)"],
        cwd=_ROOT, check=False,
    )
    self.assertEqual(done.returncode, 0)

  def test_no_study_is_a_usage_error_and_not_a_rejection(self):
    code, _, stderr = _program(
        "score_route_block", f"--study={sample.folder(self)}"
    )
    self.assertEqual(code, 2)
    self.assertIn("is no study", stderr)


class BackendsTest(parameterized.TestCase):

  @parameterized.parameters(
      (("vllm",), "needs --moe_extension"),
      (("vllm", 1, "a.so"), "needs --moe_extension"),
      (("oracle", 1, "a.so", "b.so"), "takes no vLLM extension"),
      (("Oracle",), "is not one of oracle, pallas, vllm"),
      (("vllm", 1, "/absent/a.so", "/absent/b.so"), "no vLLM extension at"),
  )
  def test_refuses(self, arguments, message):
    with self.assertRaisesRegex(refusal.HarnessError, message):
      study_backends.maker(*arguments)

  def test_pallas_needs_a_device(self):
    if jax.default_backend() != "cpu":
      self.skipTest("There is a device.")
    with self.assertRaises(refusal.UnsupportedError):
      study_backends.maker("pallas")

  def test_interpreted_kernels_have_the_oracles_bits_in_every_arm(self):
    request = sample.REQUEST
    made = fixture.make(request)
    jobs = []
    for cell in request.cells()[1:14:2]:  # Every arm once.
      declared = arms.treatment(request, made, cell)
      plan = arms.plan(request, made, declared)
      jobs.append(study.Job(plan, declared["grid"]))
    self.assertLen(jobs, 7)
    kernels = pallas_backend.Pallas(launch.LaunchConfig(interpret=True))
    found = study_backends.device_cells(kernels)(request, made.inputs, jobs)
    wanted = sample.compute(request, made.inputs, jobs)
    for ours, theirs in zip(found, wanted, strict=True):
      for name, array in ours._asdict().items():
        bits.assert_same_bits(array, getattr(theirs, name))

  def test_worker_processes_have_the_oracles_bits_in_order(self):
    request = dataclasses.replace(sample.REQUEST, replicates=1)
    made = fixture.make(request)
    jobs = [
        study.Job(made.histories["H0"], request.grid),
        study.Job(made.histories["H1"], request.grid),
        study.Job(made.histories["H1"], request.other_grid),
    ]
    found = study_backends.oracle_cells(2)(request, made.inputs, jobs)
    wanted = sample.compute(request, made.inputs, jobs)
    for ours, theirs in zip(found, wanted, strict=True):
      for name, array in ours._asdict().items():
        bits.assert_same_bits(array, getattr(theirs, name))

  def test_a_study_of_the_full_maker_is_accepted_by_the_scorer(self):
    request = dataclasses.replace(sample.REQUEST, replicates=1)
    maker = dataclasses.replace(
        study_backends.maker("oracle"), compute=sample.compute
    )
    with tempfile.TemporaryDirectory() as folder:
      place = pathlib.Path(folder) / "study"
      study.run(request, maker, place)
      found = score.score(
          place, environment.source(), maker.binary["digest"]
      )
    self.assertTrue(found["accepted"], found["detail"])


if __name__ == "__main__":
  absltest.main()
