"""A run: what it writes and when, and what becomes of its samples."""

import dataclasses
import gc
import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import refusal
from moejax.protocols.performance import protocol as protocol_lib
from moejax.protocols.performance import run as lib
from moejax.protocols.performance import store
from moejax.protocols.performance import validate
from tests.protocols.performance import sample

_ABLE = tuple(sample.TIMES)


class RunTest(parameterized.TestCase):

  def test_samples_are_taken_and_appended_in_the_declared_order(self):
    place = sample.folder(self) / "run"
    clock = sample.Clock()
    maker = sample.maker(clock)
    lib.run(sample.PROTOCOL, maker, place, now=clock)
    slots = list(sample.PROTOCOL.slots(_ABLE))
    tokens = {p.name: p.tokens for p in sample.PROTOCOL.points}
    backend = maker.backends[-1]
    self.assertEqual(
        backend.calls, [(s.arm, tokens[s.point]) for s in slots]
    )
    self.assertEqual(
        backend.loaded, [(3, 3, "bfloat16"), (3, 3, "float16")]
    )
    for point in sample.PROTOCOL.points:
      head, *lines = map(json.loads, (
          place / store.SAMPLES / f"{point.name}.jsonl"
      ).read_text().splitlines())
      self.assertEqual(head["protocol"], store.file_digest(
          place / store.PROTOCOL
      ))
      wanted = [s for s in slots if s.point == point.name]
      self.assertEqual(
          [(line["round"], line["arm"]) for line in lines],
          [(s.round, s.arm) for s in wanted],
      )
      counts = dict.fromkeys(_ABLE, 0)
      for line in lines:
        arm = line["arm"]
        self.assertEqual(line["ns"], sample.TIMES[arm](counts[arm]))
        counts[arm] += 1
    self.assertTrue(gc.isenabled())

  def test_the_protocol_is_on_disk_before_anything_and_the_seal_last(self):
    place = sample.folder(self) / "run"
    seen = []

    class Watching(sample.Backend):

      def look(self):
        seen.append(sorted(p.name for p in place.iterdir()))

      def load(self, *args):
        self.look()

      def prepare(self, arm, work):
        prepared = super().prepare(arm, work)

        def watched():
          self.look()
          return prepared.sample()

        return prepared._replace(sample=watched)

    clock = sample.Clock()
    maker = sample.maker(clock)
    maker = dataclasses.replace(
        maker, backends=[Watching(clock, sample.TIMES)]
    )
    lib.run(sample.PROTOCOL, maker, place, now=clock)
    self.assertEqual(seen[0], [store.PROTOCOL, store.SAMPLES])
    taking = [store.PROTOCOL, store.RUN, store.SAMPLES]
    self.assertEqual(seen[2:], [taking] * (2 * 8 * len(_ABLE)))
    self.assertEqual(
        sorted(p.name for p in place.iterdir()),
        sorted((*taking, store.RESULT, store.MANIFEST)),
    )

  def test_result(self):
    found = sample.make(sample.folder(self) / "run")
    self.assertEqual(found["verdicts"], {
        "vllm_stable/vllm_native": "non_inferior",
        "pallas_layer/oracle_layer": "described",
        "pallas_w13/vllm_w13": "unsupported",
    })
    first, second = found["points"]
    self.assertEqual(first["arms"]["vllm_w13"], "no extension")
    # Of samples 1 to 7 the fourth: 1004 ns for two requests.
    self.assertEqual(first["arms"]["vllm_native"], {
        "median_ns": 1004, "least_ns": 1001, "largest_ns": 1007,
        "median_us_per_request": 0.502,
    })
    stable, layers, w13 = first["comparisons"]
    self.assertEqual(stable["ratio_of_medians"], 1014 / 1004)
    self.assertEqual(
        (layers["lower"], layers["ratio"], layers["upper"]),
        (314 / 900, 328 / 900, 342 / 900),
    )
    self.assertNotIn("ratio", w13)
    self.assertEqual(second["point"], sample.PROTOCOL.points[1].name)

  @parameterized.parameters(
      # The interval is from the second least to the second largest ratio.
      ((1050,) * 7, "non_inferior"),
      ((1050,) * 6 + (5000,), "non_inferior"),
      ((1050,) * 5 + (1051, 5000), "inconclusive"),
      ((1050,) * 2 + (1051,) * 5, "inconclusive"),
      ((1050,) + (1051,) * 6, "inferior"),
      ((1,) + (1051,) * 6, "inferior"),
  )
  def test_verdict(self, stable, verdict):
    times = sample.TIMES | {
        "vllm_native": lambda n: 1000,
        "vllm_stable": lambda n: (1, *stable)[n],
    }
    found = sample.make(sample.folder(self) / "run", times=times)
    self.assertEqual(found["verdicts"]["vllm_stable/vllm_native"], verdict)

  def test_the_worst_point_decides(self):
    counts = []

    def slow_at_the_second_point(number):
      counts.append(number)
      return 1000 if len(counts) <= 8 else 1100

    times = sample.TIMES | {
        "vllm_native": lambda n: 1000,
        "vllm_stable": slow_at_the_second_point,
    }
    found = sample.make(sample.folder(self) / "run", times=times)
    self.assertEqual(
        [p["comparisons"][0]["verdict"] for p in found["points"]],
        ["non_inferior", "inferior"],
    )
    self.assertEqual(found["verdicts"]["vllm_stable/vllm_native"], "inferior")

  def test_times_of_different_results_are_not_compared(self):
    found = sample.make(
        sample.folder(self) / "run", outputs={"pallas_layer": "two",
                                              "vllm_stable": "three"}
    )
    self.assertEqual(found["verdicts"], {
        "vllm_stable/vllm_native": "non_inferior",  # Owe no equal bits.
        "pallas_layer/oracle_layer": "different_bits",
        "pallas_w13/vllm_w13": "unsupported",
    })


