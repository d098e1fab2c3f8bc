"""Fingerprints: identity of bytes, shape, dtype and place; not of values.

Needs no accelerator.
"""

import dataclasses
import hashlib
import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import numpy as np
import safetensors.numpy

from moejax.numerics import fingerprint as lib
from tests import bits

_CASES = pathlib.Path(__file__).parents[1] / "cases" / "files"
_DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16,
           "I32": np.int32}
_IDENTITY = lib.Identity(
    model="qwen3_moe",
    checkpoint="c" * 64,
    tokenizer="t" * 64,
    prompt=(1, 2, 3),
    decoding={"strategy": "greedy"},
    contract="d" * 64,
)


class SpecialValuesTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.tensors = safetensors.numpy.load_file(
        _CASES / "special_values.safetensors"
    )
    cls.expected = json.loads(
        (_CASES / "special_values_expected.json").read_text("utf-8")
    )

  def _print(self, name):
    return lib.fingerprint(self.tensors[name], "surface")

  def test_c16_payloads_are_the_published_bytes(self):
    self.assertEqual(set(self.tensors), set(self.expected))
    for name, tensor in self.tensors.items():
      expected = self.expected[name]
      with self.subTest(name):
        words = [int(word, 16) for word in expected["bits_hex"]]
        uint = np.dtype(f"u{tensor.dtype.itemsize}")
        bits.assert_same_bits(
            tensor,
            np.array(words, uint)
            .view(_DTYPES[expected["dtype"]])
            .reshape(expected["shape"]),
        )
        self.assertEqual(
            lib.payload_digest(tensor), expected["sha256_raw_le_bytes"]
        )

  def test_c16_equal_bytes_of_another_shape_or_dtype_differ(self):
    names = ("zeros_f32_2x3", "zeros_f32_3x2", "zeros_i32_2x3")
    self.assertLen({lib.payload_digest(self.tensors[n]) for n in names}, 1)
    self.assertLen({self._print(name) for name in names}, 3)

  def test_c16_minus_zero_is_not_plus_zero(self):
    self.assertNotEqual(
        self._print("negzeros_f32_2x3"), self._print("zeros_f32_2x3")
    )

  @parameterized.parameters("bf16_specials", "f32_specials", "f16_specials")
  def test_c16_nan_equals_itself_and_no_other_nan(self, name):
    tensor = self.tensors[name]
    self.assertEqual(
        lib.fingerprint(tensor.copy(), "surface"), self._print(name)
    )
    words = tensor.copy().view(f"u{tensor.dtype.itemsize}")
    words[-1] ^= 2  # Another payload of the last value, a NaN.
    self.assertNotEqual(
        lib.fingerprint(words.view(tensor.dtype), "surface"), self._print(name)
    )

  def test_c16_a_transposed_view_is_its_contiguous_copy(self):
    ramp = self.tensors["ramp_f32_2x3"]
    self.assertEqual(
        lib.fingerprint(ramp.T, "surface"), self._print("ramp_f32_T_3x2")
    )
    self.assertNotEqual(
        self._print("ramp_f32_2x3"), self._print("ramp_f32_T_3x2")
    )

  @parameterized.parameters("f32_specials", "f16_specials", "zeros_i32_2x3")
  def test_c16_byte_order_does_not_matter(self, name):
    tensor = self.tensors[name]
    swapped = tensor.astype(tensor.dtype.newbyteorder(">"))
    self.assertEqual(lib.fingerprint(swapped, "surface"), self._print(name))
    self.assertEqual(
        lib.payload_digest(swapped), lib.payload_digest(tensor)
    )

  def test_c16_insertion_order_does_not_matter_and_names_do(self):
    whole = lib.tree(self.tensors)
    backwards = dict(reversed(self.tensors.items()))
    self.assertEqual(lib.tree(backwards), whole)
    renamed = {
        "other" if name == "f32_specials" else name: tensor
        for name, tensor in self.tensors.items()
    }
    self.assertNotEqual(lib.tree(renamed), whole)

  def test_checkpoint_digest_covers_names_shapes_dtypes_and_bytes(self):
    whole = lib.checkpoint_digest(self.tensors.items())
    self.assertEqual(
        lib.checkpoint_digest(reversed(self.tensors.items())), whole
    )
    zeros = self.tensors["zeros_f32_2x3"]
    for name, other in (
        ("shape", zeros.reshape(3, 2)),
        ("dtype", zeros.view(np.int32)),
        ("sign", -zeros),
    ):
      with self.subTest(name):
        changed = {**self.tensors, "zeros_f32_2x3": other}
        self.assertNotEqual(lib.checkpoint_digest(changed.items()), whole)


