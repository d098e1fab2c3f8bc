"""A released checkpoint's format, from files to parameters.

The checkpoint is of random bits. The decoder here takes codes apart with
`ldexp` and finds each weight's scale by dividing its indices; it shares no code
with the library.
"""

import json
import re
import tracemalloc

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import numpy as np

from experiments.tiny import synthetic_deepseek_v4
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import parameters
from tests import bits
from tests.torch_bridge.hf.deepseek_v4 import tiny_models
from torch_bridge.hf.deepseek_v4 import inventory
from torch_bridge.hf.deepseek_v4 import names
from torch_bridge.hf.deepseek_v4 import parameter_map


def _config(dtype="bfloat16", **changes):
  # 192 is one and a half blocks.
  return config_lib.DeepseekV4Config(**{
      "vocab_size": 48,
      "embed": 256,
      "attentions": ("swa", "csa", "hca"),
      "hash_layers": (0, 1),
      "num_heads": 4,
      "head_dim": 128,
      "rotary_dim": 16,
      "query_rank": 192,
      "window": 8,
      "csa_rate": 4,
      "hca_rate": 8,
      "output_groups": 2,
      "output_rank": 128,
      "index_heads": 2,
      "index_dim": 64,
      "index_top_k": 4,
      "num_experts": 5,
      "top_k": 3,
      "expert_hidden": 128,
      "gate_scale": 1.5,
      "swiglu_limit": 10.0,
      "dtype": dtype,
      **changes,
  })


def _to_dtype(exact, dtype):
  """Rounds float64 values to nearest even; finite in float32 exactly."""
  single = exact.astype(np.float32)
  if dtype == "float32":
    return single
  word = single.view(np.uint32)
  word = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
  return word.astype(np.uint16).view(ml_dtypes.bfloat16)


