"""The records of device runs say what the notes and the README say of them.

A device is not at hand here; what can be checked is that a record is whole,
that its parts belong together, and that machines agree where they must.
"""

import hashlib
import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import document
from moejax.numerics.packed import activation
from moejax.protocols.performance import validate
from moejax.protocols.route_block import request as request_lib

_EXPERIMENTS = pathlib.Path(__file__).parents[2] / "experiments"
_RECORDS = _EXPERIMENTS / "records"
_CHECKPOINTS = _EXPERIMENTS / "checkpoints"
_SURFACES = ("w13", "activation", "routed_w2", "final")


def _read(name: str) -> dict:
  return json.loads((_RECORDS / name).read_text("utf-8"))


def _bits(score) -> dict:
  """{(arm, history): digests of the surfaces and of the membership}."""
  return {
      (row["arm"], row["history"]): tuple(
          row[name] for name in ("membership", *_SURFACES)
      )
      for row in score["trajectories"]
  }


class AwqBitsTest(absltest.TestCase):

  def test_counts_add_up_and_nothing_differs(self):
    record = _read("awq_bits_h200.json")
    self.assertEqual(record["schema"], "awq_bits/2")
    self.assertGreaterEqual(record["fixtures"], 100)
    self.assertEqual(
        record["elements"],
        sum(record["surfaces"][s]["elements"] for s in _SURFACES),
    )
    for part in (record, *record["surfaces"].values()):
      self.assertEqual(
          part["mismatches"],
          {"oracle_pallas": 0, "oracle_vllm": 0, "pallas_vllm": 0},
      )


class RouteBlockTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    record = _read("route_block_h200.json")
    cls.studies = {study["name"]: study for study in record["studies"]}
    cls.cpu = _read("route_block_oracle.json")

  def test_every_study_was_accepted_by_one_source(self):
    self.assertLen(self.studies, 8)
    sources = {s["score"]["source"] for s in self.studies.values()}
    self.assertLen(sources, 1)
    for name, study in self.studies.items():
      backend = name.split("_")[0]
      self.assertTrue(study["score"]["accepted"], name)
      self.assertEqual(study["score"]["cells"], 70, name)
      self.assertEqual(study["run"]["binary"], study["score"]["binary"], name)
      self.assertEqual(study["score"]["backend"], backend)
      self.assertEqual(
          study["run"]["binary"]["device"],
          "cpu" if backend == "oracle" else "NVIDIA H200",
      )

  @parameterized.parameters(
      ("published", 246, 200, ("oracle", "pallas")),
      ("h200", 528, 132, ("oracle", "pallas", "vllm")),
      ("n128", 396, 132, ("oracle", "pallas", "vllm")),
  )
  def test_backends_agree_in_every_cell(self, name, grid, other, backends):
    scores = [self.studies[f"{b}_{name}"]["score"] for b in backends]
    for score in scores:
      request = document.from_dict(
          request_lib.StudyRequest, score["request"]
      )
      self.assertEqual((request.grid, request.other_grid), (grid, other))
      self.assertEqual(_bits(score), _bits(scores[0]))
    counted = [c for score in scores for c in score["agreement"]]
    self.assertNotEmpty(counted)
    for count in counted:
      self.assertEqual(count["differing"], dict.fromkeys(_SURFACES, 0))
      self.assertEqual(count["cells"], 70)
    self.assertTrue(any(score["replayed"] for score in scores))

  def test_an_h200_has_the_bits_of_the_oracle_on_another_machine(self):
    for backend in ("oracle", "pallas"):
      score = self.studies[f"{backend}_published"]["score"]
      self.assertEqual(score["request"], self.cpu["score"]["request"])
      self.assertEqual(_bits(score), _bits(self.cpu["score"]))

  def test_histories_differ_on_all_four_surfaces(self):
    for study in self.studies.values():
      rows = {
          row["surface"]: row
          for row in study["score"]["differences"]
          if (row["one"], row["other"]) == ("native H0", "native H1")
      }
      for name in _SURFACES:
        self.assertGreater(rows[name]["elements"], 0)


