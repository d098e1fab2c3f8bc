"""Explaining a combine from its operands and results."""

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import numpy as np

from moejax.contracts import combine
from moejax.contracts import named_combines
from moejax.numerics import ordered_combine
from moejax.protocols import explain
from moejax.protocols import trajectory
from tests.protocols import sample


def _operands(contract, rows=64, top_k=4, embed=16, seed=0):
  rng = np.random.default_rng(seed)
  out = rng.standard_normal((rows, top_k, embed)).astype(ml_dtypes.bfloat16)
  gate = rng.random((rows, top_k), np.float32)
  ids = np.argsort(rng.random((rows, 8)), -1)[:, :top_k]
  result = ordered_combine.ordered_combine_oracle(out, gate, ids, contract)
  return explain.Operands(out, gate, ids, result)


class ExplainTest(parameterized.TestCase):

  @parameterized.parameters(
      "P32", "C", "A", "B", "transformers_eager", "transformers_grouped_mm"
  )
  def test_a_named_contract_is_found_from_its_results(self, name):
    operands = _operands(named_combines.named(name))
    found = explain.explain(operands, "contract")
    self.assertEqual(found.name, name)
    self.assertEqual(found.rows, 64)
    self.assertEqual(found.candidates[0].rows, 64)
    others = [c.rows for c in found.candidates if c.contract.name == "A"]
    self.assertEqual(others == [64], name == "A")

  def test_an_explicit_order_is_found_when_no_name_fits(self):
    contract = combine.CombineContract(
        "secret",
        operand="bfloat16",
        accumulator="bfloat16",
        order="explicit",
        permutations=((2, 0, 3, 1),),
        rounding="paper",
    )
    found = explain.explain(_operands(contract), "contract")
    orders = {c.permutations for c in found.survivors}
    # The first two operands of B commute, so two orders give the same bits.
    self.assertEqual(orders, {((2, 0, 3, 1),), ((0, 2, 3, 1),)})

  def test_nothing_explains_random_results(self):
    operands = _operands(named_combines.named("C"))
    rng = np.random.default_rng(1)
    noise = rng.standard_normal(operands.result.shape)
    wrong = explain.Operands(
        operands.expert_out,
        operands.gate,
        operands.expert_ids,
        noise.astype(ml_dtypes.bfloat16),
    )
    found = explain.explain(wrong, "contract")
    self.assertIsNone(found.name)
    self.assertEqual(found.survivors, ())

  def test_one_wrong_bit_costs_one_row(self):
    operands = _operands(named_combines.named("B"))
    operands.result.view(np.uint16)[5, 3] ^= 1
    found = explain.explain(operands, "contract")
    rows = {c.contract.name: c.rows for c in found.candidates}
    self.assertEqual(rows["B"], 63)
    self.assertIsNone(found.name)

  def test_survivors_come_with_data_that_tell_them_apart(self):
    """bfloat16 gates cannot tell a contract that rounds them from one that
    does not."""
    contract = named_combines.named("transformers_grouped_mm")
    operands = _operands(contract)
    gate = operands.gate.astype(ml_dtypes.bfloat16)
    operands = explain.Operands(
        operands.expert_out, gate, operands.expert_ids, operands.result
    )
    found = explain.explain(operands, "contract", "transformers_grouped_mm")
    self.assertEqual(found.name, "transformers_grouped_mm")
    apart = {entry["name"]: entry for entry in found.apart}
    self.assertIn("C", apart)
    self.assertIn("gate_dtype", apart["C"]["fields"])
    self.assertGreater(apart["C"]["told_apart_by"]["differing_rows"], 0)

  def test_operands_come_from_the_taps_of_a_run(self):
    run = trajectory.run(sample.decoder(), sample.PROMPTS, 1)
    operands = explain.operands_of(run)
    self.assertEqual(operands.result.shape, (7 + 3 + 2, 16))
    found = explain.explain(operands, "portable")
    self.assertIn(
        "transformers_grouped_mm", [c.name for c in found.survivors]
    )
    for one in run:
      for step in one.steps:
        del step.taps["layers.1.moe.experts.down"]
    self.assertIsNone(explain.operands_of(run))


if __name__ == "__main__":
  absltest.main()
