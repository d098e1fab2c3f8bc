"""The released checkpoint's tensors, counted and spelled out."""

import collections
import dataclasses
import math
import re

from absl.testing import absltest
from absl.testing import parameterized

from moejax.modules.deepseek_v4 import parameters
from tests.torch_bridge.hf.deepseek_v4 import flash_config
from torch_bridge.hf.deepseek_v4 import config as config_lib
from torch_bridge.hf.deepseek_v4 import inventory as lib
from torch_bridge.hf.deepseek_v4 import names

_FLASH = config_lib.from_hf(flash_config.FLASH)
_BF16, _F32, _I64 = "bfloat16", "float32", "int64"
_F8, _E8M0, _I8 = "float8_e4m3fn", "float8_e8m0fnu", "int8"

# Written from the description of the release, independent of the map.
_EVERY_LAYER = {
    "attn_norm.weight": (_BF16, (4096,)),
    "ffn_norm.weight": (_BF16, (4096,)),
    "hc_attn_fn": (_F32, (24, 16384)),
    "hc_attn_base": (_F32, (24,)),
    "hc_attn_scale": (_F32, (3,)),
    "hc_ffn_fn": (_F32, (24, 16384)),
    "hc_ffn_base": (_F32, (24,)),
    "hc_ffn_scale": (_F32, (3,)),
    "attn.attn_sink": (_F32, (64,)),
    "attn.wq_a.weight": (_F8, (1024, 4096)),
    "attn.wq_a.scale": (_E8M0, (8, 32)),
    "attn.q_norm.weight": (_BF16, (1024,)),
    "attn.kv_norm.weight": (_BF16, (512,)),
    "attn.wq_b.weight": (_F8, (32768, 1024)),
    "attn.wq_b.scale": (_E8M0, (256, 8)),
    "attn.wkv.weight": (_F8, (512, 4096)),
    "attn.wkv.scale": (_E8M0, (4, 32)),
    "attn.wo_a.weight": (_F8, (8192, 4096)),
    "attn.wo_a.scale": (_E8M0, (64, 32)),
    "attn.wo_b.weight": (_F8, (4096, 8192)),
    "attn.wo_b.scale": (_E8M0, (32, 64)),
    "ffn.gate.weight": (_BF16, (256, 4096)),
    **{f"ffn.shared_experts.{w}.{part}": tensor
       for w in ("w1", "w3")
       for part, tensor in (("weight", (_F8, (2048, 4096))),
                            ("scale", (_E8M0, (16, 32))))},
    "ffn.shared_experts.w2.weight": (_F8, (4096, 2048)),
    "ffn.shared_experts.w2.scale": (_E8M0, (32, 16)),
    **{f"ffn.experts.E.{w}.{part}": tensor
       for w in ("w1", "w3")
       for part, tensor in (("weight", (_I8, (2048, 2048))),
                            ("scale", (_E8M0, (2048, 128))))},
    "ffn.experts.E.w2.weight": (_I8, (4096, 1024)),
    "ffn.experts.E.w2.scale": (_E8M0, (4096, 64)),
}
_TOP_K = {"ffn.gate.bias": (_F32, (256,))}
_HASH = {"ffn.gate.tid2eid": (_I64, (129280, 6))}
_CSA = {
    "attn.compressor.ape": (_F32, (4, 1024)),
    "attn.compressor.wkv.weight": (_BF16, (1024, 4096)),
    "attn.compressor.wgate.weight": (_BF16, (1024, 4096)),
    "attn.compressor.norm.weight": (_BF16, (512,)),
    "attn.indexer.wq_b.weight": (_F8, (8192, 1024)),
    "attn.indexer.wq_b.scale": (_E8M0, (64, 8)),
    "attn.indexer.weights_proj.weight": (_BF16, (64, 4096)),
    "attn.indexer.compressor.ape": (_F32, (4, 256)),
    "attn.indexer.compressor.wkv.weight": (_BF16, (256, 4096)),
    "attn.indexer.compressor.wgate.weight": (_BF16, (256, 4096)),
    "attn.indexer.compressor.norm.weight": (_BF16, (128,)),
}
_HCA = {
    "attn.compressor.ape": (_F32, (128, 512)),
    "attn.compressor.wkv.weight": (_BF16, (512, 4096)),
    "attn.compressor.wgate.weight": (_BF16, (512, 4096)),
    "attn.compressor.norm.weight": (_BF16, (512,)),
}
_WHOLE = {
    "embed.weight": (_BF16, (129280, 4096)),
    "head.weight": (_BF16, (129280, 4096)),
    "norm.weight": (_BF16, (4096,)),
    "hc_head_fn": (_F32, (4, 16384)),
    "hc_head_base": (_F32, (4,)),
    "hc_head_scale": (_F32, (1,)),
}


