"""The measurement and its validator as programs, on a tiny protocol."""

import dataclasses
import hashlib
import json
import pathlib
import subprocess
import sys

from absl.testing import absltest
import jax

from experiments.support import performance_arms
from moejax.contracts import document
from moejax.contracts import refusal
from moejax.numerics.packed import oracle
from moejax.protocols import packed_fixture
from moejax.protocols.performance import protocol as protocol_lib
from moejax.protocols.performance import run
from moejax.protocols.performance import store
from moejax.protocols.performance import validate
from pallas_kernels import launch
from pallas_kernels import packed_moe
from pallas_kernels import packed_weight
from tests.pallas_kernels import cuda_lowering_test
from tests.protocols.performance import sample

_ROOT = pathlib.Path(__file__).parents[2]
_TINY = protocol_lib.Protocol(
    points=(protocol_lib.Point(3, "float16", 8, 64, 64, 5),),
    comparisons=(
        protocol_lib.Comparison("vllm_stable", "vllm_native", 1.05, False),
        protocol_lib.Comparison("pallas_layer", "oracle_layer", None, True),
        protocol_lib.Comparison("pallas_w13", "vllm_w13", None, True),
    ),
    shape=packed_fixture.LayerShape(
        experts=3, embed=128, hidden=64, group_size=64
    ),
    top_k=2,
    requests=2,
    warmups=1,
    rounds=5,
    confidence=0.9,
    interpret=True,
)


def _program(name: str, *arguments: str):
  """(exit code, last line as JSON or None, stderr) of a program."""
  done = subprocess.run(
      [sys.executable, "-m", f"experiments.{name}", *arguments],
      cwd=_ROOT, capture_output=True, text=True, check=False,
  )
  lines = done.stdout.splitlines()
  return done.returncode, json.loads(lines[-1]) if lines else None, done.stderr


class ProgramsTest(absltest.TestCase):

  def test_a_run_is_made_validated_and_a_changed_one_refused(self):
    folder = sample.folder(self)
    file, out = folder / "tiny.json", folder / "run"
    file.write_text(json.dumps(document.to_dict(_TINY)))
    code, made, stderr = _program(
        "packed_performance", f"--protocol={file}", f"--out={out}"
    )
    self.assertEqual(code, 0, stderr)
    self.assertTrue(made["interpreted"])
    self.assertEqual(made["verdicts"], {
        "vllm_stable/vllm_native": "unsupported",
        "pallas_layer/oracle_layer": "described",
        "pallas_w13/vllm_w13": "unsupported",
    })
    arms = made["points"][0]["arms"]
    self.assertIn("need --moe_extension", arms["vllm_native"])
    self.assertGreater(arms["pallas_w13"]["median_ns"], 0)

    code, found, stderr = _program(
        "validate_performance", f"--run={out}", f"--seal={made['seal']}"
    )
    self.assertEqual(code, 0, stderr)
    self.assertTrue(found["valid"] and found["seal_pinned"])
    self.assertEqual(found["samples"], 6 * 3)
    self.assertEqual(found["result"] | {"seal": made["seal"]}, made)

    raw = next((out / store.SAMPLES).iterdir())
    raw.write_text(raw.read_text().replace('"ns":', '"ns":1', 1))
    code, found, _ = _program("validate_performance", f"--run={out}")
    self.assertEqual((code, found["reason"]), (1, "file_digest"))

  def test_a_run_that_is_killed_is_incomplete(self):
    out = sample.folder(self) / "run"
    script = (
        "import os, pathlib, signal, sys\n"
        "from tests.protocols.performance import sample\n"
        "def times(n):\n"
        "  if n == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "  return 1000\n"
        "sample.make(pathlib.Path(sys.argv[1]),"
        " times=sample.TIMES | {'vllm_stable': times})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(out)], cwd=_ROOT, check=False
    )
    self.assertEqual(done.returncode, -9)
    first = sample.PROTOCOL.points[0].name
    lines = (out / store.SAMPLES / f"{first}.jsonl").read_text()
    # A head, three rounds of four arms, and what the fourth began with: an odd
    # round goes backwards, so the two arms behind `vllm_stable`.
    self.assertLen(lines.splitlines(), 1 + 3 * 4 + 2)
    code, found, stderr = _program("validate_performance", f"--run={out}")
    self.assertEqual((code, found["reason"]), (1, "incomplete"), stderr)

  def test_no_arm_of_the_default_runs_on_a_cpu(self):
    if jax.default_backend() != "cpu":
      self.skipTest("There is a device.")
    out = sample.folder(self) / "run"
    code, found, stderr = _program("packed_performance", f"--out={out}")
    self.assertEqual((code, found), (4, None))
    self.assertIn("vllm_stable: vLLM's kernels need", stderr)
    self.assertIn("pallas_layer: the kernels need a CUDA device", stderr)
    self.assertFalse(out.exists())

  def test_usage(self):
    folder = sample.folder(self)
    # A protocol.json of a run is a protocol; the folder is not empty.
    file = folder / store.PROTOCOL
    file.write_text(json.dumps(protocol_lib.to_document(_TINY)))
    for name, arguments, message in (
        ("packed_performance", (f"--protocol={file}", f"--out={folder}"),
         "is not empty"),
        ("packed_performance", ("--protocol=/absent", f"--out={folder}"),
         "--protocol: absent"),
        ("validate_performance", (f"--run={folder / 'none'}",), "is no run"),
    ):
      code, found, stderr = _program(name, *arguments)
      self.assertEqual((code, found), (2, None))
      self.assertIn(message, stderr)

  def test_the_validator_needs_no_torch(self):
    done = subprocess.run(
        [sys.executable, "-c", "import sys, experiments.validate_performance;"
         " sys.exit('torch' in sys.modules)"],
        cwd=_ROOT, check=False,
    )
    self.assertEqual(done.returncode, 0)


