"""The main job on packed folders, through the library.

The reference has the words made wide; ours runs from the words and proves it.
"""

import functools
import json
import pathlib
import shutil
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from moejax.contracts import refusal
from moejax.modules import packed_experts
from moejax.numerics import fingerprint
from moejax.numerics.packed import awq_twin
from moejax.numerics.packed import packed_ops
from moejax.protocols import outcome
from moejax.reports import headline
from tests.torch_bridge.hf import tiny_models
from tests.torch_bridge.hf.awq import independent
from torch_bridge import conformance
from torch_bridge import evidence
from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf.awq import packer

_TINY = (
    pathlib.Path(__file__).parents[2]
    / "experiments/checkpoints/tiny_qwen3_moe"
)
_SAME = {f"L{i}": "same_bits" for i in range(5)}
_MARLIN = conformance.PackedExperts("marlin", thread_k=64, thread_n=64, grid=9)
_LEAVES = ("qweight", "qzeros", "scales")


@functools.cache
def _parent() -> pathlib.Path:
  return pathlib.Path(tempfile.mkdtemp())


def tearDownModule():
  shutil.rmtree(_parent())


@functools.cache
def _packed() -> pathlib.Path:
  """A model whose sizes fall into Marlin's tiles, packed; attention too."""
  plain, folder = _parent() / "plain", _parent() / "packed"
  sizes = dict(
      vocab_size=1024, hidden_size=128, moe_intermediate_size=64,
      num_experts=5, num_experts_per_tok=3, num_hidden_layers=2,
      mlp_only_layers=[],
  )
  tiny_models.save(tiny_models.model(**sizes), plain)
  shutil.copy(_TINY / "tokenizer.json", plain)
  packer.pack(plain, folder, packer.Request(32, ("mlp.gate", "lm_head")))
  return folder


@functools.cache
def _prompts() -> str:
  path = _parent() / "prompts.txt"
  # Long: with few elements no bit of a first projection would differ.
  path.write_text("why the sheep " * 8 + "\nall cats\n", "utf-8")
  return str(path)


def _run(folder, layer=None, **fields):
  fields = {"arithmetics": ("portable",), "decode_steps": 1} | fields
  request = conformance.Request(str(folder), prompts=_prompts(), **fields)
  return conformance.run(request, layer=layer)


_cached = functools.cache(_run)


class DequantizedTest(absltest.TestCase):

  def test_a_packed_folder_conforms_in_both_arithmetics(self):
    report = _cached(_packed(), arithmetics=("portable", "native")).report
    self.assertEqual((report["verdict"], report["exit_code"]),
                     ("conformant", 0))
    portable, native = (
        report["arithmetics"][n] for n in ("portable", "native")
    )
    self.assertEqual(portable["levels"], _SAME)
    self.assertContainsSubset(
        set(native["levels"].values()), {"same_bits", "within_rule"}
    )
    self.assertIsNone(portable["first_difference"])
    self.assertEqual(
        report["explanation"]["contract"], "transformers_grouped_mm"
    )
    packed = report["packed"]
    self.assertTrue(packed["proven"])
    self.assertEqual(packed["clauses"], {"portable": {}, "native": {}})
    tokens = sum(len(p["tokens"]) for p in report["prompts"])
    for run in packed["arithmetics"].values():
      # 3 slots, 2 * 64 and 128 columns, 2 layers; 2 prompts of one step.
      self.assertEqual(run["demanded"], (tokens + 2) * 3 * 256 * 2)
      self.assertEqual(run["elements"], run["demanded"])
    line = outcome.last_line(report)
    self.assertEqual(
        line["packed"],
        {"proven": True, "experts": "dequantized", "faults": 0,
         "elements": 2 * run["elements"], "demanded": 2 * run["elements"]},
    )
    for part in (portable, native):
      self.assertEmpty(part["missing"])

  def test_the_report_says_which_weights_the_reference_had(self):
    about = _cached(_packed(), arithmetics=("portable", "native")).report[
        "reference"
    ]
    checkpoint = checkpoint_lib.Checkpoint(_packed())
    words = {
        n: a for n, a in checkpoint.items() if n.endswith(_LEAVES)
    }
    modules = sorted({n.rpartition(".")[0] for n in words})
    self.assertEqual(
        about["packed_words_digest"],
        fingerprint.checkpoint_digest(words.items()),
    )
    self.assertEqual(
        about["wide_weights_digest"],
        fingerprint.checkpoint_digest(
            (
                f"{m}.weight",
                np.ascontiguousarray(independent.weight(
                    *(words[f"{m}.{leaf}"] for leaf in _LEAVES), "bfloat16"
                ).T),
            )
            for m in modules
        ),
    )
    self.assertEqual(about["widened_modules"], len(modules))
    self.assertIn("made wide", about["weights"])

  def test_eager_experts_are_explained_as_for_any_folder(self):
    report = _cached(_packed(), experts_implementation="eager").report
    first = report["arithmetics"]["portable"]["first_difference"]
    self.assertEqual(report["exit_code"], 1)
    self.assertEqual(first["operator"], "moe.experts.combine")
    self.assertIn("combine.accumulator", first["clause"])
    self.assertEqual(
        report["explanation"]["contract"], "transformers_eager"
    )
    self.assertIn(
        "combine.accumulator", report["packed"]["clauses"]["portable"]
    )

  def test_boundaries_prove_it_as_well(self):
    report = _run(_packed(), taps="boundaries").report
    self.assertEqual(report["exit_code"], 3)
    self.assertTrue(report["packed"]["proven"])

  def test_a_decoder_that_runs_wide_is_a_failure(self):
    def wide(self, operations, dtype):
      del operations
      return awq_twin.dequantize(
          self.qweight[...], self.qzeros[...], self.scales[...], dtype
      )

    with mock.patch.object(
        packed_experts.packed_weight.PackedWeight, "dequantized", wide
    ):
      report = _run(_packed()).report
    # All bits are right, and still.
    self.assertEqual(report["arithmetics"]["portable"]["levels"], _SAME)
    self.assertEqual(
        (report["verdict"], report["exit_code"]), ("not_conformant", 1)
    )
    self.assertFalse(outcome.last_line(report)["packed"]["proven"])
    self.assertRegex(
        headline.sentence(report), "did not run its packed experts packed.* 0"
    )


