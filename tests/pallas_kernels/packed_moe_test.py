"""The packed expert layer in the interpreter, and its refusals.

Proven here: everything but that a tensor core takes the step `mma16` (see
`packed_moe_suite.py`). Needs no accelerator.
"""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from moejax.contracts import packed_gemm
from moejax.contracts import refusal
from moejax.numerics.packed import awq_format
from pallas_kernels import launch
from pallas_kernels import packed_moe as lib
from pallas_kernels import packed_weight
from tests import bits
from tests.pallas_kernels import packed_moe_suite as suite


class InterpreterTest(suite.PackedMoeSuite):
  interpret = True
  device = jax.devices("cpu")[0]

  @parameterized.parameters(
      {"group": 8, "fraction_bits": 24},
      {"exponents": "renormalized"},
      {"final": "nearest_even"},
  )
  def test_another_tensor_core(self, **fields):
    *inputs, contract = suite.case(tokens=2)
    mma = dataclasses.replace(packed_gemm.HOPPER, **fields)
    self.assert_oracle_bits(*inputs, suite.with_gemms(contract, mma=mma))

  def test_the_width_of_a_program_changes_nothing(self):
    inputs = suite.case("float16", 64, 128, 5, tokens=3)
    wide, narrow = (
        self.run_kernels(*inputs, tile_n=n) for n in (128, 32)
    )
    for a, b in zip(wide, narrow, strict=True):
      bits.assert_same_bits(a, b)


class RefusalTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.request, layer, self.blocks, self.contract = suite.case(tokens=3)
    with jax.default_device(jax.devices("cpu")[0]):
      self.weights = [
          packed_weight.from_operands(part, "float16") for part in layer
      ]

  def _run(self, x=None, gates=None, weights=None, contract=None, **fields):
    fields.setdefault("interpret", True)
    return lib.run(
        self.request.x if x is None else x,
        self.request.gates if gates is None else gates,
        *(weights or self.weights), self.blocks,
        contract or self.contract, launch.LaunchConfig(**fields),
    )

  def test_no_device(self):
    if jax.default_backend() != "cpu":
      self.skipTest("There is a device.")
    with self.assertRaisesRegex(refusal.UnsupportedError, "CUDA device"):
      self._run(interpret=False)

  def test_a_tensor_core_that_nobody_measured(self):
    mma = dataclasses.replace(packed_gemm.HOPPER, fraction_bits=24)
    contract = suite.with_gemms(self.contract, mma=mma)
    with self.assertRaisesRegex(refusal.UnsupportedError, "fraction_bits=24"):
      self._run(contract=contract, interpret=False)

  def test_another_activation(self):
    contract = dataclasses.replace(self.contract, silu_table="00")
    with self.assertRaisesRegex(refusal.UnsupportedError, "silu_table=00"):
      self._run(contract=contract)

  def test_arguments_that_contradict_each_other(self):
    other = suite.case(dtype="bfloat16")[3]
    for pattern, arguments in (
        ("bfloat16, got float16", {"contract": other}),
        ("gates float64", {"gates": self.request.gates.astype(np.float64)}),
        (r"a plan of 6 routes", {"gates": self.request.gates[:2]}),
        (r"does not fit W13 \(128, 256\)", {"weights": self.weights[::-1]}),
        ("groups of 128, .* group_size=64", {
            "contract": suite.with_gemms(self.contract, group_size=64)}),
        ("tile_n=128 does not divide thread_n=64", {"tile_n": 128}),
    ):
      with self.subTest(pattern), self.assertRaisesRegex(ValueError, pattern):
        self._run(**arguments)

  def test_a_plan_that_names_an_expert_without_weights(self):
    few = [
        packed_weight.PackedWeight(*(part[:1] for part in weight))
        for weight in self.weights
    ]
    with self.assertRaisesRegex(ValueError, r"weights of \[1\] experts"):
      self._run(weights=few)

  def test_a_launch_that_is_none(self):
    with self.assertRaisesRegex(ValueError, "num_warps=3"):
      launch.LaunchConfig(num_warps=3)

  def test_an_array_beyond_32_bit_offsets(self):
    launch.check_size("words", (1 << 15, (1 << 16) - 1))
    with self.assertRaisesRegex(refusal.UnsupportedError, r"words \(32768, 6"):
      launch.check_size("words", (1 << 15, 1 << 16))

  def test_a_weight_whose_rows_fill_no_tile(self):
    operand = awq_format.PackedOperand(
        np.zeros((32, 8), np.uint8), np.zeros((1, 8), np.uint8),
        np.zeros((1, 8), np.float16),
    )
    with self.assertRaisesRegex(refusal.UnsupportedError, "k=32, n=8"):
      packed_weight.pack(operand, "float16")


if __name__ == "__main__":
  absltest.main()
