"""DeepSeek-V4 of transformers: every tap, its shape, and what is refused."""

import functools
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import torch
import transformers

from moejax.contracts import refusal
from moejax.protocols import compare
from moejax.protocols import deepseek_v4_taps
from moejax.protocols import taps as taps_lib
from moejax.protocols import trajectory
from tests import bits
from tests.torch_bridge import tiny_deepseek_v4
from torch_bridge.architectures import reference as reference_lib
from torch_bridge.graphs import expert_events
from torch_bridge import torch_reference

_FLOAT32 = (
    "q_a_norm", "kv_norm", "layernorm", "model.norm", "_hc.", "hc_head",
    "sinks", "position_bias", "e_score_correction_bias", "inv_freq",
)
_BFLOAT16_RUNS = transformers.__version__ != "5.17.0"


def _prompt(length: int) -> trajectory.Prompt:
  return trajectory.Prompt(
      str(length), tuple(int(7 * i * i + 3) % 256 for i in range(length))
  )


@functools.cache
def _folder(dtype: str) -> pathlib.Path:
  folder = pathlib.Path(tempfile.mkdtemp())
  return tiny_deepseek_v4.save(folder, getattr(torch, dtype))


@functools.cache
def _reference(implementation="eager", dtype="bfloat16"):
  return torch_reference.TransformersReference(_folder(dtype), implementation)


def _absent(dtype: str) -> set[str]:
  """Taps of the table that transformers' graph does not have."""
  taps = {"moe.experts.gated_activation"}
  # The input of these norms is float32 already.
  taps |= {f"{p}.norm.rounded" for p in ("attention_hc", "moe_hc", "head_hc")}
  if dtype == "float32":
    taps |= {
        tap
        for tap in deepseek_v4_taps.TAPS
        if tap.endswith((".cos", ".sin", ".rounded", ".collapsed"))
        or tap.endswith(".output") and "_b_norm" not in tap and "_hc" not in tap
        or tap.split(".")[0].endswith("_mix") and tap.endswith(("post", "comb"))
        or tap.endswith((".probabilities", "compressor.weights"))
    }
  return taps


@absltest.skipUnless(_BFLOAT16_RUNS, "this transformers runs float32 only")
class Bfloat16Test(parameterized.TestCase):

  def test_loading_keeps_float32_where_it_is_documented(self):
    model = _reference().model
    named = [*model.named_parameters(), *model.named_buffers()]
    self.assertGreater(len(named), 100)
    for name, value in named:
      if name.endswith("tid2eid"):
        expected = torch.int64
      elif any(part in name for part in _FLOAT32):
        expected = torch.float32
      else:
        expected = torch.bfloat16
      self.assertEqual(value.dtype, expected, name)

  def test_portable_experts_differ_first_in_their_sum(self):
    runs = [
        _reference(name).run([_prompt(9)], 1, arithmetic="portable")
        for name in ("eager", "grouped_mm", "batched_mm")
    ]
    found = compare.compare(runs[0], runs[1])
    self.assertEqual(found.first.operator, "moe.experts.combine")
    self.assertEqual(found.first.layer, 0)
    found = compare.compare(runs[1], runs[2])
    self.assertIsNone(found.first)
    self.assertEmpty(found.missing)


