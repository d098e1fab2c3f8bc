"""pack_awq: names, layouts, numbers, and a folder whole or not at all."""

import json

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import safetensors.numpy
import torch

from moejax.contracts import refusal
from tests import bits
from tests.torch_bridge.hf import tiny_models
from tests.torch_bridge.hf.awq import independent
from tests.torch_bridge.hf.awq import packed_models
from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf import hf_config
from torch_bridge.hf.awq import packer as lib

_GATE = packed_models.GATE


class PackTest(packed_models.PackedModelTestCase):

  def _both(self):
    return (
        checkpoint_lib.Checkpoint(self.plain),
        checkpoint_lib.Checkpoint(self.folder),
    )

  def test_names_and_shapes_are_those_of_awq(self):
    self.pack()
    plain, packed = self._both()
    expected = {}
    for name in plain.names():
      shape, dtype = plain.shape(name), plain.dtype(name)
      if ".experts." not in name:
        expected[name] = (shape, dtype)
        continue
      n, k = shape
      module = name.removesuffix(".weight")
      expected[f"{module}.qweight"] = ((k, n // 8), "int32")
      expected[f"{module}.qzeros"] = ((k // 16, n // 8), "int32")
      expected[f"{module}.scales"] = ((k // 16, n), "bfloat16")
    self.assertEqual(
        {n: (packed.shape(n), packed.dtype(n)) for n in packed.names()},
        expected,
    )
    self.assertIn(f"{_GATE}.qweight", expected)

  def test_what_is_not_packed_keeps_its_bits(self):
    self.pack()
    plain, packed = self._both()
    kept = set(plain.names()) & set(packed.names())
    for name in ("model.embed_tokens", "lm_head", "model.layers.1.mlp.gate"):
      self.assertIn(f"{name}.weight", kept)
    for name in kept:
      bits.assert_same_bits(packed.array(name), plain.array(name))

  @parameterized.parameters(-1, 8, 16)
  def test_every_weight_lies_within_its_step(self, group_size):
    summary = self.pack(lib.Request(group_size=group_size))
    plain, packed = self._both()
    count, worst = 0, 0.0
    for name in plain.names():
      if ".experts." not in name:
        continue
      module = name.removesuffix(".weight")
      triple = [
          packed.array(f"{module}.{x}") for x in ("qweight", "qzeros", "scales")
      ]
      values = independent.weight(*triple, "bfloat16").astype(np.float32)
      original = plain.array(name).T.astype(np.float32)
      rows = len(values) // len(triple[2])
      step = np.repeat(triple[2].astype(np.float32), rows, axis=0)
      worst = max(worst, float((np.abs(values - original) / step).max()))
      count += original.size
    self.assertEqual(summary["packed_weights"], count)
    self.assertAlmostEqual(summary["worst_steps"], worst, places=6)
    # Half a step, and what clipping and two roundings to 8 bits add.
    self.assertBetween(worst, 0.4, 0.75)

  def test_the_config_says_how(self):
    self.pack()
    fields = json.loads((self.folder / "config.json").read_text())
    packing = fields.pop("quantization_config")
    self.assertEqual(
        packing,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 16,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["self_attn", "mlp.gate", "lm_head"],
        },
    )
    self.assertEqual(
        fields, json.loads((self.plain / "config.json").read_text())
    )
    hf_config.from_hf(fields)

  def test_packs_attention_where_no_entry_skips_it(self):
    self.pack(lib.Request(16, ("mlp.gate", "self_attn.o_proj")))
    names = self._both()[1].names()
    at = "model.layers.1.self_attn"
    self.assertIn(f"{at}.q_proj.qweight", names)
    self.assertNotIn(f"{at}.q_proj.weight", names)
    self.assertIn(f"{at}.o_proj.weight", names)
    self.assertIn(f"{at}.q_norm.weight", names)

  def test_stacked_experts_are_packed_as_single_ones(self):
    self.pack()
    single = (self.folder / "model.safetensors").read_bytes()
    plain = checkpoint_lib.Checkpoint(self.plain)
    tensors = dict(plain.items())
    for layer in (0, 1):
      at = f"model.layers.{layer}.mlp.experts"
      gate, up, down = (
          np.stack([tensors.pop(f"{at}.{e}.{p}.weight") for e in range(4)])
          for p in ("gate_proj", "up_proj", "down_proj")
      )
      tensors[f"{at}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
      tensors[f"{at}.down_proj"] = down
    (self.plain / "model.safetensors").write_bytes(
        safetensors.numpy.save(tensors, metadata={"format": "pt"})
    )
    self.folder = self.folder.with_name("again")
    self.pack()
    self.assertEqual((self.folder / "model.safetensors").read_bytes(), single)

  def test_shards_hold_the_same_tensors(self):
    one = self.pack()
    self.folder = self.folder.with_name("sharded")
    many = self.pack(lib.Request(group_size=16, shard_bytes=5000))
    self.assertEqual(one["result"], many["result"])
    self.assertGreater(
        len(checkpoint_lib.Checkpoint(self.folder).files), 5
    )

  def test_scales_of_another_dtype(self):
    self.pack(lib.Request(group_size=16, scales="float16"))
    self.assertEqual(self._both()[1].dtype(f"{_GATE}.scales"), "float16")

  def test_copies_tokenizer_and_prompts_and_nothing_else(self):
    self.pack()
    (self.plain / "tokenizer.json").write_text("{}")
    (self.plain / "prompts.json").write_text("{}")
    (self.plain / "notes.txt").write_text("mine")
    self.folder = self.folder.with_name("again")
    self.pack()
    for name in ("tokenizer.json", "prompts.json"):
      self.assertTrue((self.folder / name).is_file())
    self.assertFalse((self.folder / "notes.txt").exists())


class RefusalTest(packed_models.PackedModelTestCase):

  def assert_not_packed(self, message, request, error=refusal.HarnessError):
    with self.assertRaisesRegex(error, message):
      self.pack(request)
    parent = self.folder.parent
    self.assertEqual([p.name for p in parent.iterdir()], ["plain"])

  def test_a_group_size_that_does_not_divide(self):
    self.assert_not_packed(
        r"experts\.0\.gate_proj\.weight has k=32 inputs, want a multiple of"
        r" group_size=128",
        lib.Request(group_size=128),
    )

  @parameterized.parameters(0, -2)
  def test_a_group_size_that_is_none(self, group_size):
    self.assert_not_packed(
        f"group_size is {group_size}", lib.Request(group_size=group_size)
    )

  def test_outputs_that_do_not_fill_words(self):
    tiny_models.save(
        tiny_models.model(**packed_models.SIZES | dict(
            moe_intermediate_size=12
        )),
        self.plain,
    )
    self.assert_not_packed(
        r"up_proj\.weight has n=12 outputs, want a multiple of 8",
        lib.Request(group_size=-1),
    )

  def test_a_router_that_no_entry_skips(self):
    self.assert_not_packed(
        r"model\.layers\.0\.mlp\.gate\.weight is a router",
        lib.Request(group_size=16, modules_to_not_convert=("self_attn",)),
        refusal.UnsupportedError,
    )

  def test_a_list_that_skips_everything(self):
    self.assert_not_packed(
        "skips every projection", lib.Request(16, ("model",))
    )

  def test_an_entry_that_is_no_name(self):
    self.assert_not_packed(
        r"'re:\.\*gate' is not made of dotted", lib.Request(16, ("re:.*gate",))
    )

  @parameterized.parameters("float32", "int8")
  def test_scales_that_are_not_16_bits(self, scales):
    self.assert_not_packed(
        f"scales '{scales}', want float16 or bfloat16",
        lib.Request(16, scales=scales),
    )

  def test_a_model_that_is_not_16_bits(self):
    tiny_models.save(
        tiny_models.model(dtype=torch.float32, **packed_models.SIZES),
        self.plain,
    )
    self.assert_not_packed("dtype 'float32', want", lib.Request(16))

  def test_a_scale_that_overflows_names_its_tensor(self):
    self.pack()
    self.folder = self.folder.with_name("again")

    def change(tensors):
      tensors[f"{_GATE}.weight"][3, 5] = 2e6

    self.rewrite(change, self.plain)
    with self.assertRaisesRegex(
        refusal.HarnessError,
        rf"{_GATE}\.weight: group 0, column 3: .* no finite float16 scale",
    ):
      self.pack(lib.Request(16, scales="float16"))
    self.assertFalse(self.folder.exists())

  def test_a_folder_that_holds_something(self):
    self.folder.mkdir()
    (self.folder / "notes.txt").write_text("mine")
    with self.assertRaisesRegex(refusal.HarnessError, "holds something"):
      self.pack()
    self.assertEqual((self.folder / "notes.txt").read_text(), "mine")

  def test_a_tensor_too_many(self):
    self.pack()
    self.folder = self.folder.with_name("again")

    def change(tensors):
      tensors["model.extra.weight"] = tensors["model.norm.weight"]

    self.rewrite(change, self.plain)
    with self.assertRaisesRegex(refusal.HarnessError, "model.extra.weight"):
      self.pack()


if __name__ == "__main__":
  absltest.main()
