"""Combine contracts: which are legal, and that every field decides.

Needs no accelerator.
"""

import dataclasses
import itertools

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import combine as lib
from moejax.contracts import document

_BASE = lib.CombineContract(
    "base", order="explicit", permutations=((1, 0, 2), (0, 1, 2))
)
# Another legal value of every field that decides bits.
_OTHERS = {
    "gate_site": "input",
    "gate_dtype": "float16",
    "operand": "bfloat16",
    "accumulator": "bfloat16",
    "order": "slot",
    "permutations": ((0, 1, 2), (1, 0, 2)),
    "start": "first",
    "round_before_shared": True,
    "output": "float32",
    "contraction": "fma",
    "subnormals": "flush",
    "rounding": "paper",
    "nan": "0x7fffffff",
}


def _pair(field: str) -> tuple[lib.CombineContract, lib.CombineContract]:
  """Returns two contracts that differ in the field and nowhere else."""
  base = _BASE
  if field == "order":  # Only an explicit order takes permutations.
    base = dataclasses.replace(base, permutations=())
  return base, dataclasses.replace(base, **{field: _OTHERS[field]})


class FieldsTest(parameterized.TestCase):

  def test_the_cases_cover_every_field(self):
    fields = {field.name for field in dataclasses.fields(lib.CombineContract)}
    self.assertEqual(set(_OTHERS) | {"name"}, fields)

  @parameterized.parameters(*_OTHERS)
  def test_digest_follows_the_field(self, field):
    base, other = _pair(field)
    self.assertEqual(list(lib.differing_fields(base, other)), [field])
    self.assertNotEqual(document.digest(base), document.digest(other))

  @parameterized.parameters(*_OTHERS)
  def test_comes_back_from_json_as_it_was(self, field):
    for contract in _pair(field):
      values = document.to_dict(contract)
      self.assertEqual(
          document.from_dict(lib.CombineContract, values), contract
      )

  @parameterized.parameters(*_OTHERS)
  def test_refuses_a_missing_field(self, field):
    values = document.to_dict(_BASE)
    del values[field]
    with self.assertRaisesRegex(ValueError, rf"missing fields \['{field}'\]"):
      document.from_dict(lib.CombineContract, values)

  def test_refuses_an_unknown_field(self):
    values = {**document.to_dict(_BASE), "split": 2}
    with self.assertRaisesRegex(ValueError, r"unknown fields \['split'\]"):
      document.from_dict(lib.CombineContract, values)

  def test_digest_ignores_the_name(self):
    other = dataclasses.replace(_BASE, name="other")
    self.assertEqual(document.digest(other), document.digest(_BASE))

  @parameterized.parameters(
      *sorted(set(_OTHERS) - {"permutations", "round_before_shared"})
  )
  def test_refuses_a_value_that_is_no_choice_of_the_field(self, field):
    for value in ("float8", "", None, 7):
      with self.subTest(value=value):
        with self.assertRaisesRegex(ValueError, f"{field}={value!r}"):
          dataclasses.replace(_BASE, **{field: value})

  def test_refuses_a_round_before_shared_that_is_no_truth_value(self):
    # 1 equals True, but would have another digest.
    for value in ("yes", None, 2, 1, 0):
      with self.subTest(value=value):
        with self.assertRaisesRegex(
            ValueError, f"round_before_shared={value!r} is no bool"
        ):
          dataclasses.replace(_BASE, round_before_shared=value)

  def test_refuses_a_name_that_is_no_text(self):
    with self.assertRaisesRegex(ValueError, "name=3 is no str"):
      dataclasses.replace(_BASE, name=3)

  def test_differing_fields_lists_what_decides_and_not_the_name(self):
    other = dataclasses.replace(
        _BASE, name="other", output="float32", start="first"
    )
    self.assertEqual(
        lib.differing_fields(_BASE, other),
        {"output": ("bfloat16", "float32"), "start": ("zero", "first")},
    )
    self.assertEmpty(
        lib.differing_fields(_BASE, dataclasses.replace(_BASE, name="other"))
    )


class PermutationsTest(parameterized.TestCase):

  @parameterized.parameters(
      (((0, 0, 1),),),
      (((1, 2),),),
      (((0, 1, 3),),),
      (((0, 1), (0, 2)),),
      (((-1, 0),),),
  )
  def test_refuses_what_is_no_permutation(self, permutations):
    with self.assertRaisesRegex(ValueError, "is not a permutation"):
      lib.CombineContract(
          "case", order="explicit", permutations=permutations
      )

  def test_refuses_permutations_of_several_lengths(self):
    with self.assertRaisesRegex(ValueError, r"several lengths: \[2, 3\]"):
      lib.CombineContract(
          "case", order="explicit", permutations=((0, 1), (2, 0, 1))
      )

  @parameterized.parameters("slot", "expert")
  def test_refuses_permutations_beside_another_order(self, order):
    with self.assertRaisesRegex(ValueError, f"order='{order}' takes no"):
      lib.CombineContract("case", order=order, permutations=((0, 1),))

  @parameterized.parameters(*itertools.permutations(range(3)))
  def test_takes_every_permutation(self, *order):
    contract = lib.CombineContract(
        "case", order="explicit", permutations=(order,)
    )
    self.assertEqual(contract.permutations, (order,))

  def test_takes_an_explicit_order_without_permutations(self):
    self.assertEmpty(lib.CombineContract("x", order="explicit").permutations)

  @parameterized.parameters(
      ([1, 0],), (None,), (3,), ("10",), ([None],), ([[0.0, 1.0]],),
      ([[False, True]],), ([["0", "1"]],),
  )
  def test_refuses_json_that_holds_no_lists_of_slots(self, permutations):
    values = {**document.to_dict(_BASE), "permutations": permutations}
    with self.assertRaisesRegex(ValueError, "no tuple of tuples of slots"):
      document.from_dict(lib.CombineContract, values)


class ContractionTest(parameterized.TestCase):

  @parameterized.parameters("bfloat16", "float16")
  def test_fma_leaves_no_place_for_a_rounded_operand(self, operand):
    with self.assertRaisesRegex(ValueError, f"operand to {operand}"):
      lib.CombineContract("case", contraction="fma", operand=operand)


class SchemeTest(parameterized.TestCase):

  @parameterized.parameters(
      ("float32", "float32", "P32"),
      ("bfloat16", "float32", "C"),
      ("float32", "bfloat16", "A"),
      ("bfloat16", "bfloat16", "B"),
      ("float16", "float32", None),
      ("float32", "float16", None),
      ("float16", "float16", None),
      ("bfloat16", "float16", None),
      ("float16", "bfloat16", None),
  )
  def test_follows_operand_and_accumulator(self, operand, accumulator, scheme):
    contract = lib.CombineContract(
        "case", operand=operand, accumulator=accumulator, output="float16"
    )
    self.assertEqual(contract.scheme, scheme)


if __name__ == "__main__":
  absltest.main()