def _spelled_out(prefix, *groups):
  """Tensors of one block; E stands for each of 256 experts."""
  out = {}
  for group in groups:
    for name, tensor in group.items():
      for expert in range(256) if ".E." in name else (0,):
        out[prefix + name.replace(".E.", f".{expert}.")] = tensor
  return out


class FlashTest(parameterized.TestCase):

  def test_every_tensor_of_the_decoder_has_its_dtype_and_shape(self):
    expected = dict(_WHOLE)
    for layer in range(43):
      kind = {} if layer < 2 else _HCA if layer % 2 else _CSA
      route = _HASH if layer < 3 else _TOP_K
      expected |= _spelled_out(f"layers.{layer}.", _EVERY_LAYER, route, kind)
    found = lib.decoder(_FLASH)
    self.assertEqual(found.keys() ^ expected.keys(), set())
    self.assertEqual(found, expected)
    self.assertEqual(len(found), 67_612)

  def test_each_kind_of_layer_has_its_count(self):
    counts = collections.Counter(
        match[1]
        for name in lib.decoder(_FLASH)
        if (match := re.match(r"layers\.(\d+)\.", name))
    )
    expected = {"swa": 1_565, "hca": 1_569, "csa": 1_576}
    for layer, kind in enumerate(_FLASH.attentions):
      self.assertEqual(counts[str(layer)], expected[kind])
    self.assertEqual(sum(counts.values()) + 6, 67_612)

  def test_the_further_block_is_counted_and_ignored(self):
    expected = _spelled_out("mtp.0.", _EVERY_LAYER, _TOP_K)
    expected |= {
        f"mtp.0.{name}": _WHOLE[name]
        for name in ("norm.weight", "hc_head_fn", "hc_head_base",
                     "hc_head_scale")
    }
    for name in ("e_proj", "h_proj"):
      expected[f"mtp.0.{name}.weight"] = (_F8, (4096, 4096))
      expected[f"mtp.0.{name}.scale"] = (_E8M0, (32, 32))
    for name in ("enorm", "hnorm"):
      expected[f"mtp.0.{name}.weight"] = (_BF16, (4096,))
    found = lib.further_block(_FLASH)
    self.assertEqual(found, expected)
    self.assertEqual(len(found), 1_575)
    self.assertEqual(len({**found, **lib.decoder(_FLASH)}), 69_187)

  def test_parameters_are_those_of_the_published_count(self):
    count = sum(
        math.prod(shape)
        for path, (shape, _) in parameters.leaves(_FLASH).items()
        # Buffers of transformers: not counted as parameters there.
        if not path.endswith((".moe.bias", ".moe.table"))
    )
    self.assertEqual(count, 284_332_230_231)

  def test_codes_and_leaves_hold_the_same_number_of_weights(self):
    stored = sum(
        math.prod(shape) * (2 if dtype == _I8 else 1)
        for dtype, shape in lib.decoder(_FLASH).values()
        if dtype != _E8M0
    )
    held = sum(
        math.prod(shape) for shape, _ in parameters.leaves(_FLASH).values()
    )
    self.assertEqual(stored, held)

  def test_experts_of_eight_bits(self):
    small = dataclasses.replace(_FLASH, attentions=("swa",), hash_layers=())
    found = lib.decoder(small, experts="fp8")
    self.assertEqual(
        found["layers.0.ffn.experts.3.w2.weight"], (_F8, (4096, 2048))
    )
    self.assertEqual(
        found["layers.0.ffn.experts.3.w2.scale"], (_E8M0, (32, 16))
    )
    with self.assertRaisesRegex(ValueError, "experts='int8'"):
      lib.decoder(small, experts="int8")


class NamesTest(absltest.TestCase):

  def test_refuses_an_unknown_dialect(self):
    with self.assertRaisesRegex(ValueError, "'gguf' is not one of"):
      names.table(_FLASH, "gguf")


if __name__ == "__main__":
  absltest.main()