class HeaderTest(parameterized.TestCase):

  def test_digest_covers_header_newline_and_payload(self):
    x = np.float32([[1, 2], [3, -0.0]])
    header = (
        '{"axes":"token,embed","byte_order":"little","dtype":"float32",'
        '"element_order":"C","identity":null,"layer":2,"nan":"bits",'
        '"padding":"excluded","position":7,"schema":1,"shape":[2,2],'
        '"signed_zero":"kept","surface":"embed"}'
    )
    self.assertEqual(
        lib.fingerprint(x, "embed", axes="token,embed", layer=2, position=7),
        hashlib.sha256(header.encode() + b"\n" + x.tobytes()).hexdigest(),
    )

  @parameterized.parameters(
      {"surface": "other"},
      {"layer": 1},
      {"layer": None},
      {"position": 4},
      {"axes": "batch"},
      {"nan": "canonical"},
      {"identity": None},
  )
  def test_every_field_matters(self, **change):
    x = np.arange(4, dtype=np.float32)
    base = dict(
        surface="embed", layer=0, position=3, axes="token", identity=_IDENTITY
    )
    self.assertNotEqual(
        lib.fingerprint(x, **{**base, **change}), lib.fingerprint(x, **base)
    )

  def test_every_part_of_the_identity_matters(self):
    x = np.arange(4, dtype=np.float32)
    others = {
        "model": "other",
        "checkpoint": "e" * 64,
        "tokenizer": "e" * 64,
        "prompt": (1, 2),
        "decoding": {"strategy": "sample"},
        "contract": "e" * 64,
    }
    fields = {field.name for field in dataclasses.fields(lib.Identity)}
    self.assertEqual(set(others), fields)
    prints = {
        lib.fingerprint(
            x, "embed", identity=dataclasses.replace(_IDENTITY, **{k: v})
        )
        for k, v in others.items()
    }
    prints.add(lib.fingerprint(x, "embed", identity=_IDENTITY))
    self.assertLen(prints, len(others) + 1)

  def test_refuses_another_nan_rule(self):
    with self.assertRaisesRegex(ValueError, "nan='any'"):
      lib.fingerprint(np.zeros(1, np.float32), "embed", nan="any")


class NanRuleTest(parameterized.TestCase):

  @parameterized.parameters("float32", "float16", "bfloat16")
  def test_canonical_makes_every_nan_one_and_keeps_the_rest(self, dtype):
    kind = np.dtype(dtype)
    uint = np.dtype(f"u{kind.itemsize}")
    quiet = np.array(np.nan, kind).view(uint)
    x = np.array([0, quiet | 1, quiet, 1 << (8 * kind.itemsize - 1)], uint)
    y = np.array([0, quiet, quiet | 2, 1 << (8 * kind.itemsize - 1)], uint)
    x, y = x.view(kind), y.view(kind)
    prints = {
        rule: [lib.fingerprint(v, "embed", nan=rule) for v in (x, y)]
        for rule in lib.NAN_RULES
    }
    self.assertEqual(*prints["canonical"])
    self.assertNotEqual(*prints["bits"])
    y[3] = 0  # The sign of a zero still matters.
    self.assertNotEqual(
        lib.fingerprint(y, "embed", nan="canonical"), prints["canonical"][0]
    )

  def test_canonical_takes_integers_as_they_are(self):
    for x in (np.arange(3, dtype=np.int32), np.array([True, False])):
      self.assertEqual(lib.payload(x, "canonical"), x.tobytes())


class CompositeTest(absltest.TestCase):

  def test_name_order_and_digests_matter(self):
    parts = [("a", "1" * 64), ("b", "2" * 64)]
    whole = lib.composite("state", parts)
    self.assertEqual(lib.composite("state", iter(parts)), whole)
    others = {
        lib.composite("other", parts),
        lib.composite("state", parts[::-1]),
        lib.composite("state", parts[:1]),
        lib.composite("state", [parts[0], ("b", "3" * 64)]),
        lib.composite("state", [parts[0], ("c", "2" * 64)]),
    }
    self.assertLen(others | {whole}, 6)


if __name__ == "__main__":
  absltest.main()
