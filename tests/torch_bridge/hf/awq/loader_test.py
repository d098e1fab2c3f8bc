"""Loading AWQ folders: words as they lie, weights as a second reading has them.

Needs float64.
"""

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.contracts import refusal
from moejax.numerics.packed import awq_twin
from tests import bits
from tests.torch_bridge.hf.awq import independent
from tests.torch_bridge.hf.awq import packed_models
from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf import skip_list
from torch_bridge.hf.awq import packer

_LEAVES = ("qweight", "qzeros", "scales")


class LoadTest(packed_models.PackedModelTestCase):

  def _triple(self, module):
    checkpoint = checkpoint_lib.Checkpoint(self.folder)
    return [checkpoint.array(f"{module}.{leaf}") for leaf in _LEAVES]

  def test_experts_are_the_words_of_the_file_side_by_side(self):
    self.pack()
    found = self.load()
    for layer in (0, 1):
      for expert in range(4):
        at = f"model.layers.{layer}.mlp.experts.{expert}"
        gate, up, down = (
            self._triple(f"{at}.{p}")
            for p in ("gate_proj", "up_proj", "down_proj")
        )
        ours = f"layers.{layer}.moe"
        for i, leaf in enumerate(_LEAVES):
          bits.assert_same_bits(
              found.params[f"{ours}.gate_up.{leaf}"][expert],
              np.concatenate([gate[i], up[i]], axis=1),
          )
          bits.assert_same_bits(
              found.params[f"{ours}.down.{leaf}"][expert], down[i]
          )
    self.assertLen(found.packed, 2 * 4 * 3)
    self.assertEmpty(found.widened)
    self.assertNotIn("layers.0.moe.gate_up", found.params)

  @parameterized.product(
      group_size=(-1, 8, 16), scales=("bfloat16", "float16")
  )
  def test_weights_made_wide_equal_an_independent_decoder(
      self, group_size, scales
  ):
    self.pack(packer.Request(group_size=group_size, scales=scales))
    params = self.load().params
    for name, projections in (
        ("gate_up", ("gate_proj", "up_proj")), ("down", ("down_proj",))
    ):
      at = f"layers.1.moe.{name}"
      wide = awq_twin.dequantize(
          *(jnp.asarray(params[f"{at}.{x}"]) for x in _LEAVES), "bfloat16"
      )
      for expert in range(4):
        parts = []
        for projection in projections:
          qweight, qzeros, scale = self._triple(
              f"model.layers.1.mlp.experts.{expert}.{projection}"
          )
          self.assertEqual(scale.dtype.name, scales)
          scale = scale.astype(ml_dtypes.bfloat16)  # The scale's own rounding.
          parts.append(
              independent.weight(qweight, qzeros, scale, "bfloat16").T
          )
        bits.assert_same_bits(wide[expert], np.concatenate(parts))

  def test_case_c12_minus_one_is_one_group_of_all_inputs(self):
    self.pack(packer.Request(group_size=-1))
    params = self.load().params
    self.assertEqual(
        params["layers.0.moe.gate_up.scales"].shape, (4, 1, 2 * 16)
    )
    self.assertEqual(params["layers.0.moe.down.scales"].shape, (4, 1, 32))

  def test_packed_attention_is_made_wide_when_it_is_read(self):
    self.pack(packer.Request(16, ("mlp.gate",)))
    found = self.load()
    self.assertLen(found.widened, 2 * 4)
    module = "model.layers.1.self_attn.k_proj"
    self.assertIn(module, found.widened)
    bits.assert_same_bits(
        found.params["layers.1.attention.k_proj"],
        independent.weight(*self._triple(module), "bfloat16").T,
    )

  def test_a_layer_may_be_skipped(self):
    self.pack(
        packer.Request(16, (*packer.SKIPPED, "model.layers.1"))
    )
    params = self.load(original=self.original()).params
    self.assertIn("layers.0.moe.gate_up.qweight", params)
    self.assertEqual(params["layers.1.moe.gate_up"].shape, (4, 32, 32))

  def test_an_empty_list_leaves_it_to_the_tensors(self):
    self.pack()
    expected = self.load().params
    self.rewrite_packing(modules_to_not_convert=None)
    found = self.load().params
    self.assertEqual(list(found), list(expected))

  def test_a_right_packing_fits_its_original(self):
    self.pack(packer.Request(16, ("mlp.gate",)))
    self.load(original=self.original())

  def test_the_sizes_may_differ_from_the_file_of_one_shard(self):
    self.pack(packer.Request(16, shard_bytes=5000))
    self.assertLen(self.load().packed, 2 * 4 * 3)


