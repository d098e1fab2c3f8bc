"""Skip list: whole segments match, and the tensors are asked for the truth."""

from absl.testing import absltest
from absl.testing import parameterized

from torch_bridge.hf import skip_list


class IsSkippedTest(parameterized.TestCase):

  @parameterized.parameters(
      ("mlp.gate", "model.layers.0.mlp.gate", True),
      ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
      ("mlp.gate", "model.layers.0.mlp.gate_up_proj", False),
      ("mlp.gate", "model.layers.0.mlp.experts.0.gate_proj", False),
      ("mlp.gate", "model.layers.0.mlp.shared_expert_gate", False),
      ("mlp.gate", "model.layers.0.other_mlp.gate", False),
      ("model.layers.1", "model.layers.1.mlp.gate", True),
      ("model.layers.1", "model.layers.10.mlp.gate", False),
      ("mlp.gate.", "model.layers.0.mlp.gate", True),
      ("mlp.gate.", "model.layers.0.mlp.gate_proj", False),
      ("lm_head", "lm_head", True),
      ("gate.mlp", "model.layers.0.mlp.gate", False),
  )
  def test_an_entry_stands_for_whole_segments(self, entry, module, expected):
    self.assertEqual(skip_list.is_skipped(module, [entry]), expected)

  def test_any_entry_skips(self):
    entries = ["lm_head", "mlp.gate"]
    self.assertTrue(skip_list.is_skipped("model.layers.2.mlp.gate", entries))
    self.assertFalse(skip_list.is_skipped("model.layers.2.mlp.gate", []))

  @parameterized.parameters("", ".", "mlp..gate", "re:.*gate", "layers.*.mlp")
  def test_refuses_an_entry_that_is_no_dotted_name(self, entry):
    with self.assertRaisesRegex(ValueError, "not made of dotted segments"):
      skip_list.is_skipped("mlp.gate", ["mlp.gate", entry])


class ConflictsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    at = "model.layers.0"
    self.names = [
        f"{at}.mlp.experts.0.gate_proj.{leaf}"
        for leaf in ("qweight", "qzeros", "scales")
    ] + [
        f"{at}.mlp.gate.weight",
        f"{at}.self_attn.q_norm.weight",
        f"{at}.input_layernorm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ]

  def test_a_list_that_fits_the_tensors_has_no_conflict(self):
    self.assertEmpty(skip_list.conflicts(self.names, ["mlp.gate", "lm_head"]))

  def test_reports_a_packed_module_that_is_skipped(self):
    self.assertEqual(
        skip_list.conflicts(self.names, ["mlp.gate", "experts.0"]),
        (
            skip_list.Conflict(
                "model.layers.0.mlp.experts.0.gate_proj",
                skip_list.PACKED,
                "experts.0",
            ),
        ),
    )

  def test_reports_an_unpacked_router_that_is_not_skipped(self):
    self.assertEqual(
        skip_list.conflicts(self.names, ["lm_head"]),
        (
            skip_list.Conflict(
                "model.layers.0.mlp.gate", skip_list.UNPACKED, None
            ),
        ),
    )

  def test_reports_an_unpacked_projection_that_is_not_skipped(self):
    names = [*self.names, "model.layers.0.self_attn.q_proj.weight"]
    found = skip_list.conflicts(names, ["mlp.gate"])
    self.assertEqual(
        [(c.module, c.kind) for c in found],
        [("model.layers.0.self_attn.q_proj", skip_list.UNPACKED)],
    )

  def test_a_router_entry_does_not_excuse_a_packed_gate_projection(self):
    names = ["model.layers.0.mlp.gate_proj.qweight"]
    self.assertEmpty(skip_list.conflicts(names, ["mlp.gate"]))

  def test_refuses_an_entry_that_is_no_dotted_name(self):
    with self.assertRaisesRegex(ValueError, "'re:gate'"):
      skip_list.conflicts([], ["re:gate"])


if __name__ == "__main__":
  absltest.main()