class GraphTest(parameterized.TestCase):

  @parameterized.product(
      implementation=expert_events.IMPLEMENTATIONS,
      dtype=("bfloat16", "float32"),
  )
  def test_every_tap_of_the_table_is_shown_with_its_shape(
      self, implementation, dtype
  ):
    if dtype == "bfloat16" and not _BFLOAT16_RUNS:
      self.skipTest("this transformers runs float32 only")
    reference = _reference(implementation, dtype)
    capture = reference.run([_prompt(21)], 4)[0]
    sizes = {
        "embed": 64, "stream": 4, "stream_out": 4, "stream_embed": 256,
        "mix": 24, "round": 39, "rotary_dim": 8, "half_dim": 4, "one": 1,
        "group": 2, "rank": 16, "expert": 16, "slot": 6, "vocab": 256,
        "head": 4, "two_hidden": 64,
    }
    seen = set()
    for index, step in enumerate(capture.steps):
      tokens = 21 if index == 0 else 1
      for name, value in step.taps.items():
        tap = taps_lib.split(name)[1]
        seen.add(tap)
        axes = taps_lib.axes(name)
        self.assertLen(axes, value.ndim, name)
        for axis, size in zip(axes, value.shape):
          if axis in ("hidden", "head_dim", "row", "series_row", "window"):
            continue
          expected = sizes.get(axis, tokens if axis == "token" else None)
          if axis == "mix" or (name, axis) == ("head_hc.mixes", "stream"):
            expected = size
          if axis == "entry":
            expected = (step.start + tokens) // 4
          if expected is not None:
            self.assertEqual(size, expected, (name, axis))
    self.assertEqual(seen, set(deepseek_v4_taps.TAPS) - _absent(dtype))

  def test_the_order_is_that_of_the_table(self):
    step = _reference(dtype="float32").run([_prompt(9)], 0)[0].steps[0]
    taps = list(step.taps)
    order = list(deepseek_v4_taps.TAPS)
    layered = [taps_lib.split(name) for name in taps]
    self.assertEqual(layered[0], (None, "rotary.main.inverse_frequencies"))
    inside = [(layer, order.index(tap)) for layer, tap in layered
              if layer is not None]
    self.assertEqual(inside, sorted(inside))
    self.assertEqual(layered[-1], (None, "logits"))

  @parameterized.parameters(3, 4, 7, 8, 9, 16, 45)
  def test_windows_are_shown_when_they_complete(self, length):
    capture = _reference(dtype="float32").run([_prompt(length)], 5)[0]
    for step in capture.steps:
      end = step.start + len(step.tokens)
      for layer, rate in ((1, 4), (2, 8), (3, 4)):
        name = f"layers.{layer}.attention.compressor.pooled"
        windows = end // rate - step.start // rate
        found = step.taps.get(name)
        self.assertEqual(0 if found is None else len(found), windows)
      # A tap without an element is no part of a capture.
      visible = step.taps.get("layers.1.attention.indexer.visible")
      self.assertEqual(visible is None, end < 4)
      if visible is None:
        continue
      self.assertEqual(visible.dtype, np.int32)
      positions = step.taps["positions"]
      np.testing.assert_array_equal(
          visible.sum(-1), np.minimum((positions + 1) // 4, 4)
      )

  def test_portable_runs_before_any_entry_exists(self):
    capture = _reference(dtype="float32").run(
        [_prompt(2)], 2, arithmetic="portable"
    )[0]
    name = "layers.1.attention.indexer.visible"
    self.assertEqual([name in s.taps for s in capture.steps], [0, 0, 1])
    self.assertEqual(capture.steps[2].taps[name].shape, (1, 1))

  def test_what_an_indexer_shows_is_what_attention_reads(self):
    step = _reference(dtype="float32").run([_prompt(45)], 0)[0].steps[0]
    weights = step.taps["layers.1.attention.softmax_with_sink"]
    read = (weights[..., 45:-1] > 0).any(0)
    visible = step.taps["layers.1.attention.indexer.visible"]
    np.testing.assert_array_equal(read, visible == 1)

  def test_mixing_sends_rows_to_columns(self):
    step = _reference(dtype="float32").run([_prompt(5)], 0)[0].steps[0]
    at = "layers.1"
    comb = step.taps[f"{at}.attention_hc.sinkhorn"][:, -1]
    streams = step.taps["layers.0.streams"]
    np.testing.assert_allclose(
        np.einsum("tij,tid->tjd", comb, streams),
        step.taps[f"{at}.attention_mix.mixed"],
        rtol=1e-5, atol=1e-5,
    )

  @parameterized.parameters(*expert_events.IMPLEMENTATIONS)
  def test_rows_of_hash_layers_belong_to_the_table(self, implementation):
    reference = _reference(implementation, "float32")
    prompt = _prompt(9)
    step = reference.run([prompt], 0)[0].steps[0]
    table = reference.model.model.layers[0].mlp.gate.tid2eid
    ids = step.taps["layers.0.moe.router.ids"]
    bits.assert_same_bits(
        ids, table[list(prompt.tokens)].numpy().astype(np.int32)
    )

  @parameterized.parameters("native", "portable")
  def test_taps_on_and_off_give_the_same_logits(self, arithmetic):
    run = functools.partial(
        _reference(dtype="float32").run, [_prompt(9)], 3, arithmetic=arithmetic
    )
    on, off = run()[0], run(wanted=trajectory.keep_none)[0]
    for left, right in zip(on.steps, off.steps, strict=True):
      bits.assert_same_bits(left.taps["logits"], right.taps["logits"])
      self.assertEqual(left.state, right.state)

  def test_portable_tables_reach_every_rotary_module(self):
    reference = _reference(dtype="float32")
    rotary = [m for n, m in reference.model.named_modules()
              if n.endswith("rotary_emb")]
    self.assertLen(rotary, 6)
    for module in rotary:  # Other frequencies; a portable run has its own.
      module.compress_inv_freq += 1
    try:
      broken = reference.run([_prompt(9)], 0, arithmetic="portable")[0]
    finally:
      for module in rotary:
        module.compress_inv_freq -= 1
    plain = torch_reference.TransformersReference(
        _folder("float32"), "eager"
    ).run([_prompt(9)], 0, arithmetic="portable")[0]
    for name, value in plain.steps[0].taps.items():
      bits.assert_same_bits(broken.steps[0].taps[name], value)

  @parameterized.parameters(trajectory.keep_all, trajectory.keep_boundaries)
  def test_selections_of_indexers_and_routers_are_followed(self, wanted):
    reference = _reference(dtype="float32")
    free = reference.run([_prompt(45)], 2, wanted=wanted)
    other = reference.run([_prompt(45)], 2, wanted=wanted)
    name = "layers.3.attention.indexer.visible"
    ids = "layers.4.moe.router.ids"
    for step in other[0].steps:
      seen = step.taps[name]
      seen[-1] = 0
      seen[-1, [0, 2, 3, 6]] = 1
      step.taps[ids] = step.taps[ids][:, ::-1].copy()
    forced = reference.run([_prompt(45)], 2, given=other, wanted=wanted)
    again = reference.run([_prompt(45)], 2, given=free, wanted=wanted)
    for a, b, c, d in zip(
        free[0].steps, forced[0].steps, again[0].steps, other[0].steps,
        strict=True,
    ):
      bits.assert_same_bits(b.taps[name], d.taps[name])
      bits.assert_same_bits(b.taps[ids], d.taps[ids])
      bits.assert_same_bits(c.taps["logits"], a.taps["logits"])

  def test_the_reversed_order_is_another_order(self):
    reference = _reference(dtype="float32")
    native = reference.run([_prompt(16)], 1)
    reversed_ = reference.run(
        [_prompt(16)], 1, arithmetic="reversed", given=native
    )
    found = compare.compare(reversed_, native)
    self.assertEqual(found.levels()["L4"], "beyond_rule")
    self.assertGreater(found.counts[(0, "attention_hc.mixes")].max_ulp, 0)
    self.assertEqual(found.counts[(2, taps_lib.ROUTE_IDS)].differing, 0)


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
      ("model.layers.1.mlp", "mul"),
      ("model.layers.2.self_attn.compressor", "mul"),
      ("model.layers.3.attn_hc", "mul"),
      ("model.hc_head", "mul"),
  )
  def test_a_graph_with_one_operation_more_is_refused(self, name, operation):
    reference = torch_reference.TransformersReference(
        _folder("float32"), "eager"
    )
    module = reference.model.get_submodule(name)
    plain = module.forward

    def forward(*args, **kwargs):
      out = plain(*args, **kwargs)
      if isinstance(out, tuple):
        return (out[0] * 1.5, *out[1:])
      return out * 1.5

    with mock.patch.object(module, "forward", forward):
      with self.assertRaisesRegex(
          refusal.UnsupportedError, f"module '{name}' runs.*{operation}"
      ):
        reference.run([_prompt(9)], 0)

  def test_another_number_of_normalisations_is_refused(self):
    reference = torch_reference.TransformersReference(
        _folder("float32"), "eager"
    )
    reference.model.model.layers[3].ffn_hc.hc_sinkhorn_iters = 19
    with self.assertRaisesRegex(
        refusal.UnsupportedError, "model.layers.3.ffn_hc"
    ):
      reference.run([_prompt(3)], 0)

  def test_tables_of_an_indexer_that_differ_are_refused(self):
    reference = torch_reference.TransformersReference(
        _folder("float32"), "eager"
    )
    layer = reference.model.model.layers[3].self_attn
    layer.compressor.indexer.rotary_emb.compress_inv_freq *= 2
    with self.assertRaisesRegex(refusal.UnsupportedError, "rotary.compress"):
      reference.run([_prompt(3)], 0)

  @parameterized.parameters("5.8.0", "5.7.9", "5.8.0.dev3")
  def test_a_version_that_computes_it_wrongly_is_refused(self, version):
    with self.assertRaisesRegex(
        refusal.UnsupportedError, f"transformers {version}.*5.8.1 or later"
    ):
      reference_lib.of("deepseek_v4", version)
    reference_lib.of("qwen3_moe", version)

  @parameterized.parameters("5.8.1", "5.24.0", "5.10.0rc1", "6.0")
  def test_a_later_version_is_not(self, version):
    reference_lib.of("deepseek_v4", version)

  def test_an_unknown_architecture_is_refused(self):
    with self.assertRaisesRegex(refusal.UnsupportedError, "deepseek_v41"):
      reference_lib.of("deepseek_v41", "5.24.0")

  @absltest.skipIf(_BFLOAT16_RUNS, "this transformers runs bfloat16")
  def test_a_version_that_runs_float32_only_is_named(self):
    with self.assertRaisesRegex(
        refusal.UnsupportedError, "transformers 5.17.0 cannot run"
    ):
      _reference().run([_prompt(9)], 0)


if __name__ == "__main__":
  absltest.main()
