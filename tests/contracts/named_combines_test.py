"""Named combine contracts: what each says, and how one is loaded.

Needs no accelerator.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import combine
from moejax.contracts import document
from moejax.contracts import named_combines as lib
from moejax.contracts import refusal

_B_TEXT = (
    '{"accumulator":"bfloat16","contraction":"mul_add",'
    '"gate_dtype":"float32","gate_site":"after_down","nan":"0x7fc00000",'
    '"operand":"bfloat16","order":"slot","output":"bfloat16",'
    '"permutations":[],"round_before_shared":false,"rounding":"paper",'
    '"start":"zero","subnormals":"keep"}'
)


class NamedTest(parameterized.TestCase):

  @parameterized.parameters(*lib.NAMES)
  def test_comes_back_from_json_text_as_it_was(self, name):
    contract = lib.named(name)
    text = document.canonical_json(document.to_dict(contract))
    self.assertEqual(
        document.from_dict(combine.CombineContract, json.loads(text)),
        contract,
    )
    self.assertEqual(contract.name, name)

  @parameterized.parameters("P32", "C", "A", "B")
  def test_a_scheme_is_named_after_itself(self, name):
    self.assertEqual(lib.named(name).scheme, name)
    self.assertEqual(lib.named(name).rounding, "paper")

  def test_schemes_differ_in_operand_and_accumulator_only(self):
    for left, right in itertools.combinations("P32 C A B".split(), 2):
      differing = combine.differing_fields(lib.named(left), lib.named(right))
      self.assertNotEmpty(differing)
      self.assertContainsSubset(differing, {"operand", "accumulator"})

  def test_digest_of_scheme_b_is_that_of_its_canonical_text(self):
    self.assertEqual(
        document.digest(lib.named("B")),
        hashlib.sha256(_B_TEXT.encode()).hexdigest(),
    )

  def test_names_differ_and_only_two_contracts_coincide(self):
    self.assertLen(set(lib.NAMES), len(lib.NAMES))
    same = {
        (left, right)
        for left, right in itertools.combinations(lib.NAMES, 2)
        if document.digest(lib.named(left)) == document.digest(lib.named(right))
    }
    self.assertEqual(
        same, {("transformers_grouped_mm", "transformers_batched_mm")}
    )

  @parameterized.parameters(
      ("transformers_eager", "order", "expert"),
      ("transformers_eager", "accumulator", "bfloat16"),
      ("transformers_grouped_mm", "accumulator", "float32"),
      ("transformers_grouped_mm", "order", "slot"),
      ("deepseek_reference", "gate_site", "before_down"),
      ("deepseek_reference", "round_before_shared", False),
      ("vllm_marlin", "operand", "float16"),
      ("vllm_marlin", "output", "float16"),
  )
  def test_a_backend_is_described_as_read_from_its_source(
      self, name, field, value
  ):
    self.assertEqual(getattr(lib.named(name), field), value)

  def test_an_unknown_name_is_refused_with_the_known_ones(self):
    with self.assertRaisesRegex(ValueError, "'D' is not one of P32, C, A, B"):
      lib.named("D")


class LoadTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = self.enterContext(tempfile.TemporaryDirectory())
    self.path = pathlib.Path(folder) / "contract.json"
    self.values = document.to_dict(
        dataclasses.replace(lib.named("A"), name="mine", start="first")
    )

  def test_loads_a_name(self):
    self.assertEqual(lib.load("B"), lib.named("B"))

  def test_loads_a_file(self):
    self.path.write_text(json.dumps(self.values, indent=2), "utf-8")
    self.assertEqual(
        lib.load(str(self.path)),
        dataclasses.replace(lib.named("A"), name="mine", start="first"),
    )

  def test_a_name_comes_before_a_file_of_that_name(self):
    text = json.dumps(self.values)
    self.path.with_name("B").write_text(text, "utf-8")
    self.path.with_name("mine").write_text(text, "utf-8")
    with contextlib.chdir(self.path.parent):
      self.assertEqual(lib.load("mine").name, "mine")
      self.assertEqual(lib.load("B").name, "B")

  def test_neither_a_name_nor_a_file_is_refused_with_the_names(self):
    for text in ("D", "", str(self.path), str(self.path.parent)):
      with self.subTest(text):
        with self.assertRaisesRegex(
            refusal.HarnessError, "neither a file nor one of P32, C, A, B"
        ):
          lib.load(text)

  def test_a_file_that_holds_no_combine_contract_is_refused_by_its_path(self):
    cases = {
        "empty": b"",
        "no_json": b"{",
        "no_text": b"\xff\xfe",
        "no_object": b"[]",
        "unknown_field": json.dumps({**self.values, "colour": 1}).encode(),
        "missing_field": json.dumps(
            {k: v for k, v in self.values.items() if k != "start"}
        ).encode(),
        "bad_value": json.dumps({**self.values, "output": "int8"}).encode(),
        "flat_permutations": json.dumps(
            {**self.values, "order": "explicit", "permutations": [1, 0]}
        ).encode(),
        "contradiction": json.dumps(
            {**self.values, "permutations": [[0, 1]]}
        ).encode(),
    }
    for name, content in cases.items():
      with self.subTest(name):
        self.path.write_bytes(content)
        with self.assertRaisesRegex(refusal.HarnessError, self.path.name):
          lib.load(str(self.path))


class AtDtypeTest(parameterized.TestCase):

  @parameterized.parameters("float16", "float32")
  def test_replaces_bfloat16_and_nothing_else(self, dtype):
    for name in lib.NAMES:
      contract = lib.named(name)
      expected = {
          key: dtype if value == "bfloat16" else value
          for key, value in document.to_dict(contract).items()
      }
      self.assertEqual(
          document.to_dict(lib.at_dtype(contract, dtype)), expected
      )

  def test_bfloat16_changes_nothing(self):
    for name in lib.NAMES:
      contract = lib.named(name)
      self.assertEqual(lib.at_dtype(contract, "bfloat16"), contract)

  def test_refuses_a_dtype_that_no_contract_names(self):
    with self.assertRaisesRegex(ValueError, "float64"):
      lib.at_dtype(lib.named("B"), "float64")


if __name__ == "__main__":
  absltest.main()
