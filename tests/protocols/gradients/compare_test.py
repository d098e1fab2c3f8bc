"""Comparison of two steps: counts, the first difference, refusals."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from moejax.contracts.gradients import backward
from moejax.contracts import refusal
from moejax.modules import config as config_lib
from moejax.modules import decoder
from moejax.protocols.gradients import compare as lib
from moejax.protocols.gradients import our_step
from moejax.protocols.gradients import places

_CONFIG = config_lib.DecoderConfig(
    vocab_size=8,
    embed=4,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    hidden=4,
    expert_hidden=2,
    num_experts=4,
    top_k=2,
    normalize_gates=True,
    sparse_layers=(1,),
    max_positions=16,
    dtype="float32",
)
_PLACES = (
    places.Place(places.LOSS, "loss", "nll_loss"),
    places.Place(places.COTANGENT, "logits", "log_softmax"),
    places.Place(places.GRADIENT, "lm_head", "linear: weight"),
)


def _record(**changes):
  record = our_step.Record(
      loss=np.float32(1.5),
      cotangents={"logits": np.float32([[1, 2], [3, 4]])},
      gradients={"lm_head": np.float32([0.0, 1.0])},
      updated={"lm_head": np.float32([0.5, 0.25])},
  )
  return dataclasses.replace(record, **changes)


class CompareTest(parameterized.TestCase):

  def test_equal_steps_have_no_difference(self):
    rows = lib.compare(_record(), _record(), lib.with_updates(_PLACES))
    self.assertLen(rows, 4)
    self.assertIsNone(lib.first_difference(rows))
    self.assertEqual([row["elements"] for row in rows], [1, 4, 2, 2])

  def test_bits_decide_and_the_first_place_is_named(self):
    other = _record(
        gradients={"lm_head": np.float32([-0.0, 1.0])},
        updated={"lm_head": np.float32([0.5, 0.5])},
    )
    rows = lib.compare(_record(), other, lib.with_updates(_PLACES))
    first = lib.first_difference(rows)
    self.assertEqual((first["kind"], first["name"]), ("gradient", "lm_head"))
    self.assertEqual((first["differing"], first["max_ulp"]), (1, 0))
    self.assertEqual(
        first["first"],
        {"at": [0], "ours": "0x00000000", "reference": "0x80000000"},
    )
    self.assertEqual(rows[3]["max_ulp"], 1 << 23)

  def test_a_flattened_reference_is_the_same(self):
    other = _record(cotangents={"logits": np.float32([1, 2, 3, 4])})
    rows = lib.compare(_record(), other, _PLACES)
    self.assertIsNone(lib.first_difference(rows))

  @parameterized.parameters(
      (dict(cotangents={}), "did not show the cotangent of logits"),
      (dict(gradients={}), "do not match"),
      (dict(cotangents={"logits": np.float32([1])}), r"\(2, 2\) against"),
  )
  def test_what_cannot_be_compared_is_refused(self, changes, message):
    with self.assertRaisesRegex(refusal.HarnessError, message):
      lib.compare(_record(), _record(**changes), _PLACES)


class PlacesTest(parameterized.TestCase):

  @parameterized.parameters(
      {}, {"attention_bias": True}, {"tied_embeddings": True}
  )
  def test_every_parameter_has_one_place_and_every_place_known_rules(
      self, **changes
  ):
    config = dataclasses.replace(_CONFIG, **changes)
    found = places.of(config)
    gradients = [p.name for p in found if p.kind == places.GRADIENT]
    self.assertCountEqual(gradients, decoder.parameter_shapes(config))
    for place in found[1:]:
      for rule in place.rules.split(", "):
        self.assertIn(rule.split(":")[0], backward.RULES, place)

  def test_layers_are_named_from_the_last_to_the_first(self):
    layers = [p.layer for p in places.of(_CONFIG) if p.layer is not None]
    self.assertEqual(layers, sorted(layers, reverse=True))
    self.assertEqual(set(layers), {0, 1})


if __name__ == "__main__":
  absltest.main()
