"""An honest study is accepted; each change to it is rejected for its reason."""

import dataclasses
import hashlib
import json
import pathlib
import shutil
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import safetensors.numpy

from moejax.contracts import document
from moejax.contracts import refusal
from moejax.protocols.route_block import checks
from moejax.protocols.route_block import identity
from moejax.protocols.route_block import score as lib
from moejax.protocols.route_block import store
from moejax.protocols.route_block import tables
from tests.protocols.route_block import sample

_CELL = "008_exchange_across_H0_0"


def _edit(change, cell=_CELL):
  """A mutation of one record of cells.jsonl."""

  def mutate(place: pathlib.Path):
    path = place / store.CELLS
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(next(r for r in records if r["cell"] == cell))
    path.write_text("".join(json.dumps(r) + "\n" for r in records))

  return mutate


def _edit_manifest(change):
  def mutate(place: pathlib.Path):
    path = place / store.MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))

  return mutate


def _swap_routes(record):
  """Two routes of two experts stand in each other's place."""
  rows = record["sorted_routes"]
  rows[0][0], rows[5][0] = rows[5][0], rows[0][0]


def _move_block(record):
  record["block_experts"][0] = 1


def _exchange_back(record):
  """A legal plan, but not the declared one: the history's own."""
  rows = record["sorted_routes"]
  rows[6][0], rows[7][0] = rows[7][0], rows[6][0]


def _turn_bit(place: pathlib.Path):
  """One bit of the last tensor in the file."""
  path = place / store.RAW / f"{_CELL}.safetensors"
  content = bytearray(path.read_bytes())
  content[-1] ^= 1
  path.write_bytes(content)


def _replace_tensor(place: pathlib.Path):
  """One bit, with all digests made to fit: only the replicates tell."""
  path = place / store.RAW / f"{_CELL}.safetensors"
  tensors = safetensors.numpy.load_file(path)
  tensors["w13"].view(np.uint16)[0, 0] ^= 1
  path.write_bytes(safetensors.numpy.save(tensors))

  def change(record):
    record["file_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    record["stages"]["w13"] = hashlib.sha256(
        tensors["w13"].tobytes()
    ).hexdigest()

  _edit(change)(place)


def _consistent_binary(manifest):
  manifest["binary"]["versions"]["numpy"] = "1"
  manifest["binary"]["digest"] = identity.binary_digest(manifest["binary"])


def _set(field, value):
  return lambda record: record.update({field: value})


def _wrong_dtype(place: pathlib.Path):
  path = place / store.RAW / f"{_CELL}.safetensors"
  tensors = safetensors.numpy.load_file(path)
  tensors["final"] = tensors["final"].astype(np.float32)
  path.write_bytes(safetensors.numpy.save(tensors))
  digest = hashlib.sha256(path.read_bytes()).hexdigest()
  _edit(_set("file_sha256", digest))(place)


def _other_inputs(place: pathlib.Path):
  tensors = safetensors.numpy.load_file(place / store.FIXTURE)
  tensors["gates"][0, 0] += np.float32(0.25)
  (place / store.FIXTURE).write_bytes(safetensors.numpy.save(tensors))


# The seven mutations of the published study, by the reason that each deserves.
_SEVEN = (
    ("route", _edit(_swap_routes)),
    ("expert_block", _edit(_move_block)),
    ("treatment", _edit(lambda r: r["treatment"].update(arm="native"))),
    ("grid", _edit(_set("grid", 22))),
    ("stage_hash", _edit(lambda r: r["stages"].update(w13="0" * 64))),
    ("raw_tensor", _turn_bit),
    ("source_identity", _edit(_set("source", "0" * 64))),
    ("binary_identity", _edit(_set("binary", "0" * 64))),
)
_MORE = (
    ("route", _edit(_exchange_back)),
    ("route", _edit(lambda r: r["membership"][0][2].pop())),
    ("route", _edit(_set("membership_digest", "0" * 64))),
    ("expert_block", _edit(lambda r: r["block_experts"].pop())),
    ("treatment", _edit(lambda r: r["treatment"].update(changed_places=None))),
    ("treatment", _edit(lambda r: r["treatment"].pop("injected"))),
    ("grid", _edit(lambda r: r["treatment"].update(grid=22))),
    ("schedule", _edit(lambda r: r["schedule"].update(w2="0" * 16))),
    ("contract", _edit(_set("contract", "0" * 64))),
    ("contract", _edit_manifest(
        lambda m: m["contracts"]["14"]["w13"]["mma"].update(fraction_bits=24)
    )),
    ("stage_hash", _edit(lambda r: r["stages"].pop("final"))),
    ("stage_hash", _edit(lambda r: r["stages"].update(more="0" * 64))),
    ("raw_tensor", lambda p: (
        p / store.RAW / f"{_CELL}.safetensors").unlink()),
    ("raw_tensor", lambda p: (
        p / store.RAW / f"{_CELL}.safetensors").write_bytes(b"short")),
    ("raw_tensor", _wrong_dtype),
    ("replicates", _replace_tensor),
    ("source_identity", _edit_manifest(_set("source", "0" * 64))),
    ("binary_identity", _edit_manifest(
        lambda m: m["binary"]["files"].update(numpy="0" * 64)
    )),
    ("binary_identity", _edit_manifest(_consistent_binary)),
    ("binary_identity", _edit_manifest(_set("backend", "vllm"))),
    ("fixture", _edit_manifest(
        lambda m: m["fixture"].update(weights="0" * 64)
    )),
    ("fixture", _other_inputs),
    ("fixture", lambda p: (p / store.FIXTURE).unlink()),
    ("foreign_files", lambda p: (p / store.RAW / "more").write_text("x")),
    ("foreign_files", lambda p: (p / "notes.txt").write_text("x")),
)


