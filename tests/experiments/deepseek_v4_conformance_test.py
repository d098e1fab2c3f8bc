"""The main job on DeepSeek-V4 as a user runs it: a process, its exit code."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from absl.testing import absltest
import numpy as np
import pytest
import safetensors.numpy

from experiments.support import shipped
from experiments.tiny import deepseek_v4 as tiny_deepseek_v4

_ROOT = pathlib.Path(__file__).parents[2]


def _run(module, *flags):
  return subprocess.run(
      [sys.executable, "-m", f"experiments.{module}", *flags],
      cwd=_ROOT,
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
      capture_output=True,
      text=True,
      timeout=900,
      check=False,
  )


def _last(done) -> dict:
  return json.loads(done.stdout.rstrip("\n").split("\n")[-1])


class DeepseekV4ConformanceTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp())
    self.addCleanup(shutil.rmtree, self.folder)

  def _copy(self) -> pathlib.Path:
    copy = self.folder / "copy"
    shutil.copytree(shipped.TINY_DEEPSEEK_V4, copy)
    return copy

  def _assert_refused(self, checkpoint, message):
    done = _run(
        "conformance",
        f"--checkpoint={checkpoint}",
        f"--out={self.folder / 'out'}",
    )
    self.assertEqual(done.returncode, 2, done.stderr[-2000:])
    self.assertRegex(done.stderr, message)
    self.assertNotIn("Traceback", done.stderr)
    self.assertFalse((self.folder / "out").exists())

  @pytest.mark.slow
  def test_in_float32_all_bits_are_the_same(self):
    checkpoint = self.folder / "model"
    tiny_deepseek_v4.make(checkpoint, dtype="float32")
    prompts = self.folder / "prompts.txt"
    prompts.write_text(
        "The rain\nTwelve sheep live on the hill behind the school.\n", "utf-8"
    )
    out = self.folder / "out"
    done = _run(
        "conformance",
        f"--checkpoint={checkpoint}",
        f"--prompts={prompts}",
        "--decode_steps=1",
        f"--out={out}",
    )
    self.assertEqual(done.returncode, 0, done.stderr[-2000:])
    last = _last(done)
    self.assertEqual(set(last["portable"].values()), {"same_bits"})
    self.assertContainsSubset(
        set(last["native"].values()), {"same_bits", "within_rule"}
    )
    self.assertEqual(last["explained_contract"], "transformers_grouped_mm")
    report = json.loads((out / "report.json").read_text("utf-8"))
    self.assertEqual(report["identity"]["model"], "deepseek_v4")
    native = {
        (t["layer"], t["tap"]): t
        for t in report["arithmetics"]["native"]["taps"]
    }
    states = {tap for _, tap in native if tap.startswith("state.")}
    self.assertEqual(
        states,
        {
            "state.window_kv",
            "state.compressed_kv",
            *(
                f"state.{owner}_state.{prefix}{array}"
                for owner in ("compressor", "indexer")
                for prefix in ("", "previous_")
                for array in ("kv", "score")
            ),
            "state.indexer_state.keys",
        },
    )

  @pytest.mark.slow
  def test_the_release_s_graph_parts_at_a_clause(self):
    prompts = self.folder / "prompts.txt"
    prompts.write_text("The rain\n", "utf-8")
    checkpoint = self.folder / "model"
    tiny_deepseek_v4.make(checkpoint, dtype="float32")
    flags = (
        f"--checkpoint={checkpoint}",
        f"--prompts={prompts}",
        "--decode_steps=0",
        "--arithmetics=portable",
        f"--out={self.folder / 'out'}",
    )
    done = _run("conformance", *flags, "--graph=deepseek_reference")
    self.assertEqual(done.returncode, 1, done.stderr[-2000:])
    first = _last(done)["first_difference"]
    self.assertEqual(
        (first["layer"], first["operator"], first["clause"]),
        (
            0,
            "attention_hc.mixes",
            "graph.hyper_scale: ours mixes, reference streams",
        ),
    )
    # Quantisation works on blocks of 128, which this model is too small for.
    done = _run("conformance", *flags, "--graph=deepseek_reference_quantized")
    self.assertEqual(done.returncode, 4, done.stderr[-2000:])
    self.assertRegex(done.stderr, "embed=64 is no multiple of")

  def test_a_graph_of_another_architecture_is_refused(self):
    done = _run(
        "conformance",
        "--graph=deepseek_reference",
        f"--out={self.folder / 'out'}",
    )
    self.assertEqual(done.returncode, 2, done.stderr[-2000:])
    self.assertIn("qwen3_moe has no graph 'deepseek_reference'", done.stderr)

  def test_another_architecture_is_refused_by_name(self):
    copy = self._copy()
    config = json.loads((copy / "config.json").read_text("utf-8"))
    config["model_type"] = "deepseek_v41"
    (copy / "config.json").write_text(json.dumps(config), "utf-8")
    self._assert_refused(copy, "deepseek_v41.*qwen3_moe, deepseek_v4")

  def test_a_hash_row_that_names_an_expert_twice_is_refused(self):
    copy = self._copy()
    path = copy / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    name = next(n for n in tensors if n.endswith("tid2eid"))
    tensors[name][7, 1] = tensors[name][7, 0]
    path.write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
    self._assert_refused(copy, "tid2eid.*twice")

  def test_a_hash_id_outside_the_experts_is_refused(self):
    copy = self._copy()
    path = copy / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    name = next(n for n in tensors if n.endswith("tid2eid"))
    tensors[name][7, 1] = np.int64(16)
    path.write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
    self._assert_refused(copy, "tid2eid.*16")

  def test_names_of_two_dialects_are_refused(self):
    copy = self._copy()
    path = copy / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors["model.embed_tokens.weight"] = tensors.pop("embed.weight")
    path.write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
    self._assert_refused(copy, "dialect")

  def test_state_paths_of_another_model_are_refused(self):
    done = _run("state_paths", f"--checkpoint={shipped.TINY}")
    self.assertEqual(done.returncode, 2, done.stderr[-2000:])
    self.assertIn("is no DeepSeek-V4 model", done.stderr)

  @pytest.mark.slow
  def test_state_paths_are_equal_in_a_short_run(self):
    done = _run("state_paths", "--chunks=4", "--arithmetic=sequential")
    self.assertEqual(done.returncode, 0, done.stderr[-2000:])
    last = _last(done)
    self.assertTrue(last["same_live_bits"])
    self.assertEqual(set(last["against_at_once"]), {"in_chunks", "one_by_one"})
    for found in last["against_at_once"].values():
      self.assertEqual(found["live_differing_rows"], 0)
      self.assertGreater(found["live_values"], 1000)


if __name__ == "__main__":
  absltest.main()