class C13Test(packed_models.PackedModelTestCase):
  """Case C13: entries stand for whole segments, and tensors decide."""

  def test_c13_the_router_entry_does_not_skip_a_gate_projection(self):
    self.pack()
    names = checkpoint_lib.Checkpoint(self.folder).names()
    for layer in (0, 1):
      at = f"model.layers.{layer}.mlp"
      self.assertIn(f"{at}.gate.weight", names)
      for expert in range(4):
        self.assertIn(f"{at}.experts.{expert}.gate_proj.qweight", names)
        self.assertNotIn(f"{at}.experts.{expert}.gate_proj.weight", names)
    self.assertIn("mlp.gate", self.load().awq.modules_to_not_convert)

  def test_c13_an_entry_of_layer_1_does_not_skip_layer_10(self):
    request = packer.Request(16, (*packer.SKIPPED, "model.layers.1"))
    self.pack(request, num_hidden_layers=11)
    params = self.load().params
    packed = {
        layer
        for layer in range(11)
        if f"layers.{layer}.moe.gate_up.qweight" in params
    }
    self.assertEqual(packed, set(range(11)) - {1})

  def test_c13_a_packed_module_in_the_list_is_a_reported_conflict(self):
    self.pack()
    self.rewrite_packing(
        modules_to_not_convert=[*packer.SKIPPED, "experts.1.gate_proj"]
    )
    self.assert_refused(
        r"contradicts the tensors \(2\)",
        rf"{packed_models.GATE} has qweight, want weight: the entry"
        r" 'experts\.1\.gate_proj' skips it",
    )

  def test_c13_a_plain_module_outside_the_list_is_a_reported_conflict(self):
    self.pack()
    self.rewrite_packing(modules_to_not_convert=["self_attn"])
    self.assert_refused(
        r"model\.layers\.0\.mlp\.gate has weight, want qweight: no entry"
    )
    found = skip_list.conflicts(
        checkpoint_lib.Checkpoint(self.folder).names(), ["self_attn"]
    )
    self.assertEqual(
        [c.module for c in found],
        ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    )

  def test_c13_an_entry_that_is_no_name(self):
    self.pack()
    self.rewrite_packing(modules_to_not_convert=["re:.*mlp.gate$"])
    self.assert_refused("not made of dotted segments")