class RefusalTest(absltest.TestCase):

  def test_no_arm(self):
    place = sample.folder(self) / "run"
    with self.assertRaisesRegex(
        refusal.UnsupportedError, "vllm_w13: no extension"
    ):
      lib.run(
          sample.PROTOCOL,
          dataclasses.replace(sample.maker(sample.Clock()), backends=[]),
          place,
      )
    self.assertFalse(place.exists())

  def test_an_arm_that_does_not_run_a_point_is_unsupported_at_all(self):
    refused = sample.PROTOCOL.points[1]

    class Partly(sample.Backend):

      def prepare(self, arm, work):
        if arm == "vllm_stable" and len(work.inputs[0].x) == refused.tokens:
          raise refusal.UnsupportedError("too few processors")
        return super().prepare(arm, work)

    place = sample.folder(self) / "run"
    clock = sample.Clock()
    maker = dataclasses.replace(
        sample.maker(clock), backends=[Partly(clock, sample.TIMES)]
    )
    found = lib.run(sample.PROTOCOL, maker, place, now=clock)
    for point in found["points"]:
      self.assertEqual(
          point["arms"]["vllm_stable"], f"{refused.name}: too few processors"
      )
    self.assertEqual(
        found["verdicts"]["vllm_stable/vllm_native"], "unsupported"
    )
    self.assertTrue(validate.validate(place)["valid"])

  def test_a_folder_that_is_not_empty(self):
    place = sample.folder(self)
    (place / "notes").write_text("x")
    with self.assertRaisesRegex(refusal.HarnessError, "not empty .notes"):
      sample.make(place)
    self.assertEqual([p.name for p in place.iterdir()], ["notes"])

  def test_an_earlier_run_is_not_gone_on_with(self):
    place = sample.folder(self) / "run"
    sample.make(place)
    before = store.file_digest(place / store.MANIFEST)
    with self.assertRaisesRegex(refusal.HarnessError, "not gone on with"):
      sample.make(place)
    self.assertEqual(store.file_digest(place / store.MANIFEST), before)

  def test_a_source_that_changes_leaves_no_seal(self):
    place = sample.folder(self) / "run"
    sources = iter(("1" * 64, "2" * 64))
    with self.assertRaisesRegex(refusal.HarnessError, "source file changed"):
      sample.make(place, source=lambda: next(sources))
    self.assertFalse((place / store.MANIFEST).exists())

  def test_a_fault_leaves_no_seal_and_the_collector_on(self):
    place = sample.folder(self) / "run"

    def fails(number):
      if number == 3:
        raise RuntimeError("device lost")
      return 1

    with self.assertRaisesRegex(RuntimeError, "device lost"):
      sample.make(place, times=sample.TIMES | {"vllm_native": fails})
    self.assertFalse((place / store.MANIFEST).exists())
    self.assertTrue(gc.isenabled())

  def test_no_folder_can_be_made(self):
    file = sample.folder(self) / "file"
    file.write_text("x")
    with self.assertRaisesRegex(refusal.HarnessError, "cannot be made"):
      store.begin(pathlib.Path(file) / "run",
                  protocol_lib.to_document(sample.PROTOCOL))


if __name__ == "__main__":
  absltest.main()