def _drop_cell(place):
  path = place / store.CELLS
  lines = path.read_text().splitlines(keepends=True)
  path.write_text("".join(lines[:8] + lines[9:]))


def _exchange_lines(place):
  path = place / store.CELLS
  lines = path.read_text().splitlines(keepends=True)
  path.write_text("".join([*lines[:8], lines[9], lines[8], *lines[10:]]))


def _repeat_cell(place):
  path = place / store.CELLS
  lines = path.read_text().splitlines(keepends=True)
  path.write_text("".join([*lines, lines[-1]]))


_CELLS = tuple(
    ("cells", m) for m in (_drop_cell, _exchange_lines, _repeat_cell)
)


class ScoreTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    root = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.study = sample.make(pathlib.Path(root) / "study")

  def _mutated(self, mutate) -> pathlib.Path:
    place = sample.folder(self) / "study"
    shutil.copytree(self.study, place)
    mutate(place)
    return place

  def test_an_honest_study_is_accepted(self):
    request = dataclasses.replace(sample.REQUEST, replicates=5)
    study = sample.make(sample.folder(self) / "study", request)
    found = lib.score(study, sample.SOURCE)
    self.assertEqual(
        (found["schema"], found["accepted"], found["reason"], found["cells"]),
        ("route_block_score/1", True, None, 70),
    )
    self.assertFalse(found["binary_pinned"])
    self.assertLen(found["trajectories"], 14)
    moved = found["moved_routes"]
    self.assertLen(moved["between_histories"], 6)
    self.assertLen(moved["left_after_exchange"], 4)
    self.assertEqual(document.canonical_json(json.loads(json.dumps(found))),
                     document.canonical_json(found))

  def test_three_trajectories_and_their_differences(self):
    found = lib.score(self.study, sample.SOURCE)
    surfaces = ("w13", "activation", "routed_w2", "final")
    at_grid = {
        tuple(t[s] for s in surfaces) for t in found["trajectories"]
        if t["arm"] != "other_grid"
    }
    self.assertLen(at_grid, 3)
    counts = {
        (d["one"], d["other"], d["surface"]): d["elements"]
        for d in found["differences"]
    }
    natives = [counts["native H0", "native H1", s] for s in surfaces]
    self.assertEqual(natives, [1, 1, 11, 2])  # Of this seed; measured.
    grids = [counts["other_grid H0", "other_grid H1", s] for s in surfaces]
    self.assertEqual(grids, [0, 0, 0, 0])

  @parameterized.parameters(*_SEVEN, *_MORE, *_CELLS)
  def test_a_mutation_is_rejected(self, reason, mutate):
    place = self._mutated(mutate)
    pin = store.read_manifest(self.study)["binary"]["digest"]
    found = lib.score(place, sample.SOURCE, pin)
    self.assertEqual((found["accepted"], found["reason"]), (False, reason),
                     found["detail"])
    self.assertNotEmpty(found["detail"])
    self.assertNotIn("trajectories", found)

  def test_another_source_than_the_scorers_is_rejected(self):
    found = lib.score(self.study, "6" * 64)
    self.assertEqual(found["reason"], "source_identity")

  def test_another_binary_than_the_pinned_one_is_rejected(self):
    found = lib.score(self.study, sample.SOURCE, "6" * 64)
    self.assertEqual(found["reason"], "binary_identity")

  def test_a_consistent_change_of_the_request_is_no_study_of_its_seed(self):
    def change(manifest):
      manifest["request"]["seed"] += 1
    found = lib.score(self._mutated(_edit_manifest(change)), sample.SOURCE)
    self.assertEqual(found["reason"], "fixture")

  @parameterized.parameters(
      (lambda p: (p / store.MANIFEST).unlink(), "no manifest"),
      (_edit_manifest(_set("schema", "route_block_study/2")), "study/2"),
      (_edit_manifest(_set("backend", "triton")), "triton"),
      (_edit_manifest(_set("request", [])), "request is no dict"),
      (_edit_manifest(lambda m: m["request"].pop("seed")), "seed"),
      (_edit_manifest(lambda m: m["request"].update(tokens=0)), "tokens=0"),
      (lambda p: (p / store.MANIFEST).write_text("{"), "manifest.json"),
      (lambda p: (p / store.CELLS).unlink(), "cells.jsonl"),
      (lambda p: (p / store.CELLS).write_text("{}\n"), "missing fields"),
      (_edit(_set("grid", "14")), "grid='14' is no int"),
      (_edit(_set("treatment", [])), "treatment is no object"),
      (_edit(_set("sorted_routes", 3)), "sorted_routes is no list"),
  )
  def test_what_is_no_study_is_refused(self, mutate, message):
    place = self._mutated(mutate)
    with self.assertRaisesRegex(refusal.HarnessError, message):
      lib.score(place, sample.SOURCE)

  def test_a_reason_must_be_one_of_the_list(self):
    with self.assertRaisesRegex(ValueError, "no reason"):
      checks.Rejected("bad", "")

  def test_tables(self):
    out = sample.folder(self) / "tables"
    tables.write(lib.score(self.study, sample.SOURCE), out)
    rows = {
        name: [
            line.split("\t")
            for line in (out / name).read_text().splitlines()
        ]
        for name in tables.NAMES
    }
    self.assertEqual([len(t) for t in rows.values()], [15, 21, 3])
    for table in rows.values():
      self.assertLen({len(row) for row in table}, 1)
    self.assertEqual(
        rows["route_block_differences.tsv"][1][:4],
        ["native H0", "native H1", "w13", "1"],
    )


