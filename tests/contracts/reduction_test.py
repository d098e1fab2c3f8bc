"""Reduction contracts: three chains, and a site for every reduction.

Needs no accelerator.
"""

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import document
from moejax.contracts import reduction as lib


class ReductionTest(parameterized.TestCase):

  @parameterized.parameters(*lib.CHAINS)
  def test_comes_back_from_json_as_it_was(self, chain):
    contract = lib.ReductionContract(chain)
    self.assertEqual(document.to_dict(contract), {"chain": chain})
    self.assertEqual(
        document.from_dict(lib.ReductionContract, {"chain": chain}), contract
    )

  def test_every_chain_has_its_own_digest(self):
    digests = {
        document.digest(lib.ReductionContract(chain)) for chain in lib.CHAINS
    }
    self.assertLen(digests, 3)

  @parameterized.parameters("pairwise", "", None)
  def test_refuses_an_unknown_chain(self, chain):
    with self.assertRaisesRegex(ValueError, f"chain={chain!r}"):
      lib.ReductionContract(chain)

  @parameterized.parameters(({},), ({"chain": "native", "tile": 8},))
  def test_refuses_missing_and_unknown_fields(self, values):
    with self.assertRaisesRegex(ValueError, "unknown fields"):
      document.from_dict(lib.ReductionContract, values)

  def test_no_site_is_named_twice(self):
    self.assertLen(set(lib.SITES), len(lib.SITES))


if __name__ == "__main__":
  absltest.main()
