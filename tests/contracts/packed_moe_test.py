"""Packed decoders: two ways to run experts, said by one contract.

Needs no accelerator.
"""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import decoder
from moejax.contracts import document
from moejax.contracts import named_combines
from moejax.contracts import packed_moe as lib
from moejax.contracts import route

_BASE = decoder.portable(
    route.RouterContract("qwen3_moe", top_k=2, normalize=True),
    named_combines.named("transformers_grouped_mm"),
)
_MARLIN = lib.marlin(dtype="bfloat16", thread_k=64, thread_n=64, grid=8)
_BOTH = (
    lib.dequantized_decoder(_BASE, dtype="bfloat16", group_size=128),
    lib.marlin_decoder(_BASE, _MARLIN),
)


class PackedDecoderContractTest(parameterized.TestCase):

  @parameterized.parameters(*_BOTH)
  def test_is_read_back_from_its_json(self, contract):
    values = document.to_dict(contract)
    found = document.from_dict(lib.PackedDecoderContract, values)
    self.assertEqual(found, contract)

  def test_the_way_is_part_of_the_digest(self):
    finer = lib.dequantized_decoder(_BASE, dtype="bfloat16", group_size=64)
    digests = {document.digest(c) for c in (*_BOTH, finer)}
    self.assertLen(digests, 3)
    self.assertNotIn(document.digest(_BASE), digests)

  def test_marlin_takes_float32_gates_and_has_its_own_combine(self):
    contract = _BOTH[1]
    self.assertEqual(contract.router.gate_dtype, "float32")
    self.assertEqual(contract.combine, _MARLIN.combine)
    self.assertEqual(contract.plan, "stable")

  @parameterized.parameters(
      (dict(decoder=_BASE), "gate_dtype='bfloat16'"),
      (
          dict(
              decoder=dataclasses.replace(
                  _BOTH[1].decoder, combine=_BASE.combine
              )
          ),
          "combines of decoder and experts differ in .*'nan'",
      ),
      (dict(plan="none"), "plan='none' is not one of stable"),
      (dict(experts=_MARLIN.w13), "no contract of packed experts"),
  )
  def test_refuses_what_contradicts_marlin(self, change, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(_BOTH[1], **change)

  def test_refuses_a_plan_where_nothing_is_planned(self):
    with self.assertRaisesRegex(ValueError, "plan='stable' is not one of none"):
      dataclasses.replace(_BOTH[0], plan="stable")

  @parameterized.parameters(0, -2)
  def test_refuses_a_group_size_that_is_none(self, group_size):
    with self.assertRaisesRegex(ValueError, f"group_size={group_size}"):
      lib.DequantizedContract("x", "bfloat16", group_size)

  def test_refuses_a_wide_dtype(self):
    with self.assertRaisesRegex(ValueError, "dtype='float32'"):
      lib.DequantizedContract("x", "float32", 128)

  @parameterized.parameters(
      ({"name": "x", "dtype": "bfloat16"},),
      ({"name": "x", "dtype": "bfloat16", "group_size": 1, "bits": 4},),
      (3,),
  )
  def test_refuses_experts_of_no_known_contract(self, experts):
    values = document.to_dict(_BOTH[0]) | {"experts": experts}
    with self.assertRaisesRegex(ValueError, "not the fields of one of"):
      document.from_dict(lib.PackedDecoderContract, values)


if __name__ == "__main__":
  absltest.main()
