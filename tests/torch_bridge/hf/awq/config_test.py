"""quantization_config: what is free, and what is refused by name."""

import json
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import refusal
from torch_bridge.hf.awq import config as lib

_PUBLISHED = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": ["mlp.gate", "lm_head"],
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}


class FromHfTest(parameterized.TestCase):

  def test_reads_what_is_free(self):
    self.assertEqual(
        lib.from_hf(_PUBLISHED), lib.AwqConfig(128, ("mlp.gate", "lm_head"))
    )

  @parameterized.parameters(
      ({"backend": "autoawq", "do_fuse": False, "version": "GEMM"},),
      ({"format": "gemm", "fuse_max_seq_len": None},),
  )
  def test_reads_past_what_chooses_a_kernel(self, fields):
    self.assertEqual(lib.from_hf(_PUBLISHED | fields).group_size, 128)

  def test_a_null_list_says_nothing(self):
    found = lib.from_hf(_PUBLISHED | {"modules_to_not_convert": None})
    self.assertEqual(found.modules_to_not_convert, ())

  @parameterized.parameters(
      lib.AwqConfig(128, ("mlp.gate",)), lib.AwqConfig(-1)
  )
  def test_is_read_back(self, awq):
    self.assertEqual(lib.from_hf(lib.to_hf(awq)), awq)

  @parameterized.parameters(
      ("quant_method", "gptq", "awq"),
      ("quant_method", "compressed-tensors", "awq"),
      ("bits", 8, "4"),
      ("bits", True, "4"),
      ("zero_point", False, "True"),
      ("zero_point", 1, "True"),
      ("version", "gemv", "gemm"),
      ("format", "llm-awq", "gemm"),
      ("backend", "llm-awq", "None"),
      ("do_fuse", True, "None"),
  )
  def test_refuses_words_that_mean_something_else(self, name, value, want):
    with self.assertRaisesRegex(
        refusal.UnsupportedError,
        f"file: quantization_config.{name} is {value!r}, want '?{want}",
    ):
      lib.from_hf(_PUBLISHED | {name: value}, "file")

  def test_the_method_explains_before_fields_that_are_missing(self):
    with self.assertRaisesRegex(refusal.UnsupportedError, "quant_method"):
      lib.from_hf({"quant_method": "compressed-tensors", "config_groups": {}})

  def test_refuses_a_field_that_nobody_has_looked_at(self):
    with self.assertRaisesRegex(
        refusal.UnsupportedError, "not known here: desc_act=True"
    ):
      lib.from_hf(_PUBLISHED | {"desc_act": True})

  @parameterized.parameters("quant_method", "bits", "zero_point", "group_size")
  def test_refuses_a_config_without(self, name):
    fields = {k: v for k, v in _PUBLISHED.items() if k != name}
    with self.assertRaisesRegex(refusal.HarnessError, name):
      lib.from_hf(fields)

  @parameterized.parameters(0, -2)
  def test_case_c12_refuses_a_group_size_that_is_none(self, group_size):
    with self.assertRaisesRegex(
        refusal.HarnessError, f"group_size is {group_size}, want a positive"
    ):
      lib.from_hf(_PUBLISHED | {"group_size": group_size})

  @parameterized.parameters((["mlp.gate", 3],), ("mlp.gate",))
  def test_refuses_a_list_that_is_none(self, entries):
    with self.assertRaisesRegex(refusal.HarnessError, "want a list of names"):
      lib.from_hf(_PUBLISHED | {"modules_to_not_convert": entries})

  def test_refuses_a_folder_that_is_not_packed(self):
    with tempfile.TemporaryDirectory() as name:
      path = pathlib.Path(name) / "config.json"
      path.write_text(json.dumps({"model_type": "qwen3_moe"}))
      with self.assertRaisesRegex(
          refusal.HarnessError, "quantization_config=None; a packed checkpoint"
      ):
        lib.read(name)


if __name__ == "__main__":
  absltest.main()