class PerformanceTest(absltest.TestCase):

  def test_the_measurement_holds_with_its_seal(self):
    found = validate.validate(
        _RECORDS / "packed_performance_h200",
        seal=(
            "4f55e33159363754ec93910402abeb5250bbfcd02a772e9e80cd64a8c515304b"
        ),
    )
    self.assertTrue(found["valid"], found["detail"])
    points = found["result"]["points"]
    self.assertFalse(found["result"]["interpreted"])
    self.assertLen(points, 5)
    stable = [
        next(c for c in p["comparisons"] if c["arm"] == "vllm_stable")
        for p in points
    ]
    self.assertEqual(
        [c["verdict"] for c in stable], ["inferior"] + 4 * ["non_inferior"]
    )
    for point in points:  # "different_bits" would be told here.
      pallas = [
          c for c in point["comparisons"] if c["arm"].startswith("pallas")
      ]
      self.assertEqual([c["verdict"] for c in pallas], 2 * ["described"])


class SiluTest(absltest.TestCase):

  def test_who_promises_the_contracts_table_has_it(self):
    record = _read("silu_tables_h200.json")
    contract = {
        dtype: activation.table_digest(activation.silu_table(dtype))
        for dtype in ("float16", "bfloat16")
    }
    self.assertEqual(record["contract"], contract)
    promised = [
        row for row in record["tables"]
        if row["backend"] in ("oracle", "pallas", "vllm")
    ]
    self.assertLen(promised, 6)
    for row in promised:
      self.assertEqual(row["digest"], contract[row["dtype"]], row)


class TrainingTest(absltest.TestCase):

  def test_the_shipped_models_are_the_recorded_ones(self):
    names = []
    for run in _read("training_h200.json")["runs"]:
      record = run["record"]
      names.append(record["name"])
      folder = _CHECKPOINTS / record["name"]
      self.assertEqual(
          json.loads((folder / "training.json").read_text("utf-8")), record
      )
      sizes = {p.name: p.stat().st_size for p in folder.iterdir()}
      self.assertLess(max(sizes.values()), 8e6)
      self.assertLess(sum(sizes.values()), 10e6)
      for name, digest in record["sha256"].items():
        content = (folder / name).read_bytes()
        self.assertEqual(hashlib.sha256(content).hexdigest(), digest, name)
    self.assertEqual(names, ["small_deepseek_v4", "small_qwen3_moe"])

  def test_both_languages_are_better_known_than_by_pairs_and_no_expert_is_dead(
      self,
  ):
    for run in _read("training_h200.json")["runs"]:
      record = run["record"]
      self.assertTrue(record["complete"])
      for language in ("en", "zh"):
        found = record["validation"][language]["nats"]
        self.assertLess(found, record["baselines"][language]["bigram"] - 0.9)
      self.assertLen(record["experts"], 8)
      for layer in record["experts"].values():
        self.assertEqual(layer["dead"], [])
        self.assertGreater(min(layer["load"]), 0.03)

  def test_training_again_gave_the_same_bytes(self):
    record = _read("training_h200.json")
    self.assertLen(record["earlier_run"], 2)
    for earlier, run in zip(
        record["earlier_run"], record["runs"], strict=True
    ):
      digests = {
          name: digest for name, digest in run["record"]["sha256"].items()
          if name.endswith(".safetensors")
      }
      self.assertLen(digests, 2)
      self.assertEqual(earlier["sha256"], digests)

  def test_a_killed_run_went_on_with_the_same_losses(self):
    resume = _read("training_h200.json")["resume"]
    self.assertLen(resume["uninterrupted"], 60)
    self.assertEqual(resume["resumed"], resume["uninterrupted"])


class IncidenceTest(absltest.TestCase):

  def test_the_stable_plan_leaves_one_output_and_the_kernel_does_not(self):
    entries = _read("route_incidence_h200.json")["entries"]
    self.assertCountEqual(
        ((e["tokens"], e["prelude"]) for e in entries),
        [(m, p) for m in (8, 21, 64, 256) for p in ("none", "allocations")],
    )
    for entry in entries:
      self.assertEqual(entry["calls"], 1000)
      self.assertEqual(entry["stable"]["final"], 1)
      if entry["tokens"] == 256:
        self.assertGreater(entry["kernel"]["final"], 900)


if __name__ == "__main__":
  absltest.main()
