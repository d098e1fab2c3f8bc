"""The main job, through the library: verdicts, explanations, capsules."""

import copy
import dataclasses
import functools
import json
import pathlib
import shutil
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from moejax.contracts import document
from moejax.contracts import named_combines
from moejax.contracts import refusal
from moejax.protocols import capsule
from moejax.protocols import outcome
from torch_bridge import conformance
from torch_bridge import evidence

_FOLDER = (
    pathlib.Path(__file__).parents[2]
    / "experiments"
    / "checkpoints"
    / "tiny_qwen3_moe"
)
_SAME = {f"L{i}": "same_bits" for i in range(5)}


@functools.cache
def _prompts() -> str:
  folder = pathlib.Path(tempfile.mkdtemp())
  path = folder / "prompts.json"
  prompts = json.loads((_FOLDER / "prompts.json").read_text("utf-8"))
  prompts["prompts"] = prompts["prompts"][:3]
  path.write_text(json.dumps(prompts), "utf-8")
  return str(path)


@functools.cache
def _run(
    experts="grouped_mm",
    combine="transformers_grouped_mm",
    arithmetics=("portable",),
    reference="transformers",
    taps="all",
    prompts=True,
):
  return conformance.run(
      conformance.Request(
          checkpoint=str(_FOLDER),
          prompts=_prompts() if prompts else None,
          experts_implementation=experts,
          combine=combine,
          decode_steps=2,
          arithmetics=arithmetics,
          reference=reference,
          taps=taps,
      )
  )


_BOTH = ("portable", "native")


class VerdictTest(parameterized.TestCase):

  @parameterized.parameters("grouped_mm", "eager", "batched_mm")
  def test_the_right_contract_gives_the_same_bits_on_all_levels(self, experts):
    report = _run(experts, f"transformers_{experts}").report
    self.assertEqual(report["verdict"], "conformant")
    self.assertEqual(report["exit_code"], 0)
    portable = report["arithmetics"]["portable"]
    self.assertEqual(portable["levels"], _SAME)
    self.assertIsNone(portable["first_difference"])
    self.assertEmpty(portable["missing"])
    self.assertEqual(
        report["explanation"]["contract"], f"transformers_{experts}"
    )
    for certificate in report["certificates"].values():
      self.assertTrue(certificate["complete"])
      self.assertGreater(certificate["elements"], 100_000)

  @parameterized.parameters(
      ("eager", "transformers_grouped_mm"),
      ("grouped_mm", "transformers_eager"),
      ("batched_mm", "transformers_eager"),
  )
  def test_another_contract_is_found_at_layer_0s_combine_and_explained(
      self, experts, combine
  ):
    report = _run(experts, combine).report
    self.assertEqual(report["exit_code"], 1)
    portable = report["arithmetics"]["portable"]
    first = portable["first_difference"]
    self.assertEqual(
        (first["layer"], first["operator"], first["step"]),
        (0, "moe.experts.combine", 0),
    )
    self.assertIn("combine.accumulator", first["clause"])
    self.assertIn("combine.order", first["clause"])
    explanation = report["explanation"]
    self.assertEqual(explanation["contract"], f"transformers_{experts}")
    rows = {c["name"]: c["rows"] for c in explanation["candidates"]}
    self.assertEqual(rows[f"transformers_{experts}"], explanation["rows"])
    self.assertLess(rows[combine], explanation["rows"])
    # On the reference's own inputs nothing but the combines differs.
    self.assertEqual(
        {(c["layer"], c["operator"]) for c in portable["causes"]},
        {(layer, "moe.experts.combine") for layer in range(4)},
    )

  def test_native_arithmetic_is_within_rules_that_name_their_source(self):
    report = _run(arithmetics=_BOTH).report
    native = report["arithmetics"]["native"]
    self.assertEqual(report["exit_code"], 0)
    self.assertContainsSubset(
        set(native["levels"].values()), {"same_bits", "within_rule"}
    )
    self.assertIn("Higham", native["rules"]["L4"])
    for row in native["taps"]:
      if row["verdict"] == "within_rule":
        self.assertNotEmpty(row["rule"], row["tap"])
    self.assertTrue(all(e["legal"] for e in native["exchanges"]))

  @parameterized.parameters("A", "transformers_eager")
  @pytest.mark.slow
  def test_another_combine_is_beyond_the_native_rule_too(self, combine):
    """Close is not enough where there is a contract."""
    report = _run(combine=combine, arithmetics=("native",)).report
    native = report["arithmetics"]["native"]
    beyond = {
        (r["layer"], r["tap"])
        for r in native["taps"]
        if r["verdict"] == "beyond_rule" and r["level"] == "L4"
    }
    self.assertContainsSubset(
        {(layer, "moe.experts.combine") for layer in range(4)}, beyond
    )
    # Terms have another dtype under A; routes feel the other sums.
    self.assertContainsSubset(
        {tap for _, tap in beyond},
        {"moe.experts.combine", "moe.experts.terms", "moe.router.ids"},
    )
    self.assertEqual(report["exit_code"], 1)
    self.assertEqual(
        report["explanation"]["contract"], "transformers_grouped_mm"
    )

  def test_capturing_boundaries_only_leaves_l4_incomplete(self):
    report = _run(taps="boundaries").report
    levels = report["arithmetics"]["portable"]["levels"]
    self.assertEqual((levels["L3"], levels["L4"]), ("same_bits", "missing"))
    self.assertEqual(
        (report["verdict"], report["exit_code"]), ("incomplete", 3)
    )

  def test_two_runs_give_the_same_report_but_for_times_and_paths(self):
    again = _run.__wrapped__(arithmetics=_BOTH)
    texts = []
    for result in (_run(arithmetics=_BOTH), again):
      report = copy.deepcopy(result.report)
      del report["timing"], report["paths"]
      texts.append(document.canonical_json(report))
    self.assertEqual(*texts)

  def test_the_last_line_has_the_promised_fields(self):
    line = outcome.last_line(_run("eager").report)
    self.assertEqual(
        list(line),
        [
            "schema",
            "verdict",
            "portable",
            "native",
            "explained_contract",
            "uncertain",
            "first_difference",
        ],
    )
    self.assertEqual(line["schema"], "conformance/1")
    self.assertIsNone(line["native"])
    self.assertEqual(line["first_difference"]["arithmetic"], "portable")
    json.dumps(line, allow_nan=False)


class CapsuleReferenceTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(tempfile.mkdtemp())
    evidence.write_capsules(_run(arithmetics=_BOTH), cls.folder)

  @classmethod
  def tearDownClass(cls):
    shutil.rmtree(cls.folder)
    super().tearDownClass()

  def _compare(self, side="capsule_reference", **changes):
    request = conformance.Request(
        checkpoint=str(_FOLDER),
        reference=f"capsule:{self.folder / side}",
        decode_steps=2,
    )
    return conformance.run(dataclasses.replace(request, **changes))

  def test_a_capsule_answers_like_the_reference_that_made_it(self):
    live = _run(arithmetics=_BOTH).report
    offline = self._compare().report
    self.assertEqual(offline["exit_code"], 0)
    for name in _BOTH:
      self.assertEqual(
          offline["arithmetics"][name]["levels"],
          live["arithmetics"][name]["levels"],
      )
      self.assertEqual(
          offline["arithmetics"][name]["taps"],
          live["arithmetics"][name]["taps"],
      )
    self.assertEqual(offline["explanation"], live["explanation"])

  def test_our_own_capsule_has_our_own_bits(self):
    report = self._compare("capsule_ours", arithmetics=("portable",)).report
    self.assertEqual(report["arithmetics"]["portable"]["levels"], _SAME)

  def test_another_contract_is_found_offline(self):
    report = self._compare(
        combine="transformers_eager", arithmetics=("portable",)
    ).report
    first = report["arithmetics"]["portable"]["first_difference"]
    self.assertEqual((first["layer"], first["operator"]),
                     (0, "moe.experts.combine"))

  def test_a_capsule_of_another_checkpoint_is_refused(self):
    copy_ = self.folder / "other"
    shutil.copytree(self.folder / "capsule_reference", copy_)
    path = copy_ / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    manifest["identities"]["portable"]["checkpoint"] = "0" * 64
    path.write_text(json.dumps(manifest), "utf-8")
    with self.assertRaisesRegex(refusal.HarnessError, "another checkpoint"):
      self._compare("other")

  def test_other_prompts_or_steps_are_refused(self):
    with self.assertRaisesRegex(refusal.HarnessError, "2.*not 3"):
      self._compare(decode_steps=3)
    with self.assertRaisesRegex(refusal.HarnessError, "en_sheep"):
      self._compare(prompts=str(_FOLDER / "prompts.json"))

  def test_a_capsule_without_an_envelope_cannot_judge_native_runs(self):
    folder = self.folder / "portable_only"
    folder.mkdir()
    evidence.write_capsules(_run(), folder)
    with self.assertRaisesRegex(refusal.HarnessError, "not 'native'|envelope"):
      self._compare("portable_only/capsule_reference", arithmetics=("native",))
    manifest = capsule.read_manifest(folder / "capsule_reference")
    self.assertEqual(manifest["about"]["envelope"], {})


class RequestTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(reference="vllm"), "vllm"),
      (dict(arithmetics=("exact",)), "exact"),
      (dict(arithmetics=()), "choice"),
      (dict(taps="some"), "some"),
      (dict(decode_steps=-1), "-1"),
  )
  def test_a_request_that_means_nothing_is_refused(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      conformance.Request(checkpoint="x", **changes)

  def test_a_combine_of_another_output_dtype_is_refused(self):
    path = pathlib.Path(tempfile.mkdtemp()) / "contract.json"
    path.write_text(
        json.dumps(document.to_dict(named_combines.named("vllm_marlin"))),
        "utf-8",
    )
    with self.assertRaisesRegex(refusal.HarnessError, "float16.*bfloat16"):
      conformance.run(
          conformance.Request(str(_FOLDER), combine=str(path))
      )

  def test_a_checkpoint_without_prompts_needs_some(self):
    folder = pathlib.Path(tempfile.mkdtemp()) / "copy"
    shutil.copytree(_FOLDER, folder)
    (folder / "prompts.json").unlink()
    with self.assertRaisesRegex(refusal.HarnessError, "prompts.json"):
      conformance.run(conformance.Request(str(folder)))


if __name__ == "__main__":
  absltest.main()
