"""Contracts of the training path: what they refuse, and what they are as data.

Needs no accelerator.
"""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import document
from moejax.contracts import grouped_mlp as lib

_GEMM = lib.GroupGemmContract(chain="sequential")
_CHANGES = {
    "chain": {"chain": "portable"},
    "bound": {"bound": "total_rows"},
    "limit": {"bound": "limit", "limit": 7},
    "block_rows": {"block_rows": 64},
    "unwritten": {"unwritten": "zero"},
}


class GroupGemmContractTest(parameterized.TestCase):

  @parameterized.parameters(
      ({"chain": "fast"}, "chain"), ({"bound": "tokens"}, "bound"),
      ({"unwritten": "ones"}, "unwritten"), ({"block_rows": 0}, "block_rows"),
      ({"bound": "limit"}, "whole number"), ({"limit": 8}, "limit=8"),
      ({"bound": "limit", "limit": True}, "whole number"),
      ({"chain": "native", "bound": "distinct"}, "no launch bound"),
  )
  def test_refuses(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(_GEMM, **fields)

  @parameterized.parameters(*_CHANGES)
  def test_every_field_is_in_the_digest(self, field):
    changed = dataclasses.replace(_GEMM, **_CHANGES[field])
    self.assertNotEqual(document.digest(changed), document.digest(_GEMM))


class GroupedMlpContractTest(parameterized.TestCase):

  @parameterized.parameters(
      ({"fc1_layout": "interleaved"}, "fc1_layout"),
      ({"weight_placement": "input"}, "weight_placement"),
      ({"functions": "fast"}, "functions"),
      ({"residuals": "some"}, "residuals"),
      ({"clamp_limit": 0.0}, "positive"), ({"dgrad": None}, "dgrad"),
  )
  def test_refuses(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      lib.GroupedMlpContract(**fields)

  @parameterized.parameters(None, 7.0)
  def test_is_read_back_from_json(self, limit):
    contract = lib.of_chain("sequential", clamp_limit=limit, block_rows=16)
    values = document.to_dict(contract)
    self.assertEqual(
        document.from_dict(lib.GroupedMlpContract, values), contract
    )
    with self.assertRaisesRegex(ValueError, "dgrad"):
      del values["dgrad"]
      document.from_dict(lib.GroupedMlpContract, values)

  def test_each_gemm_has_a_bound_of_its_own(self):
    stale = dataclasses.replace(_GEMM, bound="limit", limit=128)
    base = lib.of_chain("sequential")
    digests = {
        document.digest(dataclasses.replace(base, **{field: stale}))
        for field in ("forward", "dgrad", "wgrad")
    }
    self.assertLen(digests | {document.digest(base)}, 4)

  def test_functions_follow_the_chain(self):
    self.assertEqual(lib.of_chain("native").functions, "native")
    self.assertEqual(lib.of_chain("mma16").functions, "portable")
    self.assertEqual(lib.of_chain("native"), lib.GroupedMlpContract())


if __name__ == "__main__":
  absltest.main()