class RefusalTest(packed_models.PackedModelTestCase):

  def setUp(self):
    super().setUp()
    self.pack()

  @parameterized.parameters(
      ("quant_method", "gptq", "awq"), ("bits", 8, "4"), ("version", "gemv", "")
  )
  def test_another_packing(self, field, value, want):
    self.rewrite_packing(**{field: value})
    self.assert_refused(
        f"quantization_config.{field} is {value!r}, want '?{want}",
        error=refusal.UnsupportedError,
    )

  def test_gptq_by_its_order_of_inputs(self):
    def change(tensors):
      tensors[f"{packed_models.GATE}.g_idx"] = np.arange(32, dtype=np.int32)

    self.rewrite(change)
    self.assert_refused(
        rf"{packed_models.GATE}\.g_idx hold GPTQ's order of inputs",
        "want qweight, qzeros and scales alone",
    )

  def test_gptq_by_the_axis_that_is_packed(self):
    def change(tensors):
      name = f"{packed_models.GATE}.qweight"
      tensors[name] = tensors[name].reshape(4, 16)  # [k / 8, n].

    self.rewrite(change)
    self.assert_refused(
        rf"{packed_models.GATE}\.qweight has shape \(4, 16\), want \(32, 2\)",
        "packed along its inputs, as GPTQ packs",
    )

  def test_the_layout_of_version_gemv(self):
    def change(tensors):
      name = f"{packed_models.GATE}.qweight"
      tensors[name] = tensors[name].reshape(16, 4)  # [n, k / 8].

    self.rewrite(change)
    self.assert_refused(
        r"has shape \(16, 4\), want \(32, 2\): it is output-major"
    )

  def test_case_c12_a_group_size_that_does_not_divide(self):
    self.rewrite_packing(group_size=24)
    self.assert_refused(
        rf"{packed_models.GATE}\.qweight has k=32 inputs, want a multiple of"
        " group_size=24"
    )

  @parameterized.parameters(
      ("qzeros", r"\(2, 2\), want \(4, 2\) of k=32, n=16, group_size=8"),
      ("scales", r"\(2, 16\), want \(4, 16\) of k=32, n=16, group_size=8"),
  )
  def test_case_c12_another_number_of_groups(self, leaf, message):
    self.rewrite_packing(group_size=8)
    self.assert_refused(rf"experts\.0\.gate_proj\.{leaf} has shape {message}")

  @parameterized.parameters("qzeros", "scales")
  def test_one_tensor_of_a_wrong_shape(self, leaf):
    def change(tensors):
      name = f"{packed_models.GATE}.{leaf}"
      tensors[name] = tensors[name][:, :-1]

    self.rewrite(change)
    self.assert_refused(
        r"packed tensors that do not fit \(1\)",
        rf"{packed_models.GATE}\.{leaf} has shape",
    )

  @parameterized.parameters(
      ("qweight", np.int64, "int64, want int32"),
      ("scales", np.float32, "float32, want float16 or bfloat16"),
  )
  def test_a_wrong_dtype(self, leaf, dtype, message):
    def change(tensors):
      name = f"{packed_models.GATE}.{leaf}"
      tensors[name] = tensors[name].astype(dtype)

    self.rewrite(change)
    self.assert_refused(rf"{packed_models.GATE}\.{leaf} has dtype {message}")

  def test_scales_of_two_dtypes(self):
    def change(tensors):
      name = f"{packed_models.GATE}.scales"
      tensors[name] = tensors[name].astype(np.float16)

    self.rewrite(change)
    self.assert_refused(r"scales have dtypes \['bfloat16', 'float16'\]")

  def test_a_scale_that_is_no_number(self):
    def change(tensors):
      tensors[f"{packed_models.GATE}.scales"][1, 3] = np.inf

    self.rewrite(change)
    self.assert_refused(
        rf"{packed_models.GATE}\.scales holds 1 .* first at \(1, 3\): inf"
    )

  @parameterized.parameters("qzeros", "scales")
  def test_a_missing_tensor(self, leaf):
    self.rewrite(lambda t: t.pop(f"{packed_models.GATE}.{leaf}"))
    self.assert_refused(
        rf"missing tensors \(1\): {packed_models.GATE}\.{leaf}"
    )

  def test_a_tensor_too_many(self):
    def change(tensors):
      tensors["model.layers.0.mlp.extra"] = tensors["model.norm.weight"]

    self.rewrite(change)
    self.assert_refused(r"left-over tensors \(1\): model.layers.0.mlp.extra")

  def test_nibbles_in_another_order(self):
    """Case C10: the numbers tell where names and shapes do not."""

    def change(tensors):
      for leaf in ("qweight", "qzeros"):
        name = f"{packed_models.GATE}.{leaf}"
        codes = independent.codes(tensors[name])
        eights = codes.reshape(len(codes), -1, 8)
        words = (eights << (4 * np.arange(8))).sum(axis=-1)
        tensors[name] = words.astype(np.uint32).view(np.int32)

    self.rewrite(change)
    self.load()  # Nothing shows without the original.
    self.assert_refused(
        rf"{packed_models.GATE}\.qweight: \d+ of 512 weights lie further",
        r"nibbles hold columns \(0, 1, 2, 3, 4, 5, 6, 7\), want"
        r" \(0, 2, 4, 6, 1, 3, 5, 7\)",
        "Weights beyond under each reading: awq .*, natural_order 0 ",
        original=self.original(),
    )

  def test_an_original_of_another_model(self):
    self.rewrite(
        lambda t: t.pop(f"{packed_models.GATE}.weight"), self.plain
    )
    self.assert_refused(
        rf"has no {packed_models.GATE}\.weight", original=self.original()
    )

  def _wide(self, tensors, module):
    for leaf in _LEAVES:
      del tensors[f"{module}.{leaf}"]
    plain = checkpoint_lib.Checkpoint(self.plain)
    tensors[f"{module}.weight"] = plain.array(f"{module}.weight")

  def test_experts_packed_in_part(self):
    self.rewrite(lambda t: self._wide(t, packed_models.GATE))
    self.rewrite_packing(modules_to_not_convert=None)
    self.assert_refused(
        r"layers\.0\.moe\.gate_up: 7 of 8 projections are packed, want all",
        error=refusal.UnsupportedError,
    )

  def test_one_of_two_projections_packed(self):
    def change(tensors):
      for expert in range(4):
        at = f"model.layers.0.mlp.experts.{expert}"
        self._wide(tensors, f"{at}.down_proj")

    self.rewrite(change)
    self.rewrite_packing(modules_to_not_convert=None)
    self.assert_refused(
        r"layers\.0\.moe: one of gate_up and down is packed",
        error=refusal.UnsupportedError,
    )

  def test_no_packed_experts_at_all(self):
    plain = dict(checkpoint_lib.Checkpoint(self.plain).items())

    def change(tensors):
      tensors.clear()
      tensors.update(plain)

    self.rewrite(change)
    self.rewrite_packing(modules_to_not_convert=None)
    self.assert_refused("no layer has packed experts")

  @parameterized.parameters("model.layers.0.mlp.gate", "lm_head")
  def test_what_is_never_packed(self, module):
    def change(tensors):
      del tensors[f"{module}.weight"]
      for leaf in _LEAVES:
        tensors[f"{module}.{leaf}"] = tensors[f"{packed_models.GATE}.{leaf}"]

    self.rewrite(change)
    self.rewrite_packing(modules_to_not_convert=None)
    self.assert_refused(
        rf"{module}\.qweight is packed, want {module}\.weight",
        error=refusal.UnsupportedError,
    )


if __name__ == "__main__":
  absltest.main()
