"""Documents: canonical JSON, strict loading, digests without names.

Needs no accelerator.
"""

import dataclasses
import hashlib
import json

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import document as lib


@dataclasses.dataclass(frozen=True)
class _Inner:
  name: str
  size: int


@dataclasses.dataclass(frozen=True)
class _Outer:
  name: str
  inner: _Inner
  rows: tuple[tuple[int, ...], ...] = ()


_OUTER = _Outer("outer", _Inner("inner", 3), ((1, 0), (0, 1)))


class CanonicalJsonTest(parameterized.TestCase):

  def test_keys_are_sorted_and_nothing_is_spaced_or_escaped(self):
    self.assertEqual(
        lib.canonical_json({"b": [1, 2.5, None], "a": {"é": True}}),
        '{"a":{"é":true},"b":[1,2.5,null]}',
    )

  @parameterized.parameters(float("nan"), float("inf"), float("-inf"))
  def test_a_number_that_json_cannot_carry_is_refused(self, value):
    with self.assertRaises(ValueError):
      lib.canonical_json({"a": [value]})

  def test_sha256_covers_the_utf8_bytes(self):
    self.assertEqual(
        lib.sha256("é"), hashlib.sha256(b"\xc3\xa9").hexdigest()
    )


class DigestTest(absltest.TestCase):

  def test_covers_the_canonical_json_of_everything_but_the_names(self):
    text = '{"inner":{"size":3},"rows":[[1,0],[0,1]]}'
    self.assertEqual(
        lib.digest(_OUTER), hashlib.sha256(text.encode()).hexdigest()
    )

  def test_ignores_names_at_every_depth(self):
    renamed = _Outer("a", _Inner("b", 3), _OUTER.rows)
    self.assertNotEqual(lib.to_dict(renamed), lib.to_dict(_OUTER))
    self.assertEqual(lib.digest(renamed), lib.digest(_OUTER))

  def test_sees_a_nested_field(self):
    other = dataclasses.replace(_OUTER, inner=_Inner("inner", 4))
    self.assertNotEqual(lib.digest(other), lib.digest(_OUTER))

  def test_sees_the_order_of_a_list(self):
    other = dataclasses.replace(_OUTER, rows=((0, 1), (1, 0)))
    self.assertNotEqual(lib.digest(other), lib.digest(_OUTER))


class FromDictTest(parameterized.TestCase):

  def test_comes_back_from_json_text_as_it_was(self):
    text = lib.canonical_json(lib.to_dict(_OUTER))
    back = lib.from_dict(_Outer, json.loads(text))
    self.assertEqual(back, _OUTER)
    self.assertIsInstance(back.inner, _Inner)
    self.assertIsInstance(back.rows[0], tuple)

  @parameterized.parameters("name", "inner", "rows")
  def test_a_missing_field_is_refused_even_if_it_has_a_default(self, field):
    values = lib.to_dict(_OUTER)
    del values[field]
    with self.assertRaisesRegex(ValueError, rf"missing fields \['{field}'\]"):
      lib.from_dict(_Outer, values)

  def test_an_unknown_field_is_refused(self):
    values = {**lib.to_dict(_OUTER), "colour": "red"}
    with self.assertRaisesRegex(ValueError, r"unknown fields \['colour'\]"):
      lib.from_dict(_Outer, values)

  def test_a_nested_contract_is_read_as_strictly(self):
    values = lib.to_dict(_OUTER)
    values["inner"]["colour"] = "red"
    del values["inner"]["size"]
    with self.assertRaisesRegex(ValueError, "_Inner.*colour.*size"):
      lib.from_dict(_Outer, values)

  @parameterized.parameters(None, 3, "text", [[]])
  def test_anything_but_an_object_is_refused(self, value):
    with self.assertRaisesRegex(ValueError, "_Outer is read from an object"):
      lib.from_dict(_Outer, value)
    with self.assertRaisesRegex(ValueError, "_Inner is read from an object"):
      lib.from_dict(_Outer, {**lib.to_dict(_OUTER), "inner": value})


@dataclasses.dataclass(frozen=True)
class _Typed:
  text: str = "a"
  count: int = 1
  flag: bool = False
  factor: float = 1.0

  def __post_init__(self):
    lib.check_types(self)


class CheckTypesTest(parameterized.TestCase):

  @parameterized.parameters(
      ("text", 1),
      ("text", None),
      ("count", 1.0),
      ("count", True),
      ("count", "1"),
      ("flag", 1),
      ("flag", "true"),
      ("factor", True),
      ("factor", "1"),
      ("factor", None),
  )
  def test_refuses_a_value_of_another_type(self, field, value):
    with self.assertRaisesRegex(ValueError, f"_Typed: {field}={value!r} is no"):
      _Typed(**{field: value})

  @parameterized.parameters(float("nan"), float("inf"), -float("inf"))
  def test_refuses_a_float_that_is_not_finite(self, value):
    with self.assertRaisesRegex(ValueError, "is not finite"):
      _Typed(factor=value)

  def test_a_whole_number_becomes_the_float_it_stands_for(self):
    whole, real = _Typed(factor=3), _Typed(factor=3.0)
    self.assertIsInstance(whole.factor, float)
    self.assertEqual(lib.digest(whole), lib.digest(real))


class CheckChoiceTest(absltest.TestCase):

  def test_a_choice_passes_and_anything_else_is_named_in_the_refusal(self):
    lib.check_choice("Owner", "field", "a", ("a", "b"))
    with self.assertRaisesRegex(ValueError, "Owner: field='c' .* a, b"):
      lib.check_choice("Owner", "field", "c", ("a", "b"))


if __name__ == "__main__":
  absltest.main()