class ArmsTest(absltest.TestCase):

  def test_interpreted_kernels_and_oracle_owe_and_give_the_same_bits(self):
    protocol = dataclasses.replace(
        _TINY, comparisons=_TINY.comparisons[1:2],
        points=tuple(
            dataclasses.replace(p, dtype="bfloat16") for p in _TINY.points
        ),
    )
    out = sample.folder(self) / "run"
    run.run(protocol, performance_arms.maker(protocol), out)
    outputs = store.read(out / store.RUN)["outputs"]
    ours, theirs = next(iter(outputs.values())).values()
    self.assertEqual(ours, theirs)
    found = validate.validate(out)
    self.assertTrue(found["valid"], found["detail"])

  def test_the_digest_of_w13_is_that_of_the_oracle(self):
    work = run.requests(_TINY, _TINY.points[0])
    layer = packed_fixture.layer(_TINY.seed, _TINY.shape, "float16")
    arms = performance_arms.PallasArms(launch.LaunchConfig(interpret=True))
    arms.load(*layer, "float16")
    outputs = {arm: arms.prepare(arm, work).output for arm in arms.arms}
    surfaces = [
        oracle.packed_moe_oracle(i.x, i.gates, *layer, blocks, work.contract)
        for i, blocks in zip(work.inputs, work.plans, strict=True)
    ]
    for arm, surface in (("pallas_layer", "final"), ("pallas_w13", "w13")):
      data = b"".join(getattr(s, surface).tobytes() for s in surfaces)
      self.assertEqual(outputs[arm], hashlib.sha256(data).hexdigest())

  def test_the_measured_programs_lower_to_a_gpu(self):
    work = run.requests(_TINY, _TINY.points[0])
    layer = packed_fixture.layer(_TINY.seed, _TINY.shape, "float16")
    weights = [packed_weight.from_operands(part, "float16") for part in layer]
    inputs = work.inputs[0]
    placed = packed_moe.place(
        inputs.x, inputs.gates, *weights, work.plans[0], work.contract,
        launch.LaunchConfig(interpret=True),
    )
    for arm, count in (("pallas_layer", 6), ("pallas_w13", 2)):
      program = performance_arms.jitted(
          arm, work.contract, launch.LaunchConfig()
      )
      text = cuda_lowering_test.lowered(program, placed, *weights)
      self.assertEqual(text.count("__gpu$xla.gpu.triton"), count)

  def test_half_an_extension(self):
    with self.assertRaisesRegex(refusal.HarnessError, "belong together"):
      performance_arms.maker(_TINY, "a.so", "")

  def test_an_extension_that_is_absent(self):
    with self.assertRaisesRegex(refusal.HarnessError, "no vLLM extension at"):
      performance_arms.maker(_TINY, "/absent/a.so", "/absent/b.so")


if __name__ == "__main__":
  absltest.main()