def _fp8(codes, scales, dtype):
  code = codes.view(np.uint8).astype(np.int64)
  sign, power, fraction = code >> 7, (code >> 3) & 15, code & 7
  exact = np.where(
      power == 0,
      np.ldexp(fraction.astype(np.float64), -9),
      np.ldexp((8 + fraction).astype(np.float64), power - 10),
  )
  row, column = np.indices(code.shape)
  shift = scales.view(np.uint8)[row // 128, column // 128].astype(int) - 127
  return _to_dtype(np.ldexp(np.where(sign, -exact, exact), shift), dtype)


def _fp4(packed, scales, dtype):
  byte = packed.view(np.uint8)
  row, column = np.indices((byte.shape[0], 2 * byte.shape[1]))
  code = (byte[row, column // 2] >> (4 * (column % 2)).astype(np.uint8)) & 15
  magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[code & 7]
  shift = scales.view(np.uint8)[row, column // 32].astype(int) - 127
  signed = np.where(code & 8, -magnitude, magnitude)
  return _to_dtype(np.ldexp(signed, shift), dtype)


class RoundTripTest(tiny_models.FolderTestCase):

  @parameterized.product(
      dtype=("bfloat16", "float32"), experts=(names.FP4, names.FP8)
  )
  def test_loaded_weights_are_those_of_an_independent_decoder(
      self, dtype, experts
  ):
    config = _config(dtype)
    synthetic_deepseek_v4.write(
        self.folder, config, experts=experts, shard_bytes=200_000
    )
    self.assertGreater(len(list(self.folder.glob("model-*"))), 3)
    read, params = parameter_map.load(self.folder)
    self.assertEqual(read, config)
    files = self.tensors()
    leaves = parameters.leaves(config)
    self.assertEqual(list(params), list(leaves))
    unpacked = 0
    for row in names.table(config, names.UPSTREAM):
      loaded = params[row.path]
      self.assertEqual((loaded.shape, loaded.dtype.name), leaves[row.path])
      pieces = loaded.reshape(len(row.names), *row.source_shape)
      for name, piece in zip(row.names, pieces, strict=True):
        array = files[name]
        scales = files.get(name.removesuffix(".weight") + ".scale")
        if array.dtype == np.int8:
          array = _fp4(array, scales, dtype)
        elif scales is not None:
          array = _fp8(array, scales, dtype)
        else:
          array = array.astype(piece.dtype)
        unpacked += scales is not None
        bits.assert_same_bits(piece, array)
    self.assertEqual(unpacked, 3 * (5 + 3 + 3 * 5) + 1)

  def test_scales_may_be_plain_bytes(self):
    synthetic_deepseek_v4.write(self.folder, _config())
    expected = parameter_map.load(self.folder)[1]
    tensors = {
        name: array.view(np.uint8) if name.endswith(".scale") else array
        for name, array in self.tensors().items()
    }
    self.write(tensors)
    for path, array in parameter_map.load(self.folder)[1].items():
      bits.assert_same_bits(array, expected[path])

  def test_memory_beside_the_result_is_less_than_one_layer(self):
    config = _config(attentions=("swa",) * 6, num_experts=24)
    synthetic_deepseek_v4.write(self.folder, config)
    parameter_map.load(self.folder)  # The tables of products stay.
    tracemalloc.start()
    params = parameter_map.load(self.folder)[1]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    result = sum(array.nbytes for array in params.values())
    layer = sum(
        a.nbytes for p, a in params.items() if p.startswith("layers.3.")
    )
    self.assertGreater(result, 6 * layer)
    self.assertLess(peak - result, layer)


class RefusalTest(tiny_models.FolderTestCase):

  def setUp(self):
    super().setUp()
    synthetic_deepseek_v4.write(self.folder, _config())
    self.saved = self.tensors()

  def _replace(self, name, array):
    self.write({**self.saved, name: array})

  @parameterized.parameters(
      ("layers.0.attn.wq_a.scale", (6, 8), r"\(6, 8\), not \(2, 2\)"),
      ("layers.0.attn.wq_a.scale", (1, 2), r"\(1, 2\), not \(2, 2\)"),
      ("layers.1.ffn.experts.2.w1.scale", (128, 16),
       r"\(128, 16\), not \(128, 8\)"),
      ("layers.1.ffn.experts.2.w2.scale", (2, 1), r"\(2, 1\), not \(256, 4\)"),
  )
  def test_refuses_scales_of_another_block(self, name, shape, pattern):
    scales = np.full(shape, 127, np.uint8).view(ml_dtypes.float8_e8m0fnu)
    self._replace(name, scales)
    self.assert_refused(
        rf"scales of another block \(1\): {re.escape(name)} is {pattern}"
    )

  @parameterized.parameters(
      ("layers.0.attn.wo_b", (1, 0)), ("layers.2.ffn.experts.4.w3", (77, 5))
  )
  def test_refuses_a_nan_scale_with_its_place(self, module, place):
    scales = self.saved[f"{module}.scale"].view(np.uint8).copy()
    scales[place] = 255
    self._replace(f"{module}.scale", scales.view(ml_dtypes.float8_e8m0fnu))
    self.assert_refused(
        rf"{re.escape(module)}.weight: 1 scales are NaN \(code 255\); first at"
        rf" {re.escape(str(place))}"
    )

  def test_refuses_a_code_that_is_nan(self):
    name = "layers.1.attn.indexer.wq_b.weight"
    codes = self.saved[name].view(np.uint8).copy()
    codes[3, 4] = 0xFF
    self._replace(name, codes.view(ml_dtypes.float8_e4m3fn))
    self.assert_refused(
        rf"{re.escape(name)} holds 1 weights that are not finite; first at"
        r" \(3, 4\): nan"
    )

  def test_refuses_a_product_beyond_the_dtype(self):
    module = "layers.0.ffn.experts.0.w1"
    packed = self.saved[f"{module}.weight"].copy()
    scales = self.saved[f"{module}.scale"].view(np.uint8).copy()
    packed[9, 16:32], packed[9, 20], scales[9, 1] = 0x11, 0x71, 254
    self._replace(f"{module}.weight", packed)
    self.saved[f"{module}.weight"] = packed
    self._replace(f"{module}.scale", scales.view(ml_dtypes.float8_e8m0fnu))
    self.assert_refused(r"1 weights that are not finite; first at \(9, 41\)")

  def test_refuses_a_packed_tensor_without_scales(self):
    del self.saved["layers.2.ffn.experts.1.w2.scale"]
    self.write(self.saved)
    self.assert_refused(
        r"missing tensors \(1\): layers.2.ffn.experts.1.w2.scale"
    )

  def test_refuses_scales_without_a_packed_tensor(self):
    self._replace(
        "layers.2.ffn.experts.1.w2.weight",
        np.zeros((256, 128), ml_dtypes.bfloat16),
    )
    self.assert_refused(
        r"left-over tensors \(1\): layers.2.ffn.experts.1.w2.scale"
    )

  def test_refuses_scales_of_another_dtype(self):
    self._replace("layers.0.attn.wkv.scale", np.ones((1, 2), np.float32))
    self.assert_refused(
        r"not read for a bfloat16 model \(1\): layers.0.attn.wkv.scale is"
        " float32"
    )

  def test_refuses_four_bits_where_the_release_has_eight(self):
    self.saved.pop("layers.0.attn.wkv.scale")
    self._replace("layers.0.attn.wkv.weight", np.zeros((128, 128), np.int8))
    self.assert_refused("layers.0.attn.wkv.weight is int8")

  def test_refuses_codes_of_another_width(self):
    name = "layers.0.ffn.experts.0.w1.weight"
    self._replace(name, np.zeros((128, 256), np.int8))
    self.assert_refused(
        rf"wrong shapes \(1\): {re.escape(name)} is \(128, 256\), not"
        r" \(128, 128\)"
    )

  def test_refuses_packed_weights_under_the_names_of_transformers(self):
    hybrid = names.table(_config(), names.HYBRID)
    upstream = names.table(_config(), names.UPSTREAM)
    for theirs, row in zip(hybrid, upstream, strict=True):
      for new, old in zip(theirs.names, row.names, strict=True):
        self.saved[new] = self.saved.pop(old)
    self.write(self.saved)
    self.assert_refused(r"left-over tensors \(\d+\): .*wq_a.scale")

  def test_refuses_a_config_that_speaks_of_other_blocks(self):
    path = self.folder / "config.json"
    fields = json.loads(path.read_text())
    fields["quantization_config"]["weight_block_size"] = [32, 32]
    path.write_text(json.dumps(fields))
    self.assert_refused(r"config.json: .*weight_block_size=\[32, 32\]")


class MakerTest(tiny_models.FolderTestCase):

  def test_the_folder_holds_the_inventory(self):
    config = _config()
    size = synthetic_deepseek_v4.write(self.folder, config)
    expected = {
        **inventory.decoder(config), **inventory.further_block(config)
    }
    found = {n: (a.dtype.name, a.shape) for n, a in self.tensors().items()}
    self.assertEqual(found, expected)
    self.assertEqual(
        size, sum(p.stat().st_size for p in self.folder.glob("*.safetensors"))
    )


if __name__ == "__main__":
  absltest.main()
