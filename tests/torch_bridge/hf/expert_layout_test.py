"""Expert layout: decided by the pair, once for all layers; rows as declared."""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import safetensors.numpy

from moejax.contracts import refusal
from tests import bits
from torch_bridge.hf import expert_layout

_SQUARE = (
    pathlib.Path(__file__).parents[2] / "cases/files/expert_layout_square"
)
_GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
_DOWN = "model.layers.0.mlp.experts.down_proj"


def _load(name):
  """Returns (layout, gate_up, down) of one of the two square files."""
  tensors = safetensors.numpy.load_file(_SQUARE / f"{name}.safetensors")
  gate_up, down = tensors[_GATE_UP], tensors[_DOWN]
  layout = expert_layout.find_layout(
      {"layers.0": (gate_up.shape, down.shape)},
      num_experts=2,
      embed=4,
      expert_hidden=2,
  )
  return layout, gate_up, down


def _silu(x):
  return x / (1 + np.exp(-x))


def _run(x, gate_up, down):
  """y[expert, token] = down(silu(gate(x)) * up(x)), in float64."""
  gate, up = np.split(np.einsum("th,eih->eti", x, gate_up), 2, axis=-1)
  return np.einsum("eti,ehi->eth", _silu(gate) * up, down)


class LayoutTest(parameterized.TestCase):

  @parameterized.parameters("v5", "legacy")
  def test_a_square_file_gives_the_published_outputs(self, name):
    layout, gate_up, down = _load(f"layout_{name}")
    self.assertEqual(layout, name)
    self.assertEqual(gate_up.shape, (2, 4, 4))
    gate_up, down = expert_layout.to_v5(gate_up, down, layout, "halves")
    x = np.load(_SQUARE / "x.npy").astype(np.float64)
    y = _run(x, gate_up.astype(np.float64), down.astype(np.float64))
    np.testing.assert_allclose(
        y, np.load(_SQUARE / "y_per_expert_f64.npy"), rtol=1e-12
    )
    np.testing.assert_allclose(
        y[0, 0],
        [-0.048290419, -0.895531691, -0.447765845, 0.383378620],
        atol=5e-10,
    )

  def test_both_square_files_hold_the_same_weights(self):
    v5 = expert_layout.to_v5(*_load("layout_v5")[1:], "v5", "halves")
    legacy = expert_layout.to_v5(
        *_load("layout_legacy")[1:], "legacy", "halves"
    )
    for ours, theirs in zip(v5, legacy, strict=True):
      bits.assert_same_bits(ours, theirs)
      self.assertTrue(theirs.flags.c_contiguous)

  def test_legacy_gate_up_read_as_v5_is_far_off(self):
    _, gate_up, down = _load("layout_legacy")
    x = np.load(_SQUARE / "x.npy").astype(np.float64)
    y = _run(
        x,
        gate_up.astype(np.float64),
        np.swapaxes(down, 1, 2).astype(np.float64),
    )
    error = np.abs(y - np.load(_SQUARE / "y_per_expert_f64.npy")).max()
    self.assertAlmostEqual(error, 161.7, delta=0.05)

  @parameterized.product(
      sizes=((16, 8), (8, 8), (16, 12), (5, 7)),  # (embed, expert_hidden)
      layout=expert_layout.LAYOUTS,
  )
  def test_every_pair_of_sizes_settles_the_layout(self, sizes, layout):
    pairs = {
        f"layers.{i}": expert_layout.pair_shapes(layout, 3, *sizes)
        for i in range(2)
    }
    self.assertEqual(expert_layout.find_layout(pairs, 3, *sizes), layout)

  @parameterized.parameters((16, 8), (8, 8))
  def test_a_contradiction_in_an_ambiguous_pair_is_refused(self, embed, hidden):
    v5 = expert_layout.pair_shapes("v5", 2, embed, hidden)
    legacy = expert_layout.pair_shapes("legacy", 2, embed, hidden)
    with self.assertRaisesRegex(
        refusal.HarnessError, "layers.0 is v5, layers.7 is legacy"
    ):
      expert_layout.find_layout(
          {"layers.0": v5, "layers.7": legacy}, 2, embed, hidden
      )

  def test_a_contradiction_inside_a_pair_is_refused(self):
    gate_up, _ = expert_layout.pair_shapes("v5", 2, 16, 12)
    _, down = expert_layout.pair_shapes("legacy", 2, 16, 12)
    with self.assertRaisesRegex(
        refusal.HarnessError,
        r"layers.3: .* gate_up \(2, 24, 16\) and down \(2, 12, 16\) are not"
        r" \(2, 24, 16\) and \(2, 16, 12\) \(v5\), or \(2, 16, 24\) and"
        r" \(2, 12, 16\) \(legacy\)",
    ):
      expert_layout.find_layout({"layers.3": (gate_up, down)}, 2, 16, 12)

  def test_another_number_of_experts_is_refused(self):
    pair = expert_layout.pair_shapes("v5", 2, 16, 12)
    with self.assertRaisesRegex(refusal.HarnessError, r"not \(3, 24, 16\)"):
      expert_layout.find_layout({"layers.0": pair}, 3, 16, 12)

  def test_no_layer_decides_nothing(self):
    with self.assertRaisesRegex(ValueError, "no expert weights"):
      expert_layout.find_layout({}, 2, 16, 12)


class RowsTest(parameterized.TestCase):

  @parameterized.parameters(
      ("interleaved", [7.310586, 35.231883]),
      ("halves", [1.462117, 199.990920]),
  )
  def test_rows_are_read_as_declared(self, rows, expected):
    # x = 1 makes the fused activations 1, 10, 2, 20.
    fused = np.float64([1, 10, 2, 20]).reshape(1, 4, 1)
    gate_up, _ = expert_layout.to_v5(fused, np.zeros((1, 1, 2)), "v5", rows)
    gate, up = np.split(gate_up[0, :, 0], 2)
    np.testing.assert_allclose(_silu(gate) * up, expected, atol=5e-7)

  def test_interleaved_legacy_gives_gate_rows_then_up_rows(self):
    gate = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    up = -gate
    stored = np.stack([gate, up], axis=2).reshape(2, 6, 4)
    down = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    gate_up, out = expert_layout.to_v5(
        np.swapaxes(stored, 1, 2), np.swapaxes(down, 1, 2), "legacy",
        "interleaved",
    )
    bits.assert_same_bits(gate_up, np.concatenate([gate, up], axis=1))
    bits.assert_same_bits(out, down)

  @parameterized.parameters(("v6", "halves", "v6"), ("v5", "thirds", "thirds"))
  def test_refuses_a_layout_or_an_order_that_it_does_not_know(
      self, layout, rows, pattern
  ):
    with self.assertRaisesRegex(ValueError, pattern):
      expert_layout.to_v5(
          np.zeros((1, 4, 3)), np.zeros((1, 3, 2)), layout, rows
      )

  def test_refuses_tensors_that_do_not_fit_the_named_layout(self):
    with self.assertRaisesRegex(
        ValueError, r"gate_up \(2, 4, 4\) and down \(2, 2, 4\).*'v5'"
    ):
      expert_layout.to_v5(*_load("layout_legacy")[1:], "v5", "halves")


if __name__ == "__main__":
  absltest.main()
