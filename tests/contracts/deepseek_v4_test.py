"""The contract of a DeepSeek-V4 decoder: complete, and data.

Needs no accelerator.
"""

import dataclasses
import json

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import deepseek_v4 as lib
from moejax.contracts import document
from moejax.contracts import named_combines
from moejax.contracts import reduction
from moejax.contracts import route

_ROUTER = route.RouterContract(
    "router", top_k=6, normalize=True, score="sqrt_softplus", scale=1.5
)
_COMBINE = named_combines.named("transformers_eager")
_SITES = tuple(f.name for f in dataclasses.fields(lib.DeepseekV4Reductions))


class DeepseekV4ContractTest(parameterized.TestCase):

  @parameterized.parameters(
      ("native", "native"), ("portable", "portable"), ("sequential", "portable")
  )
  def test_an_arithmetic_holds_at_every_site(self, arithmetic, elementwise):
    contract = lib.of(arithmetic, _ROUTER, _COMBINE)
    self.assertEqual(contract.elementwise, elementwise)
    chains = {getattr(contract.reductions, site).chain for site in _SITES}
    self.assertEqual(chains, {arithmetic})

  @parameterized.parameters(*reduction.CHAINS)
  def test_comes_back_from_json_as_it_was(self, arithmetic):
    contract = lib.of(arithmetic, _ROUTER, _COMBINE)
    text = document.canonical_json(document.to_dict(contract))
    back = document.from_dict(lib.DeepseekV4Contract, json.loads(text))
    self.assertEqual(back, contract)

  @parameterized.parameters(*_SITES)
  def test_every_site_is_in_the_digest(self, site):
    contract = lib.of("portable", _ROUTER, _COMBINE)
    changed = dataclasses.replace(
        contract.reductions, **{site: reduction.ReductionContract("native")}
    )
    other = dataclasses.replace(contract, reductions=changed)
    self.assertNotEqual(document.digest(contract), document.digest(other))

  def test_refuses_an_arithmetic_that_does_not_exist(self):
    with self.assertRaisesRegex(ValueError, "'exact'"):
      lib.of("exact", _ROUTER, _COMBINE)
    contract = lib.of("portable", _ROUTER, _COMBINE)
    with self.assertRaisesRegex(ValueError, "elementwise='exact'"):
      dataclasses.replace(contract, elementwise="exact")


if __name__ == "__main__":
  absltest.main()
