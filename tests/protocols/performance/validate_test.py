"""The validator: a run holds, and each change of it is seen for its reason."""

import contextlib
import json
import pathlib
import shutil
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import document
from moejax.contracts import refusal
from moejax.protocols.performance import protocol as protocol_lib
from moejax.protocols.performance import store
from moejax.protocols.performance import validate as lib
from tests.protocols.performance import sample

_FIRST = f"{store.SAMPLES}/{sample.PROTOCOL.points[0].name}.jsonl"
_SECOND = f"{store.SAMPLES}/{sample.PROTOCOL.points[1].name}.jsonl"


@contextlib.contextmanager
def _json(path: pathlib.Path):
  """Gives the values of a JSON file to be changed."""
  values = json.loads(path.read_text())
  yield values
  store.write(path, values)


@contextlib.contextmanager
def _lines(place: pathlib.Path, name: str = _FIRST):
  """Gives the values of the lines of a file to be changed."""
  path = place / name
  values = [json.loads(line) for line in path.read_text().splitlines()]
  yield values
  path.write_text(
      "".join(document.canonical_json(v) + "\n" for v in values)
  )


def _set(values, **fields):
  values.update(fields)


def _heads(place: pathlib.Path) -> None:
  """Makes the heads of the samples fit the files before them."""
  for name in (_FIRST, _SECOND):
    with _lines(place, name) as lines:
      lines[0] = store.head(place, lines[0]["point"])


def _swap(lines, a, b):
  """Exchanges two samples and leaves the times in order."""
  for key in ("round", "arm", "ns"):
    lines[a][key], lines[b][key] = lines[b][key], lines[a][key]


class ValidateTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.whole = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory())
    ) / "run"
    cls.result = sample.make(cls.whole)

  def setUp(self):
    super().setUp()
    self.place = sample.folder(self) / "run"
    shutil.copytree(self.whole, self.place)

  def rejected(self, reason: str, detail: str = ".", **pins):
    found = lib.validate(self.place, **pins)
    self.assertEqual(
        (found["valid"], found["reason"]), (False, reason), found["detail"]
    )
    self.assertRegex(found["detail"], detail)
    self.assertNotIn("result", found)

  def reseal(self):
    store.seal(self.place, sample.PROTOCOL)

  def test_a_run_is_valid_and_its_result_is_derived(self):
    found = lib.validate(self.place)
    self.assertTrue(found["valid"], found["detail"])
    self.assertEqual(
        found["result"] | {"seal": found["seal"]}, self.result
    )
    self.assertEqual(found["samples"], 2 * 8 * 4)
    self.assertFalse(found["seal_pinned"] or found["source_pinned"])
    pinned = lib.validate(self.place, self.result["seal"], sample.SOURCE)
    self.assertTrue(pinned["valid"])
    self.assertTrue(pinned["seal_pinned"] and pinned["source_pinned"])

  def test_pins(self):
    self.rejected("seal", "expected 00", seal="00")
    self.rejected("source", "expected 00", source="00")

  @parameterized.parameters(
      store.PROTOCOL, store.RUN, store.RESULT, _FIRST, _SECOND
  )
  def test_a_file_that_changed_after_the_seal(self, name):
    path = self.place / name
    text = path.read_text()
    path.write_text(text + "\n")
    self.rejected("file_digest", name)
    path.unlink()
    if name == store.PROTOCOL:
      with self.assertRaisesRegex(refusal.HarnessError, "is no run"):
        lib.validate(self.place)
    else:
      self.rejected("files", name)

  def test_a_stopped_run_is_incomplete(self):
    (self.place / store.MANIFEST).unlink()
    self.rejected("incomplete")
    (self.place / store.RESULT).unlink()
    (self.place / _SECOND).unlink()
    self.rejected("incomplete")

  @parameterized.parameters("notes.txt", f"{store.SAMPLES}/other.jsonl")
  def test_a_foreign_file(self, name):
    (self.place / name).write_text("x")
    self.rejected("files", name)

  def test_a_manifest_of_fewer_files(self):
    with _json(self.place / store.MANIFEST) as values:
      del values["files"][_FIRST]
    self.rejected("files", _FIRST)

  @parameterized.parameters({"schema": "other"}, {"files": []})
  def test_no_seal(self, **fields):
    with _json(self.place / store.MANIFEST) as values:
      values.update(fields)
    self.rejected("seal", store.SEAL_SCHEMA)

  def test_a_changed_protocol(self):
    path = self.place / store.PROTOCOL
    with _json(path) as values:
      values["protocol"]["comparisons"][0]["margin"] = 1.5
    self.reseal()
    self.rejected("protocol", "its digest is")
    with _json(path) as values:  # With its digest.
      values["digest"] = protocol_lib.digest(values)
    self.reseal()
    self.rejected("protocol", "the run followed")
    with _json(self.place / store.RUN) as run:  # And the run's word for it.
      run["protocol"] = values["digest"]
    self.reseal()
    self.rejected("protocol", "begun under another declaration")

  @parameterized.parameters(
      ("rules", "interval", "percentile"), ("arms", "vllm_stable", {}),
      ("schema", None, "other/1"),
  )
  def test_other_words_of_a_protocol(self, part, key, value):
    with _json(self.place / store.PROTOCOL) as values:
      if key is None:
        values[part] = value
      else:
        values[part][key] = value
      values["digest"] = protocol_lib.digest(values)
    self.reseal()
    self.rejected("protocol", f"{part}.* is not what")

  @parameterized.parameters('{"digest": NaN}', "[]", "{", '{"digest": "0"}')
  def test_no_protocol(self, text):
    (self.place / store.PROTOCOL).write_text(text)
    self.rejected("protocol")

  def test_a_protocol_with_a_foreign_field(self):
    with _json(self.place / store.PROTOCOL) as values:
      values["protocol"]["drop_outliers"] = True
      values["digest"] = protocol_lib.digest(values)
    self.rejected("protocol", "its fields are")

  @parameterized.parameters(
      ("missing_sample", lambda lines: lines.pop(7)),
      ("missing_sample", lambda lines: lines.pop()),
      ("doubled_sample", lambda lines: lines.append(dict(
          lines[-1], start_ns=lines[-1]["start_ns"] + 10**6))),
      ("doubled_sample", lambda lines: _set(lines[9], round=0)),
      ("order", lambda lines: _swap(lines, 5, 6)),
      ("order", lambda lines: lines.append(dict(
          lines[-1], round=8, start_ns=lines[-1]["start_ns"] + 10**6))),
      ("order", lambda lines: lines.append(dict(
          lines[-1], arm="vllm_w13", start_ns=lines[-1]["start_ns"] + 10**6))),
      ("time", lambda lines: _set(lines[4], ns=0)),
      ("time", lambda lines: _set(lines[4], ns=-5)),
      ("time", lambda lines: _set(lines[4], ns=10**9)),
      ("time", lambda lines: _set(lines[4], start_ns=1)),
      ("time", lambda lines: _set(lines[1], start_ns=-1)),
      ("sample", lambda lines: _set(lines[4], ns=1000.0)),
      ("sample", lambda lines: _set(lines[4], ns=True)),
      ("sample", lambda lines: _set(lines[4], round="1")),
      ("sample", lambda lines: _set(lines[4], note="slow")),
      ("sample", lambda lines: lines[4].pop("start_ns")),
      ("sample", lambda lines: lines.__setitem__(4, [1])),
      ("result", lambda lines: _set(lines[9], ns=lines[9]["ns"] - 1)),
      ("protocol", lambda lines: _set(lines[0], point="m9")),
      ("protocol", lambda lines: _set(lines[0], run="0" * 64)),
      ("protocol", lambda lines: lines.clear()),
  )
  def test_changed_samples_under_a_new_seal(self, reason, change):
    with _lines(self.place) as lines:
      change(lines)
    self.rejected("file_digest", "was changed after the seal")
    self.reseal()
    self.rejected(reason)

  def test_samples_that_began_before_those_of_the_point_before(self):
    with _lines(self.place, _SECOND) as lines:
      _set(lines[1], start_ns=5)
    self.reseal()
    self.rejected("time", "began before")

  def test_a_line_that_is_cut_off(self):
    path = self.place / _FIRST
    path.write_text(path.read_text()[:-9])
    self.reseal()
    self.rejected("sample")

  @parameterized.parameters(
      ("run", lambda run: run.pop("environment")),
      ("run", lambda run: _set(run, schema="other")),
      ("run", lambda run: _set(run, comment="x")),
      ("run", lambda run: _set(run, outputs=[])),
      ("binary", lambda run: _set(run["binary"], device="h200")),
      ("arms", lambda run: run["arms"].pop("vllm_w13")),
      ("arms", lambda run: _set(run["arms"], vllm_w13="")),
      ("arms", lambda run: _set(run["arms"], vllm_layer="supported")),
      ("arms", lambda run: _set(run["arms"], vllm_w13="supported")),
      ("arms", lambda run: run["outputs"].popitem()),
      ("outputs", lambda run: _set(
          run["outputs"][sample.PROTOCOL.points[0].name], oracle_layer="no")),
      # An arm that has samples is declared to have none.
      ("order", lambda run: [
          _set(run["arms"], vllm_stable="broken"),
          *(of.pop("vllm_stable") for of in run["outputs"].values())]),
      # Other outputs change what may be compared.
      ("result", lambda run: _set(
          run["outputs"][sample.PROTOCOL.points[0].name],
          oracle_layer="0" * 64)),
  )
  def test_a_changed_run_under_new_heads_and_a_new_seal(self, reason, change):
    with _json(self.place / store.RUN) as run:
      change(run)
    self.reseal()
    if reason in ("order", "result"):
      self.rejected("protocol", "begun under another declaration")
    _heads(self.place)
    self.reseal()
    self.rejected(reason)

  @parameterized.parameters(
      ("verdicts", lambda r: _set(
          r["verdicts"], **{"pallas_w13/vllm_w13": "non_inferior"})),
      ("ratio", lambda r: _set(r["points"][1]["comparisons"][0], ratio=1.0)),
      ("upper", lambda r: _set(r["points"][0]["comparisons"][0], upper=1.01)),
      ("median", lambda r: _set(
          r["points"][0]["arms"]["vllm_native"], median_ns=1003)),
      ("float", lambda r: _set(
          r["points"][0]["arms"]["vllm_native"], median_ns=1004.0)),
      ("interpreted", lambda r: _set(r, interpreted=True)),
      ("extra", lambda r: _set(r, remark="fast")),
  )
  def test_a_result_that_does_not_follow(self, name, change):
    del name
    with _json(self.place / store.RESULT) as result:
      change(result)
    self.reseal()
    self.rejected("result", "does not follow")

  def test_no_run(self):
    with self.assertRaisesRegex(refusal.HarnessError, "is no run"):
      lib.validate(sample.folder(self))


if __name__ == "__main__":
  absltest.main()