class _Counting(packed_ops.OracleLayer):
  """The layer that the caller plugs in."""

  name = "counting"
  calls = 0

  def surfaces(self, *args):
    _Counting.calls += 1
    return super().surfaces(*args)


class MarlinTest(absltest.TestCase):

  def test_differs_from_wide_weights_at_an_operator_and_in_its_clauses(self):
    result = _cached(
        _packed(), packed=_MARLIN, arithmetics=("portable", "native")
    )
    report = result.report
    self.assertEqual(report["exit_code"], 1)
    self.assertTrue(report["packed"]["proven"])
    first = report["arithmetics"]["portable"]["first_difference"]
    self.assertEqual(first["operator"], "moe.experts.gate_up")
    names = [part.split(":")[0] for part in first["clause"].split("; ")]
    self.assertEqual(
        names, ["w13.k_streams", "w13.k_slices", "w13.k_step"]
    )
    self.assertIn("the contracts differ in w13.k_streams",
                  headline.sentence(report))
    beyond = {
        t["tap"] for t in report["arithmetics"]["native"]["taps"]
        if t["verdict"] == "beyond_rule" and t["level"] == "L4"
    }
    self.assertIn("moe.experts.gate_up", beyond)
    self.assertEqual(report["combine"], "vllm_marlin")

  def test_another_layer_has_the_bits_of_our_own_capsule(self):
    folder = _parent() / "capsules"
    folder.mkdir()
    evidence.write_capsules(
        _cached(_packed(), packed=_MARLIN, arithmetics=("portable", "native")),
        folder,
    )
    report = _run(
        _packed(), _Counting(), packed=_MARLIN,
        reference=f"capsule:{folder / 'capsule_ours'}",
    ).report
    portable = report["arithmetics"]["portable"]
    self.assertEqual(portable["levels"], _SAME)
    self.assertEmpty(portable["missing"])
    self.assertEqual(report["exit_code"], 0)
    packed = report["packed"]
    self.assertTrue(packed["proven"])
    self.assertEqual(packed["layer"], "counting")
    self.assertEqual(_Counting.calls, 2 * 2)  # Layers, forward passes.
    self.assertEqual(packed["clauses"]["portable"], {})
    other = _run(
        _packed(), packed=conformance.PackedExperts("marlin", 64, 128, 9),
        reference=f"capsule:{folder / 'capsule_ours'}",
    ).report
    clauses = other["packed"]["clauses"]["portable"]
    self.assertEqual(set(clauses), {"w13.k_slices"})


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(packed=conformance.PackedExperts("marlin")),
       "down .*k=64 is no multiple of thread_k=128"),
      (dict(packed=conformance.PackedExperts("marlin", 96)), "thread_k=96"),
      (dict(packed=conformance.PackedExperts("marlin", 64, 32)), "thread_n=32"),
  )
  def test_shapes_and_tiles_that_marlin_cannot_do(self, fields, message):
    with self.assertRaisesRegex(refusal.UnsupportedError, message):
      _run(_packed(), **fields)

  def test_a_group_that_marlin_does_not_know(self):
    folder = _parent() / "one_group"
    if not folder.exists():
      packer.pack(_TINY, folder, packer.Request(group_size=-1))
    with self.assertRaisesRegex(refusal.UnsupportedError, "group_size=-1"):
      _run(folder, packed=_MARLIN)

  def test_another_quantisation(self):
    folder = _parent() / "gptq"
    shutil.copytree(_packed(), folder)
    path = folder / "config.json"
    fields = json.loads(path.read_text("utf-8"))
    fields["quantization_config"]["quant_method"] = "gptq"
    path.write_text(json.dumps(fields), "utf-8")
    with self.assertRaisesRegex(refusal.UnsupportedError, "'gptq', want 'awq'"):
      _run(folder)

  def test_words_about_packed_experts_where_there_are_none(self):
    with self.assertRaisesRegex(refusal.HarnessError, "no packed experts"):
      _run(_TINY, packed=conformance.PackedExperts())

  def test_a_layer_that_nothing_would_run(self):
    with self.assertRaisesRegex(refusal.HarnessError, "'counting' runs under"):
      _run(_packed(), _Counting())

  def test_a_graph_that_there_is_not(self):
    with self.assertRaisesRegex(refusal.HarnessError, "no graph 'deepseek_"):
      _run(_packed(), graph="deepseek_reference")

  def test_requests_that_contradict_themselves(self):
    with self.assertRaisesRegex(ValueError, "'thread_k': 64.*'dequantized'"):
      conformance.PackedExperts(thread_k=64)
    with self.assertRaisesRegex(ValueError, "'exact'"):
      conformance.PackedExperts("exact")
    with self.assertRaisesRegex(ValueError, "bring their own combine"):
      conformance.Request("x", packed=_MARLIN, combine="transformers_eager")
    self.assertEqual(
        conformance.PackedExperts("marlin"),
        conformance.PackedExperts("marlin", 128, 64, 528),
    )


if __name__ == "__main__":
  absltest.main()
