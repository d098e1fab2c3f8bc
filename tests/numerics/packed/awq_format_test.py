"""AWQ tensors: cases C10 to C12, one rounding, packing, Marlin's layout."""

import fractions
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import numpy as np
import safetensors.numpy

from moejax.numerics.packed import awq_format as lib
from moejax.numerics.packed import marlin_layout
from tests import bits

_FILES = pathlib.Path(__file__).parents[2] / "cases/files"
_UNIT = ((7 * np.arange(16)[:, None] + 3 * np.arange(64)) % 16).astype(np.uint8)


def _file(name):
  return np.load(_FILES / f"awq_128x16_{name}.npy")


def _tensors():
  found = safetensors.numpy.load_file(_FILES / "awq_128x16.safetensors")
  by_part = {name.rpartition(".")[2]: array for name, array in found.items()}
  return by_part["qweight"], by_part["qzeros"], by_part["scales"]


def _hex(words):
  return [f"{int(word) & 0xFFFFFFFF:#010x}" for word in words]


def _random_operand(seed, k=128, n=64, group=32, dtype=np.float16):
  rng = np.random.default_rng(seed)
  scales = rng.uniform(-0.02, 0.02, (k // group, n)).astype(dtype)
  return lib.PackedOperand(
      rng.integers(0, 16, (k, n), np.uint8),
      rng.integers(0, 16, (k // group, n), np.uint8),
      scales,
  )


class WordTest(absltest.TestCase):

  def test_case_c10_words(self):
    ramp = np.arange(16, dtype=np.uint8)[None]
    self.assertEqual(_hex(lib.pack(ramp)[0]), ["0x75316420", "0xfdb9eca8"])
    self.assertEqual(int(lib.pack(ramp)[0, 1]), -38146904)
    word = np.array([0x76543210], np.int32)
    self.assertEqual(lib.unpack(word).tolist(), [0, 4, 1, 5, 2, 6, 3, 7])
    top = np.array([0xF0000000], np.uint32).view(np.int32)
    self.assertEqual(lib.unpack(top).tolist(), [0] * 7 + [15])

  def test_unit_vector(self):
    self.assertEqual(
        _hex(lib.pack(_UNIT)[0, :4]), ["0x5f932c60", "0xd71ba4e8"] * 2
    )

  def test_pack_is_the_inverse_of_unpack(self):
    words = np.random.default_rng(0).integers(
        -(2**31), 2**31, (32, 8), np.int32
    )
    for order in (lib.ORDER, tuple(range(8))):
      bits.assert_same_bits(lib.pack(lib.unpack(words, order), order), words)


class CaseTest(parameterized.TestCase):

  def test_codes_and_zeros_of_the_file(self):
    operand = lib.from_checkpoint(*_tensors(), 32)
    bits.assert_same_bits(operand.codes, _file("codes_u8"))
    bits.assert_same_bits(operand.zeros, _file("zeros_u8"))
    self.assertEqual(operand.group_size, 32)

  def test_values_of_the_file(self):
    bits.assert_same_bits(lib.read_as(*_tensors(), "awq"),
                          _file("dequant_f32"))
    operand = lib.from_checkpoint(*_tensors(), 32)
    bits.assert_same_bits(
        lib.dequantize(operand, "float16"), _file("dequant_f16")
    )

  @parameterized.parameters(
      ("natural_order", 1478, 0.3948),
      ("natural_order_of_zeros", 1408, 0.1664),
      ("signed_nibbles", 954, 0.3164),
      ("zero_plus_one", 2048, 0.01978),
      ("zero_0_as_15", 128, 0.296630859),
      ("zero_0_as_16", 128, 0.316406250),
  )
  def test_fault_signature(self, reading, wrong, largest):
    right, found = _file("dequant_f32"), lib.read_as(*_tensors(), reading)
    self.assertEqual(int((found != right).sum()), wrong)
    self.assertAlmostEqual(float(np.abs(found - right).max()), largest, 4)
    self.assertEqual(lib.explain(*_tensors(), found), (reading,))
    self.assertEqual(
        lib.explain(*_tensors(), found.astype(np.float16)), (reading,)
    )

  def test_the_right_reading_and_no_reading(self):
    right = _file("dequant_f32")
    self.assertEqual(lib.explain(*_tensors(), right), ("awq",))
    self.assertEqual(lib.explain(*_tensors(), right + 1), ())
    with self.assertRaisesRegex(ValueError, "gptq.*natural_order"):
      lib.read_as(*_tensors(), "gptq")

  def test_case_c11_zero_point_zero(self):
    operand = lib.PackedOperand(
        np.full((1, 8), 3, np.uint8), np.zeros((1, 8), np.uint8),
        np.full((1, 8), 0.5, np.float16),
    )
    bits.assert_same_bits(
        lib.dequantize(operand, "float16"), np.full((1, 8), 1.5, np.float16)
    )

  def test_case_c12_group_minus_one_is_one_group(self):
    rng = np.random.default_rng(1)
    qweight = rng.integers(-(2**31), 2**31, (128, 2), np.int32)
    qzeros = rng.integers(-(2**31), 2**31, (1, 2), np.int32)
    scales = rng.random((1, 16)).astype(np.float16)
    one = lib.from_checkpoint(qweight, qzeros, scales, -1)
    bits.assert_same_bits(
        lib.dequantize(one, "float16"),
        lib.dequantize(
            lib.from_checkpoint(qweight, qzeros, scales, 128), "float16"
        ),
    )

  @parameterized.parameters(0, -2, 48)
  def test_case_c12_group_size_is_no_divisor(self, group):
    with self.assertRaisesRegex(
        ValueError, f"up_proj: group_size={group} does not divide the k=128"
    ):
      lib.from_checkpoint(*_tensors(), group, "up_proj")

  def test_case_c12_shapes_are_named(self):
    qweight, qzeros, scales = _tensors()
    with self.assertRaisesRegex(
        ValueError, r"up_proj.qzeros has shape \(4, 2\), not \(1, 2\)"
    ):
      lib.from_checkpoint(qweight, qzeros, scales, -1, "up_proj")
    with self.assertRaisesRegex(
        ValueError, r"scales has shape \(4, 8\), not \(4, 16\)"
    ):
      lib.from_checkpoint(qweight, qzeros, scales[:, :8], 32)


class DequantizeTest(parameterized.TestCase):

  @parameterized.parameters("float16", "bfloat16")
  def test_one_rounding_of_the_exact_product(self, dtype):
    half = np.dtype(getattr(ml_dtypes, dtype, dtype))
    # Every difference times scales of the whole range, subnormals included.
    patterns = np.arange(0, 2**16, 97, dtype=np.uint16).view(half)
    scales = patterns[np.isfinite(patterns.astype(np.float32))]
    scales = scales[: len(scales) // 8 * 8][None]
    codes = np.repeat(np.arange(16, dtype=np.uint8)[:, None], scales.size, 1)
    zeros = np.full(scales.shape, 6, np.uint8)
    found = lib.dequantize(lib.PackedOperand(codes, zeros, scales), dtype)
    rng = np.random.default_rng(2)
    for row, column in zip(rng.integers(0, 16, 400),
                           rng.integers(0, scales.size, 400), strict=True):
      exact = fractions.Fraction(int(row) - 6) * fractions.Fraction(
          float(scales[0, column])
      )
      value = float(found[row, column])
      if not np.isfinite(value):
        continue
      gap = abs(fractions.Fraction(value) - exact)
      for step in (-1, 1):
        near = int(found[row, column].view(np.uint16)) + step
        other = float(np.uint16(near % 2**16).view(half))
        if np.isfinite(other):
          self.assertLessEqual(gap, abs(fractions.Fraction(other) - exact))

  def test_it_is_not_the_folded_form(self):
    operand = _random_operand(3)
    scale = np.repeat(operand.scales, 32, 0)
    zero = np.repeat(operand.zeros, 32, 0).astype(np.float16)
    folded = (
        operand.codes.astype(np.float64) * scale.astype(np.float64)
        - (zero * scale).astype(np.float64)
    ).astype(np.float16)
    differs = (folded != lib.dequantize(operand, "float16")).mean()
    self.assertBetween(differs, 0.2, 0.5)

  def test_float16_scales_in_bfloat16_are_rounded_first(self):
    operand = lib.PackedOperand(
        np.full((1, 8), 3, np.uint8), np.zeros((1, 8), np.uint8),
        np.full((1, 8), 1.00390625 + 2**-10, np.float16),
    )
    # 1.0048828125 becomes 1.0078125; three times that rounds up again.
    bits.assert_same_bits(
        lib.dequantize(operand, "bfloat16"),
        np.full((1, 8), 3.03125, ml_dtypes.bfloat16),
    )


class QuantizeTest(parameterized.TestCase):

  @parameterized.parameters((32, "float16"), (-1, "bfloat16"))
  def test_error_is_within_the_step(self, group, dtype):
    weight = np.random.default_rng(5).normal(0, 0.1, (128, 16))
    weight = weight.astype(np.float32)
    operand = lib.quantize(weight, group, dtype)
    self.assertEqual(operand.group_size, 128 if group == -1 else group)
    scale = np.repeat(operand.scales.astype(np.float32), operand.group_size, 0)
    found = lib.dequantize(operand, dtype).astype(np.float32)
    self.assertLess((np.abs(found - weight) / scale).max(), 1.1)
    words = lib.to_checkpoint(operand)
    again = lib.from_checkpoint(*words, group)
    bits.assert_same_bits(again.codes, operand.codes)
    bits.assert_same_bits(again.zeros, operand.zeros)

  def test_a_dequantized_weight_packs_to_itself(self):
    operand = _random_operand(6)
    operand = lib.PackedOperand(
        np.concatenate([np.zeros((1, 64), np.uint8),
                        np.full((1, 64), 15, np.uint8),
                        operand.codes[2:32]]),
        operand.zeros[:1], np.abs(operand.scales[:1]) + np.float16(0.01),
    )
    exact = lib.read_as(*lib.to_checkpoint(operand), "awq")
    again = lib.quantize(exact, 32)
    bits.assert_same_bits(again.codes, operand.codes)
    bits.assert_same_bits(again.zeros, operand.zeros)
    bits.assert_same_bits(again.scales, operand.scales)

  def test_zeros_stay_zero(self):
    operand = lib.quantize(np.zeros((32, 8), np.float32), 32)
    self.assertEqual(np.abs(lib.dequantize(operand, "float16")).max(), 0)
    self.assertEqual(float(operand.scales.min()), 2.0**-14)

  def test_refusals(self):
    weight = np.ones((64, 8), np.float32)
    with self.assertRaisesRegex(ValueError, "group_size=48 .* k=64"):
      lib.quantize(weight, 48)
    weight[33, 5] = 1e9
    with self.assertRaisesRegex(ValueError, "group 1, column 5.*float16"):
      lib.quantize(weight, 32)
    weight[33, 5] = np.nan
    with self.assertRaisesRegex(ValueError, "group 1, column 5"):
      lib.quantize(weight, 32)


class OperandTest(absltest.TestCase):

  def test_refusals(self):
    good = _random_operand(7)
    for changed, message in (
        ({"zeros": good.zeros[:, :8]}, r"zeros \(4, 8\)"),
        ({"codes": good.codes + 16}, "codes must be uint8 of 0..15"),
        ({"codes": good.codes[:126]}, "k=126 is not divided by 4"),
        ({"scales": good.scales.astype(np.float32)}, "float32"),
    ):
      fields = {"codes": good.codes, "zeros": good.zeros,
                "scales": good.scales, **changed}
      with self.assertRaisesRegex(ValueError, message):
        lib.PackedOperand(**fields)

  def test_words(self):
    with self.assertRaisesRegex(ValueError, "int64, not int32"):
      lib.unpack(np.zeros((2, 2), np.int64))
    with self.assertRaisesRegex(ValueError, "1..16"):
      lib.pack(np.arange(1, 17, dtype=np.uint8)[None])
    with self.assertRaisesRegex(ValueError, r"\(2, 7\)"):
      lib.pack(np.zeros((2, 7), np.uint8))


class MarlinLayoutTest(absltest.TestCase):

  def test_unit_vector(self):
    self.assertEqual(
        _hex(marlin_layout.repack(_UNIT)[0, :6]),
        ["0x7ff70880"] * 4 + ["0x5dd5e66e"] * 2,
    )

  def test_every_nibble_is_where_the_formula_says(self):
    codes = np.random.default_rng(8).integers(0, 16, (32, 128), np.uint8)
    words = marlin_layout.repack(codes).view(np.uint32)
    self.assertEqual(words.shape, (2, 256))
    for k_tile, n_tile, lane, g, m in np.ndindex(2, 2, 32, 4, 8):
      k = 16 * k_tile + 2 * (lane % 4) + (0, 8, 0, 8, 1, 9, 1, 9)[m]
      n = (64 * n_tile + 16 * g + lane // 4 + (0, 0, 8, 8, 0, 0, 8, 8)[m])
      word = words[k_tile, 128 * n_tile + 4 * lane + g]
      self.assertEqual(int(word) >> (4 * m) & 15, codes[k, n])

  def test_scales_and_zeros(self):
    column = np.arange(128, dtype=np.uint8)[None]
    found = marlin_layout.permute_scales(column)[0]
    zeros = lib.unpack(
        marlin_layout.repack_zeros(column % 16), tuple(range(8))
    )[0]
    for c, i, j in np.ndindex(2, 8, 8):
      self.assertEqual(found[64 * c + 8 * i + j], 64 * c + i + 8 * j)
      self.assertEqual(
          zeros[64 * c + 8 * i + j], (64 * c + i + 8 * lib.ORDER[j]) % 16
      )

  def test_refusals(self):
    with self.assertRaisesRegex(ValueError, r"\(8, 64\)"):
      marlin_layout.repack(np.zeros((8, 64), np.uint8))
    with self.assertRaisesRegex(ValueError, "96 columns"):
      marlin_layout.permute_scales(np.zeros((1, 96), np.float16))


if __name__ == "__main__":
  absltest.main()
