"""Parameter map: what is missing, left over or wrong is refused by name."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import numpy as np

from moejax.contracts import refusal
from tests.torch_bridge.hf import saved_models
from tests.torch_bridge.hf import tiny_models
from torch_bridge.hf import parameter_map


class RefusalTest(saved_models.SavedModelTestCase):

  def setUp(self):
    super().setUp()
    self.config = self.save(tiny_models.model())

  def test_refuses_missing_tensors_by_name(self):
    def change(tensors):
      del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
      del tensors["model.norm.weight"]

    self.rewrite(change)
    self.assert_refused(
        self.config,
        r"missing tensors \(2\): model\.layers\.2\.mlp\.experts\.3\.up_proj"
        r"\.weight, model\.norm\.weight\.$",
    )

  def test_refuses_left_over_tensors_by_name(self):
    def change(tensors):
      tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(2, np.float32)

    self.rewrite(change)
    self.assert_refused(
        self.config,
        r"left-over tensors \(1\): model\.layers\.0\.self_attn\.q_proj\.bias",
    )

  def test_refuses_a_renamed_tensor_from_both_sides(self):
    def change(tensors):
      tensors["model.final_norm"] = tensors.pop("model.norm.weight")

    self.rewrite(change)
    self.assert_refused(
        self.config,
        r"missing .*: model\.norm\.weight; left-over .*: model\.final_norm",
    )

  def test_refuses_a_layer_more_than_the_file_has(self):
    config = dataclasses.replace(
        self.config, num_layers=4, sparse_layers=(0, 2, 3)
    )
    self.assert_refused(
        config,
        r"missing tensors \(21\): .*layers\.3\.mlp\.experts\.0\.gate_proj",
    )

  def test_refuses_both_single_and_stacked_experts(self):
    def change(tensors):
      name = "model.layers.0.mlp.experts.down_proj"
      tensors[name] = np.zeros((4, 16, 12), ml_dtypes.bfloat16)

    self.rewrite(change)
    self.assert_refused(
        self.config,
        r"missing .*: model\.layers\.0\.mlp\.experts\.gate_up_proj",
        r"left-over .*: model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight",
    )

  def test_refuses_a_wrong_shape_with_both_shapes(self):
    def change(tensors):
      name = "model.layers.1.mlp.up_proj.weight"
      tensors[name] = tensors[name].T

    self.rewrite(change)
    self.assert_refused(
        self.config,
        r"model\.layers\.1\.mlp\.up_proj\.weight is \(16, 20\), not \(20, 16\)",
    )

  def test_refuses_another_number_of_experts_in_the_router(self):
    config = dataclasses.replace(self.config, expert_hidden=13)
    self.assert_refused(
        config,
        r"experts\.0\.gate_proj\.weight is \(12, 16\), not \(13, 16\)",
    )

  def test_refuses_another_dtype_and_names_the_first_few(self):
    def change(tensors):
      for name in sorted(tensors)[:7]:
        tensors[name] = tensors[name].astype(np.float32)

    self.rewrite(change)
    self.assert_refused(
        self.config,
        r"not bfloat16 \(7\): \S+ is float32, .* and 2 more",
    )

  def test_refuses_a_config_of_another_dtype(self):
    config = dataclasses.replace(self.config, dtype="float16")
    self.assert_refused(config, r"not float16 .*: .* is bfloat16")

  @parameterized.parameters(
      (np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")
  )
  def test_refuses_weights_that_are_not_finite(self, value, text):
    name = "model.layers.2.mlp.experts.1.down_proj.weight"

    def change(tensors):
      tensors[name][3, 5] = value
      tensors[name][7, 0] = value

    self.rewrite(change)
    self.assert_refused(
        self.config,
        rf"{name} holds 2 weights that are not finite; first at \(3, 5\):"
        rf" {text}\.$",
    )

  def test_refuses_stacked_experts_of_two_layouts(self):
    self.save(tiny_models.model(), save_original_format=False)

    def change(tensors):
      for name in tensors:
        if "layers.2.mlp.experts" in name:
          tensors[name] = np.swapaxes(tensors[name], 1, 2)

    self.rewrite(change)
    self.assert_refused(self.config, "layers.0 is v5, layers.2 is legacy")

  def test_a_list_of_many_names_is_cut(self):
    config = dataclasses.replace(
        self.config, num_layers=40, sparse_layers=tuple(range(40))
    )
    # Layers 3 to 38 lack 21 tensors each, 1 and 39 their twelve experts and
    # a router; 200 are shown.
    with self.assertRaisesRegex(refusal.HarnessError, r" \d+ more") as caught:
      self.load(config)
    missing = str(caught.exception).split("left-over")[0]
    self.assertEqual(missing.count("model.layers."), 200)


class TiedTest(saved_models.SavedModelTestCase):

  def setUp(self):
    super().setUp()
    self.config = self.save(tiny_models.model(tie_word_embeddings=True))

  def add_head(self, row=None, column=None, value=None):
    def change(tensors):
      head = tensors[parameter_map.EMBEDDING].copy()
      if row is not None:
        head[row, column] = value
      tensors[parameter_map.LM_HEAD] = head

    self.rewrite(change)

  def test_accepts_an_output_projection_equal_to_the_embedding(self):
    without = self.load(self.config)
    self.add_head()
    params = self.load(self.config)
    self.assertEqual(list(params), list(without))
    self.assertNotIn("lm_head", params)

  def test_refuses_an_output_projection_that_differs(self):
    self.add_head(4, 2, 7.5)
    self.assert_refused(
        self.config,
        r"ties the embeddings, but 1 of 512 weights of lm_head\.weight .*"
        r"differ; first at \(4, 2\): 7\.5 and",
    )

  def test_refuses_an_output_projection_that_differs_in_a_zero_sign(self):
    def change(tensors):
      tensors[parameter_map.EMBEDDING][0, 0] = 0.0

    self.rewrite(change)
    self.add_head(0, 0, -0.0)
    self.assert_refused(self.config, r"first at \(0, 0\): -0\.0 and 0\.0")

  def test_refuses_an_output_projection_of_another_shape(self):
    def change(tensors):
      tensors[parameter_map.LM_HEAD] = tensors[parameter_map.EMBEDDING][:3]

    self.rewrite(change)
    self.assert_refused(
        self.config, r"lm_head\.weight is \(3, 16\), not \(32, 16\)"
    )

  def test_refuses_an_untied_config_without_an_output_projection(self):
    config = dataclasses.replace(self.config, tied_embeddings=False)
    self.assert_refused(config, r"missing .*: lm_head\.weight\.$")


if __name__ == "__main__":
  absltest.main()
