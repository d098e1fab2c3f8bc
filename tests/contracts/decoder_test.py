"""Decoder contracts: one reduction contract a site, all of them in the digest.

Needs no accelerator.
"""

import dataclasses
import json

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import decoder as lib
from moejax.contracts import document
from moejax.contracts import named_combines
from moejax.contracts import reduction
from moejax.contracts import route

_ROUTER = route.RouterContract("router", top_k=2, normalize=True)
_COMBINE = named_combines.named("B")
_MAKERS = (lib.native, lib.portable, lib.sequential)


class ReductionsTest(absltest.TestCase):

  def test_the_fields_are_the_sites(self):
    fields = tuple(field.name for field in dataclasses.fields(lib.Reductions))
    self.assertEqual(fields, reduction.SITES)

  def test_all_puts_every_site_under_one_chain(self):
    reductions = lib.Reductions.all("sequential")
    self.assertEqual(
        {getattr(reductions, site).chain for site in reduction.SITES},
        {"sequential"},
    )


class DecoderTest(parameterized.TestCase):

  @parameterized.parameters(
      (lib.native, "native", "native"),
      (lib.portable, "portable", "portable"),
      (lib.sequential, "portable", "sequential"),
  )
  def test_a_named_contract_says_what_its_name_says(
      self, make, elementwise, chain
  ):
    contract = make(_ROUTER, _COMBINE)
    self.assertEqual(contract.name, make.__name__)
    self.assertEqual(contract.elementwise, elementwise)
    self.assertEqual(contract.reductions, lib.Reductions.all(chain))
    self.assertEqual(contract.router, _ROUTER)
    self.assertEqual(contract.combine, _COMBINE)

  @parameterized.parameters(*_MAKERS)
  def test_comes_back_from_json_text_as_it_was(self, make):
    contract = make(_ROUTER, _COMBINE)
    text = document.canonical_json(document.to_dict(contract))
    self.assertEqual(
        document.from_dict(lib.DecoderContract, json.loads(text)), contract
    )

  def test_digest_ignores_the_three_names(self):
    contract = lib.portable(_ROUTER, _COMBINE)
    renamed = dataclasses.replace(
        contract,
        name="other",
        router=dataclasses.replace(_ROUTER, name="other"),
        combine=dataclasses.replace(_COMBINE, name="other"),
    )
    self.assertEqual(document.digest(renamed), document.digest(contract))

  @parameterized.parameters(*reduction.SITES)
  def test_digest_follows_the_site(self, site):
    contract = lib.portable(_ROUTER, _COMBINE)
    other = dataclasses.replace(
        contract,
        reductions=dataclasses.replace(
            contract.reductions, **{site: reduction.ReductionContract("native")}
        ),
    )
    self.assertNotEqual(document.digest(other), document.digest(contract))

  def test_digest_follows_every_other_part(self):
    contract = lib.portable(_ROUTER, _COMBINE)
    others = {
        "elementwise": "native",
        "reductions": lib.Reductions.all("native"),
        "router": dataclasses.replace(_ROUTER, top_k=3),
        "combine": named_combines.named("A"),
    }
    fields = {field.name for field in dataclasses.fields(lib.DecoderContract)}
    self.assertEqual(set(others) | {"name"}, fields)
    for field, value in others.items():
      with self.subTest(field):
        other = dataclasses.replace(contract, **{field: value})
        self.assertNotEqual(document.digest(other), document.digest(contract))

  def test_refuses_an_unknown_or_missing_part(self):
    values = document.to_dict(lib.portable(_ROUTER, _COMBINE))
    for part in ("router", "combine", "reductions"):
      with self.subTest(part):
        broken = {**values, part: {**values[part], "colour": 1}}
        with self.assertRaisesRegex(ValueError, r"unknown fields \['colour'\]"):
          document.from_dict(lib.DecoderContract, broken)
    del values["elementwise"]
    with self.assertRaisesRegex(ValueError, r"missing fields \['elementwise'"):
      document.from_dict(lib.DecoderContract, values)

  def test_refuses_a_site_that_is_left_out(self):
    values = document.to_dict(lib.portable(_ROUTER, _COMBINE))
    del values["reductions"]["lm_head"]
    with self.assertRaisesRegex(ValueError, r"missing fields \['lm_head'\]"):
      document.from_dict(lib.DecoderContract, values)

  def test_refuses_a_name_that_is_no_text(self):
    with self.assertRaisesRegex(ValueError, "name=3 is no str"):
      dataclasses.replace(lib.portable(_ROUTER, _COMBINE), name=3)

  @parameterized.parameters("sequential", "", None)
  def test_refuses_another_elementwise_arithmetic(self, elementwise):
    with self.assertRaisesRegex(ValueError, f"elementwise={elementwise!r}"):
      dataclasses.replace(
          lib.portable(_ROUTER, _COMBINE), elementwise=elementwise
      )


if __name__ == "__main__":
  absltest.main()
