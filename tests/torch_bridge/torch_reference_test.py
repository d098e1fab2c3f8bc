"""The transformers side: captures change nothing and the graph is verified."""

import functools
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import torch

from moejax.contracts import refusal
from moejax.protocols import compare
from moejax.protocols import taps as taps_lib
from moejax.protocols import trajectory
from tests import bits
from torch_bridge import legal_orders
from torch_bridge import operation_trace
from torch_bridge.graphs import expert_events
from torch_bridge.graphs import qwen3_moe_graph
from torch_bridge import torch_reference

_FOLDER = (
    pathlib.Path(__file__).parents[2]
    / "experiments"
    / "checkpoints"
    / "tiny_qwen3_moe"
)
_PROMPTS = [
    trajectory.Prompt("a", (5, 9, 300, 41, 7)),
    trajectory.Prompt("b", (77, 8)),
]


@functools.cache
def _reference(implementation="grouped_mm"):
  return torch_reference.TransformersReference(_FOLDER, implementation)


class CaptureTest(parameterized.TestCase):

  @parameterized.product(
      implementation=expert_events.IMPLEMENTATIONS,
      arithmetic=("native", "portable"),
  )
  def test_taps_on_and_off_give_the_same_logits(
      self, implementation, arithmetic
  ):
    run = functools.partial(
        _reference(implementation).run, _PROMPTS, 2, arithmetic=arithmetic
    )
    for on, off in zip(run(), run(wanted=trajectory.keep_none), strict=True):
      self.assertEqual(on.generated, off.generated)
      self.assertGreater(len(on.steps[0].taps), 200)
      self.assertEqual(list(off.steps[0].taps), ["logits"])
      for left, right in zip(on.steps, off.steps, strict=True):
        bits.assert_same_bits(left.taps["logits"], right.taps["logits"])
        self.assertEqual(left.state, right.state)

  @parameterized.parameters("native", "portable")
  def test_a_second_run_gives_the_same_bits(self, arithmetic):
    run = functools.partial(
        _reference().run, _PROMPTS, 1, arithmetic=arithmetic
    )
    found = compare.compare(run(), run())
    self.assertEqual(set(found.levels().values()), {"same_bits"})

  @parameterized.parameters(*expert_events.IMPLEMENTATIONS)
  def test_expert_rows_are_back_in_slot_order(self, implementation):
    """Each row must be the product of its own expert's weight."""
    reference = _reference(implementation)
    step = reference.run(_PROMPTS[:1], 0)[0].steps[0]
    at = "layers.1.moe"
    x = torch.from_numpy(
        step.taps["layers.1.mlp_norm.output"].astype(np.float32)
    )
    weight = reference.model.model.layers[1].mlp.experts.gate_up_proj
    for token, slot in ((0, 0), (2, 5), (4, 3)):
      expert = int(step.taps[f"{at}.router.ids"][token, slot])
      expected = weight[expert].float() @ x[token]
      found = step.taps[f"{at}.experts.gate_up"][token, slot]
      np.testing.assert_allclose(
          found.astype(np.float32),
          expected.detach().numpy(),
          rtol=2**-7,  # One bfloat16 rounding.
          atol=1e-3,
      )

  def test_every_tap_is_in_the_table_with_its_axes(self):
    step = _reference().run(_PROMPTS[:1], 0)[0].steps[0]
    sizes: dict[str, int] = {}
    for name, value in step.taps.items():
      axes = taps_lib.axes(name)
      self.assertLen(axes, value.ndim, name)
      for axis, size in zip(axes, value.shape):
        if axis not in ("hidden", "two_hidden"):
          self.assertEqual(sizes.setdefault(axis, size), size, (name, axis))

  def test_forced_routes_are_followed(self):
    free = _reference().run(_PROMPTS, 1)
    other = _reference().run(_PROMPTS, 1)
    for capture in other:
      for step in capture.steps:
        for name in step.taps:
          if name.endswith("router.ids"):
            step.taps[name] = step.taps[name][:, ::-1].copy()
    forced = _reference().run(_PROMPTS, 1, given=other)
    again = _reference().run(_PROMPTS, 1, given=free)
    name = "layers.0.moe.router.ids"
    for a, b, c in zip(free, forced, again, strict=True):
      bits.assert_same_bits(
          b.steps[0].taps[name], a.steps[0].taps[name][:, ::-1]
      )
      bits.assert_same_bits(
          c.steps[1].taps["logits"], a.steps[1].taps["logits"]
      )

  def test_the_reversed_order_is_another_order(self):
    native = _reference().run(_PROMPTS, 0)
    reversed_ = _reference().run(
        _PROMPTS, 0, arithmetic="reversed", given=native
    )
    found = compare.compare(reversed_, native)
    self.assertEqual(found.levels()["L4"], "beyond_rule")
    count = found.counts[(0, "attention.q_proj")]
    self.assertLess(count.max_ulp, 3)


class RefusalTest(parameterized.TestCase):

  def test_an_unknown_experts_implementation_is_refused(self):
    with self.assertRaisesRegex(refusal.UnsupportedError, "deepgemm"):
      torch_reference.TransformersReference(_FOLDER, "deepgemm")

  def test_a_folder_that_transformers_cannot_load_is_named(self):
    with tempfile.TemporaryDirectory() as folder:
      with self.assertRaisesRegex(refusal.HarnessError, folder):
        torch_reference.TransformersReference(folder, "eager")

  @parameterized.named_parameters(
      ("another_operation", lambda hidden: hidden * 1.5),
      ("one_addition_more", lambda hidden: hidden + 0.5),
  )
  def test_a_graph_with_one_operation_more_is_refused(self, change):
    reference = torch_reference.TransformersReference(_FOLDER, "grouped_mm")
    layer = reference.model.model.layers[0]
    plain = layer.forward

    def forward(*args, **kwargs):
      return change(plain(*args, **kwargs))

    with mock.patch.object(layer, "forward", forward):
      with self.assertRaisesRegex(
          refusal.UnsupportedError, "model.layers.0.*runs"
      ):
        reference.run(_PROMPTS, 0)

  def test_arithmetic_outside_every_known_module_is_refused(self):
    events = [operation_trace.Event("model.extra", "mul", np.zeros(3))]
    with self.assertRaisesRegex(refusal.UnsupportedError, "model.extra"):
      qwen3_moe_graph.taps_of(events, "eager")

  def test_a_missing_operation_is_refused(self):
    values = np.zeros((1, 2, 4), np.float32)
    events = [
        operation_trace.Event("model.norm", name, values)
        for name in ("pow", "mean", "add", "rsqrt", "mul")
    ]
    with self.assertRaisesRegex(refusal.UnsupportedError, "mul.*missing"):
      qwen3_moe_graph.taps_of(events, "eager")

  def test_forcing_fewer_routes_than_there_are_is_an_error(self):
    with self.assertRaises((RuntimeError, StopIteration)):
      with legal_orders.ForcedRoutes(iter([])):
        torch.topk(torch.rand(2, 4), 2)


if __name__ == "__main__":
  absltest.main()
