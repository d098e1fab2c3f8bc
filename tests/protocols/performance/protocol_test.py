"""What a protocol declares, in which order, and what it refuses."""

import dataclasses
import json

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import document
from moejax.contracts import refusal
from moejax.numerics.packed import alignment
from moejax.numerics.packed import selector
from moejax.protocols.performance import protocol as lib
from tests.protocols.performance import sample

_PROTOCOL = sample.PROTOCOL


class DocumentTest(parameterized.TestCase):

  def test_survives_json(self):
    for protocol in (_PROTOCOL, lib.default()):
      values = json.loads(json.dumps(lib.to_document(protocol)))
      self.assertEqual(lib.from_fields(values["protocol"]), protocol)
      self.assertEqual(values["digest"], lib.digest(values))

  def test_every_field_and_every_word_is_in_the_digest(self):
    other = {
        "points": _PROTOCOL.points[:1],
        "comparisons": _PROTOCOL.comparisons[:1],
        "shape": dataclasses.replace(_PROTOCOL.shape, experts=4),
        "top_k": 1, "requests": 3, "warmups": 0, "rounds": 9,
        "confidence": 0.5, "seed": 1, "interpret": True,
    }
    base = dataclasses.replace(_PROTOCOL, comparisons=tuple(
        dataclasses.replace(c, margin=None) for c in _PROTOCOL.comparisons
    ))
    self.assertEqual(
        set(other), {f.name for f in dataclasses.fields(_PROTOCOL)}
    )
    seen = {lib.to_document(base)["digest"]}
    for name, value in other.items():
      changed = dataclasses.replace(base, **{name: value})
      seen.add(lib.to_document(changed)["digest"])
    words = lib.to_document(base)
    words["rules"] = words["rules"] | {"median": "the mean"}
    seen.add(lib.digest(words))
    self.assertLen(seen, len(other) + 2)

  @parameterized.parameters(
      ({"rounds": 8}, "rounds=8 is even"), ({"rounds": 3}, "no interval"),
      ({"confidence": 1.0}, "between 0 and 1"), ({"points": []}, "none, or"),
      ({"top_k": 4}, "top_k=4 of 3"), ({"requests": 0}, "requests=0"),
      ({"warmups": -1}, "warmups=-1"), ({"seed": True}, "seed=True"),
      ({"interpret": 1}, "interpret=1"),
      ({"interpret": True}, "no performance"), ({"extra": 1}, "its fields are"),
  )
  def test_refuses(self, fields, message):
    values = document.to_dict(_PROTOCOL) | fields
    with self.assertRaisesRegex(refusal.HarnessError, message):
      lib.from_fields(values)

  @parameterized.parameters(
      ("points", {"tokens": 0}, "no operating point"),
      ("points", {"dtype": "float32"}, "float32"),
      ("points", {"grid": 0}, "grid=0"),
      ("points", {"thread_k": 96}, "thread_k=96"),
      ("comparisons", {"arm": "triton"}, "arm='triton'"),
      ("comparisons", {"arm": "vllm_native"}, "with itself"),
      ("comparisons", {"margin": 0.0}, "margin=0.0"),
      ("comparisons", {"margin": 1}, "margin=1"),
  )
  def test_refuses_a_part(self, part, fields, message):
    values = document.to_dict(_PROTOCOL)
    values[part][0] |= fields
    with self.assertRaisesRegex(refusal.HarnessError, message):
      lib.from_fields(values)

  def test_refuses_a_point_twice_and_what_is_no_object(self):
    values = document.to_dict(_PROTOCOL)
    values["points"] *= 2
    with self.assertRaisesRegex(refusal.HarnessError, "or one twice"):
      lib.from_fields(values)
    with self.assertRaisesRegex(refusal.HarnessError, "its fields are"):
      lib.from_fields([])


class OrderTest(absltest.TestCase):

  def test_arms_alternate_and_every_sample_is_once(self):
    able = ("oracle_layer", "vllm_native", "vllm_stable")
    slots = list(_PROTOCOL.slots(able))
    self.assertLen(set(slots), 2 * 8 * 3)
    self.assertLen(slots, 2 * 8 * 3)
    first, second = (point.name for point in _PROTOCOL.points)
    self.assertEqual([s.point for s in slots], [first] * 24 + [second] * 24)
    forward = ["vllm_native", "vllm_stable", "oracle_layer"]
    self.assertEqual(
        [(s.round, s.arm) for s in slots[:9]],
        [(0, a) for a in forward] + [(1, a) for a in forward[::-1]]
        + [(2, a) for a in forward],
    )


class DefaultTest(absltest.TestCase):

  def test_points_are_what_vllm_chooses_by_itself(self):
    protocol = lib.default()
    shape = protocol.shape
    self.assertEqual(
        [p.tokens for p in protocol.points], [1, 8, 21, 64, 256]
    )
    for point in protocol.points:
      self.assertEqual(
          point.block_rows,
          alignment.block_rows_for(
              point.tokens * protocol.top_k, shape.experts
          ),
      )
      for n, k in (
          (2 * shape.hidden, shape.embed), (shape.embed, shape.hidden)
      ):
        problem = selector.Problem(
            point.tokens, protocol.top_k, point.block_rows, n, k,
            shape.group_size,
        )
        registers = selector.SM_90_ROWS_8
        if point.block_rows != 8:  # Any counts of 128 and more give the same.
          tiles = selector.configurations(point.block_rows)
          registers = selector.RegisterCounts(
              "test", point.block_rows, shape.group_size,
              tuple((t, 128) for t in tiles),
          )
        found = selector.select(problem, selector.H200, registers)
        self.assertEqual(
            (point.thread_k, point.thread_n, point.grid),
            (found.thread_k, found.thread_n, found.grid),
        )

  def test_the_stable_plan_has_a_margin(self):
    margins = {
        (c.arm, c.against): c.margin for c in lib.default().comparisons
    }
    self.assertEqual(margins["vllm_stable", "vllm_native"], 1.05)
    self.assertIsNone(margins["pallas_layer", "vllm_layer"])


if __name__ == "__main__":
  absltest.main()
