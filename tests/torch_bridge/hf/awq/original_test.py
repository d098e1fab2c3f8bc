"""Packed against original: each known fault is named by its signature."""

import itertools
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import numpy as np
import safetensors.numpy

from moejax.contracts import refusal
from moejax.numerics.packed import awq_format
from torch_bridge.hf.awq import original as lib

_FILES = pathlib.Path(__file__).parents[3] / "cases/files"
_NATURAL = tuple(range(8))


def _weight(seed=0, k=128, n=64):
  rng = np.random.default_rng(seed)
  # Columns of one sign have zero points 0 and 15.
  shift = np.where(np.arange(n) % 3 == 0, 0.2, 0.0) * np.sign(
      rng.standard_normal(n)
  )
  weight = rng.standard_normal((k, n)) * 0.05 + shift
  return weight.astype(np.float32).astype(ml_dtypes.bfloat16)


def _packed(weight, order=awq_format.ORDER, zero_order=None):
  operand = awq_format.quantize(weight, 32, "bfloat16")
  return (
      awq_format.pack(operand.codes, order),
      awq_format.pack(operand.zeros, zero_order or order),
      operand.scales,
  )


def _case_c10():
  found = safetensors.numpy.load_file(_FILES / "awq_128x16.safetensors")
  parts = {name.rpartition(".")[2]: array for name, array in found.items()}
  values = np.load(_FILES / "awq_128x16_dequant_f32.npy")
  return parts["qweight"], parts["qzeros"], parts["scales"], values


class SignaturesTest(parameterized.TestCase):

  def test_case_c10_worst_errors_of_each_fault(self):
    found = {r.name: r for r in lib.readings(*_case_c10())}
    # The published maxima, to the digits that are printed.
    for name, worst in (
        ("awq", 0.0),
        ("natural_order", 0.3948),
        ("natural_order_of_zeros", 0.1664),
        ("signed_nibbles", 0.3164),
        ("zero_plus_one", 0.01978),
        ("zero_0_as_15", 0.296630859),
        ("zero_0_as_16", 0.316406250),
    ):
      self.assertAlmostEqual(found[name].worst, worst, delta=5e-5, msg=name)
    self.assertEqual(found["awq"].beyond, 0)
    self.assertGreater(found["natural_order"].beyond, 1000)

  def test_a_right_packing_has_no_weight_beyond(self):
    for seed in range(5):
      weight = _weight(seed)
      lib.check("m", *_packed(weight), weight)
      self.assertEqual(lib.readings(*_packed(weight), weight)[0].beyond, 0)

  @parameterized.parameters(-1, 64)
  def test_a_right_packing_of_other_groups(self, group_size):
    weight = _weight()
    operand = awq_format.quantize(weight, group_size, "float16")
    lib.check("m", *awq_format.to_checkpoint(operand), weight)


class OrderTest(parameterized.TestCase):

  @parameterized.parameters(
      (_NATURAL,),
      (tuple(map(int, np.argsort(awq_format.ORDER))),),  # Its inverse.
      ((7, 6, 5, 4, 3, 2, 1, 0),),
      ((1, 0, 2, 3, 4, 5, 6, 7),),
  )
  def test_finds_the_order_and_refuses_with_it(self, order):
    weight = _weight()
    packed = _packed(weight, order)
    self.assertEqual(lib.nibble_order(*packed, weight), order)
    with self.assertRaises(refusal.HarnessError) as caught:
      lib.check("layers.0.up_proj", *packed, weight)
    message = str(caught.exception)
    self.assertRegex(message, r"layers\.0\.up_proj\.qweight: \d+ of 8192")
    self.assertIn(
        f"nibbles hold columns {order}, want (0, 2, 4, 6, 1, 3, 5, 7)", message
    )
    self.assertRegex(message, r"zero_plus_one \d+ \(worst")

  def test_finds_random_orders(self):
    weight = _weight(1)
    orders = itertools.islice(itertools.permutations(range(8)), 5, 40000, 9001)
    for order in orders:
      packed = _packed(weight, order)
      self.assertEqual(lib.nibble_order(*packed, weight), order)

  def test_names_zeros_in_another_order_than_codes(self):
    weight = _weight()
    packed = _packed(weight, zero_order=_NATURAL)
    self.assertIsNone(lib.nibble_order(*packed, weight))
    with self.assertRaisesRegex(
        refusal.HarnessError, "reading natural_order_of_zeros explains"
    ):
      lib.check("m", *packed, weight)

  def test_names_zero_points_stored_less_one(self):
    """The habit behind case C11; only a zero point of 0 would wrap."""
    rng = np.random.default_rng(2)
    weight = rng.uniform(-1, 1, (128, 16)).astype(ml_dtypes.bfloat16)
    operand = awq_format.quantize(weight, 32, "bfloat16")
    self.assertGreater(operand.zeros.min(), 0)
    packed = (
        awq_format.pack(operand.codes),
        awq_format.pack(operand.zeros - np.uint8(1)),
        operand.scales,
    )
    with self.assertRaisesRegex(
        refusal.HarnessError, "reading zero_plus_one explains them"
    ):
      lib.check("m", *packed, weight)

  def test_says_so_where_nothing_explains_them(self):
    weight = _weight()
    with self.assertRaisesRegex(refusal.HarnessError, "no known fault"):
      lib.check("m", *_packed(_weight(9)), weight)


if __name__ == "__main__":
  absltest.main()
