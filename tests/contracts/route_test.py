"""Router contracts: which are legal, and that every field decides.

Needs no accelerator.
"""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import document
from moejax.contracts import route as lib

_BASE = lib.RouterContract("base", top_k=2, normalize=True)
# Another legal value of every field that decides bits.
_OTHERS = {
    "top_k": 3,
    "normalize": False,
    "score": "sigmoid",
    "logits_dtype": "float32",
    "score_dtype": "bfloat16",
    "gate_dtype": "float16",
    "tie_rule": "highest_index",
    "scale": 2.5,
}


class RouteTest(parameterized.TestCase):

  def test_the_cases_cover_every_field(self):
    fields = {field.name for field in dataclasses.fields(lib.RouterContract)}
    self.assertEqual(set(_OTHERS) | {"name"}, fields)

  @parameterized.parameters(*_OTHERS)
  def test_digest_follows_the_field_and_json_keeps_it(self, field):
    other = dataclasses.replace(_BASE, **{field: _OTHERS[field]})
    self.assertNotEqual(document.digest(other), document.digest(_BASE))
    self.assertEqual(
        document.from_dict(lib.RouterContract, document.to_dict(other)), other
    )

  @parameterized.parameters(*_OTHERS)
  def test_refuses_a_missing_field(self, field):
    values = document.to_dict(_BASE)
    del values[field]
    with self.assertRaisesRegex(ValueError, rf"missing fields \['{field}'\]"):
      document.from_dict(lib.RouterContract, values)

  def test_refuses_an_unknown_field(self):
    values = {**document.to_dict(_BASE), "capacity": 1.25}
    with self.assertRaisesRegex(ValueError, r"unknown fields \['capacity'\]"):
      document.from_dict(lib.RouterContract, values)

  def test_digest_ignores_the_name(self):
    other = dataclasses.replace(_BASE, name="other")
    self.assertEqual(document.digest(other), document.digest(_BASE))

  @parameterized.parameters(
      "score", "logits_dtype", "score_dtype", "gate_dtype", "tie_rule"
  )
  def test_refuses_a_value_that_is_no_choice_of_the_field(self, field):
    for value in ("float8", "", None):
      with self.subTest(value=value):
        with self.assertRaisesRegex(ValueError, f"{field}={value!r}"):
          dataclasses.replace(_BASE, **{field: value})

  @parameterized.parameters(0, -1)
  def test_refuses_a_route_without_slots(self, top_k):
    with self.assertRaisesRegex(ValueError, f"top_k={top_k}"):
      dataclasses.replace(_BASE, top_k=top_k)

  @parameterized.parameters(
      ("normalize", "false"),
      ("normalize", None),
      ("normalize", 1),
      ("top_k", "2"),
      ("top_k", 2.5),
      ("top_k", True),
      ("scale", "1"),
      ("scale", True),
      ("scale", float("nan")),
      ("scale", float("inf")),
      ("name", 3),
  )
  def test_refuses_json_of_the_wrong_kind(self, field, value):
    values = {**document.to_dict(_BASE), field: value}
    with self.assertRaisesRegex(ValueError, f"{field}={value!r} is "):
      document.from_dict(lib.RouterContract, values)

  def test_equal_contracts_have_equal_digests(self):
    whole, real = (dataclasses.replace(_BASE, scale=s) for s in (2, 2.0))
    self.assertEqual(whole, real)
    self.assertEqual(document.digest(whole), document.digest(real))


if __name__ == "__main__":
  absltest.main()