def _copy_of(arm, history, surfaces=("w13", "activation", "routed_w2",
                                     "final")):
  """Claims the surfaces of another cell."""
  def change(found, seen):
    other = seen[arm, history]
    return found._replace(**{s: getattr(other, s) for s in surfaces})
  return change


class RelationTest(parameterized.TestCase):
  """Consistent lies: all digests and all replicates agree."""

  def _score(self, cells, change, request=sample.REQUEST):
    place = sample.folder(self) / "study"
    sample.make(place, request, sample.lying(cells, change))
    return lib.score(place, sample.SOURCE)

  @parameterized.parameters(
      "own_plan", "other_plan", "swap_inside", "exchange_across", "other_grid",
      "stable",
  )
  def test_an_arm_that_shows_something_else(self, arm):
    found = self._score(
        lambda c: (c.arm, c.history) == (arm, "H1"),
        lambda s, _: sample.turned(s, "w13"),
    )
    self.assertEqual(found["reason"], "relation")
    self.assertStartsWith(found["detail"], arm)

  @parameterized.parameters("w13", "activation", "routed_w2", "final")
  def test_natives_must_differ_on_every_surface(self, surface):
    found = self._score(
        lambda c: (c.arm, c.history) == ("native", "H1"),
        _copy_of("native", "H0", (surface,)),
    )
    self.assertEqual(found["reason"], "relation")
    self.assertEqual(
        found["detail"], f"native: {surface} is the same on both histories."
    )

  @parameterized.parameters("H0", "H1")
  def test_stable_must_be_a_third_trajectory(self, history):
    found = self._score(
        lambda c: c.arm == "stable", _copy_of("native", history)
    )
    self.assertEqual(found["reason"], "relation")
    self.assertIn("no third trajectory", found["detail"])

  @parameterized.parameters("w13", "activation", "routed_w2", "final")
  def test_a_difference_that_the_planner_forbids(self, surface):
    # Row 0 belongs to a route (token) that no plan moves across classes.
    found = self._score(
        lambda c: c.arm == "stable",
        lambda s, _: sample.turned(s, surface, *self._untouched(surface)),
    )
    self.assertEqual(found["reason"], "consequences", found["detail"])
    self.assertIn(surface, found["detail"])

  def _untouched(self, surface):
    place = sample.folder(self) / "honest"
    found = lib.score(sample.make(place), sample.SOURCE)
    touched = {
        row for d in found["differences"] if d["surface"] == surface
        for row in d["rows"]
    }
    return next(r for r in range(9) if r not in touched), 0

  def test_one_replicate_that_differs(self):
    found = self._score(
        lambda c: (c.arm, c.history, c.replicate) == ("native", "H0", 1),
        lambda s, _: sample.turned(s, "final"),
    )
    self.assertEqual(found["reason"], "replicates")
    self.assertIn("native_H0_1", found["detail"])

  def test_a_consistent_lie_that_only_the_oracle_sees(self):
    # W13 of all cells alike, in one element that no arm changes.
    place = sample.folder(self) / "study"
    sample.make(place, how=sample.lying(
        lambda _: True, lambda s, _: sample.turned(s, "w13")
    ))
    self.assertTrue(lib.score(place, sample.SOURCE)["accepted"])
    found = lib.score(place, sample.SOURCE, replay=sample.compute)
    self.assertEqual(found["reason"], "oracle")
    self.assertEqual(found["detail"], "native H0: w13 is not the oracle's.")
    honest = sample.make(sample.folder(self) / "study")
    found = lib.score(honest, sample.SOURCE, replay=sample.compute)
    self.assertTrue(found["accepted"] and found["replayed"])

  def test_a_fixture_whose_histories_do_not_part_is_rejected(self):
    request = dataclasses.replace(sample.REQUEST, seed=3)
    found = self._score(lambda _: False, None, request)
    self.assertEqual(found["reason"], "relation")
    self.assertStartsWith(found["detail"], "native")


if __name__ == "__main__":
  absltest.main()
