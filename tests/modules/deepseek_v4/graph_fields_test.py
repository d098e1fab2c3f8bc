"""Each field of the graph changes its own tap first and nothing earlier.

The field's own place is named by layer and tap; every tap in front of it keeps
its bits. Needs no accelerator.
"""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from moejax.contracts import deepseek_v4 as contract_lib
from moejax.contracts import document
from moejax.contracts import named_combines
from moejax.modules import decoder as nest_lib
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import decoder as decoder_lib
from moejax.modules.deepseek_v4 import state as state_lib
from moejax.numerics import reference_ops
from moejax.protocols import taps
from tests import bits
from tests.modules.deepseek_v4 import recorder as recorder_lib
from tests.modules.deepseek_v4 import tiny

_BLOCKS = dict(activation_block=8, entry_block=16, indexer_block=8)
_BASE = dataclasses.replace(
    contract_lib.TRANSFORMERS,
    quantization=dataclasses.replace(
        contract_lib.TRANSFORMERS.quantization, **_BLOCKS
    ),
)


def _contract(graph, combine="transformers_eager", **router):
  contract = contract_lib.of(
      "native",
      dataclasses.replace(config_lib.router_contract(tiny.CONFIG), **router),
      named_combines.named(combine),
      graph,
  )
  return contract


def _run(contract, config=tiny.CONFIG, tokens=tiny.TOKENS, params=None):
  decoder = decoder_lib.Decoder(
      config,
      nest_lib.nest(tiny.params() if params is None else params),
      contract,
      reference_ops.operations(contract),
  )
  state = state_lib.empty(config, 1, 12, contract.graph)
  recorder = recorder_lib.Recorder()
  decoder(jnp.int32([tokens]), state, tap=recorder)
  return recorder.seen


def _first_difference(a, b) -> str:
  """The first tap, in order, that only one of the two shows or that differs."""
  after = [*b]
  for place, name in enumerate(a):
    if after[place] != name:
      return after[place] if name in b else name
    try:
      bits.assert_same_bits(a[name], b[name])
    except AssertionError:
      return name
  return ""


class GraphFieldsTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.base = _run(_contract(_BASE))

  def _assert_first(self, contract, expected):
    self.assertNotEqual(
        document.digest(contract), document.digest(_contract(_BASE))
    )
    seen = _run(contract)
    self.assertEqual(_first_difference(self.base, seen), expected)
    for name in seen:
      self.assertNotEmpty(taps.axes(name))

  @parameterized.parameters(
      (dict(hyper_scale="mixes"), "layers.0.attention_hc.norm.output"),
      (dict(hyper_mix="float32"), "layers.0.attention_mix.post"),
      (dict(rotary_tables="float32"), "rotary.main.cos"),
      (dict(query_norm="model"), "layers.0.attention.q_b_norm.square"),
      (
          dict(attention="online_softmax", attention_block=3),
          "layers.0.attention.scores",
      ),
      (dict(compressor="float32"), "layers.1.attention.compressor.kv_proj"),
      (dict(indexer="model"), "layers.1.attention.indexer.scores"),
      (dict(gate_epsilon=0.0), "layers.0.moe.router.gate_sum_shifted"),
      (dict(gate_epsilon=0.5), "layers.0.moe.router.gate_sum_shifted"),
      (dict(expert_activation="float32"), "layers.0.moe.experts.silu"),
      (dict(logits="float32"), "logits"),
  )
  def test_a_field_of_the_graph(self, changes, expected):
    self._assert_first(
        _contract(dataclasses.replace(_BASE, **changes)), expected
    )

  @parameterized.parameters(
      ("activations", "layers.0.attention.input_quantized"),
      ("entries", "layers.0.attention.kv_quantized"),
      ("indexer", "layers.1.attention.indexer.compressor.hadamard_sum"),
  )
  def test_a_switch_of_quantisation(self, field, expected):
    quantization = dataclasses.replace(_BASE.quantization, **{field: True})
    graph = dataclasses.replace(_BASE, quantization=quantization)
    self._assert_first(_contract(graph), expected)

  def test_a_router_in_float32(self):
    self._assert_first(
        _contract(
            _BASE,
            logits_dtype="float32",
            score_dtype="float32",
            gate_dtype="float32",
        ),
        "layers.0.moe.router.logits",
    )

  def test_a_gate_in_front_of_w2(self):
    self._assert_first(
        _contract(_BASE, "deepseek_reference"),
        "layers.0.moe.experts.gated_activation",
    )

  def test_the_size_of_a_block_of_attention(self):
    seen = [
        _run(
            _contract(
                dataclasses.replace(
                    _BASE, attention="online_softmax", attention_block=size
                )
            )
        )
        for size in (3, 6)  # Both fill up a window of four to six slots.
    ]
    self.assertEqual(
        _first_difference(*seen), "layers.0.attention.online.shifted"
    )

  @parameterized.parameters(
      ("activation_block", 16, "layers.0.attention.input_quantized"),
      ("entry_block", 8, "layers.0.attention.kv_quantized"),
      ("indexer_block", 16, "layers.1.attention.indexer.compressor.quantized"),
  )
  def test_the_size_of_a_quantised_block(self, field, size, expected):
    quantized = contract_lib.DEEPSEEK_REFERENCE_QUANTIZED.quantization
    before, after = (
        dataclasses.replace(
            _BASE, quantization=dataclasses.replace(quantized, **blocks)
        )
        for blocks in (_BLOCKS, _BLOCKS | {field: size})
    )
    # An eight-bit float keeps its precision over 17 binades: how far a block
    # reaches shows where it holds numbers of more.
    params = tiny.params()
    for path in ("input_norm", "attention.kv_norm"):
      path = f"layers.0.{path}"
      params[path] = params[path].at[0].mul(2.0**14)
    seen = [_run(_contract(g), params=params) for g in (before, after)]
    self.assertEqual(_first_difference(*seen), expected)


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(activation_block=12, activations=True), "embed=32.*block=12"),
      (dict(entry_block=64, entries=True), "head_dim - rotary_dim=16.*=64"),
      (dict(indexer_block=32, indexer=True), "index_dim=16.*block=32"),
  )
  def test_a_width_that_is_no_whole_block(self, fields, message):
    quantization = dataclasses.replace(_BASE.quantization, **fields)
    graph = dataclasses.replace(_BASE, quantization=quantization)
    with self.assertRaisesRegex(ValueError, message):
      _run(_contract(graph))

  def test_an_indexer_without_a_hadamard_transform(self):
    quantization = dataclasses.replace(_BASE.quantization, indexer=True)
    graph = dataclasses.replace(_BASE, quantization=quantization)
    config = dataclasses.replace(tiny.CONFIG, index_dim=24)
    with self.assertRaisesRegex(ValueError, "index_dim=24 is no power of two"):
      _run(_contract(graph), config)

  def test_quantisation_in_float16(self):
    quantization = dataclasses.replace(_BASE.quantization, entries=True)
    graph = dataclasses.replace(_BASE, quantization=quantization)
    config = dataclasses.replace(tiny.CONFIG, dtype="float16")
    with self.assertRaisesRegex(NotImplementedError, "float16"):
      _run(_contract(graph), config)

  def test_a_state_of_another_graph(self):
    contract = _contract(dataclasses.replace(_BASE, compressor="float32"))
    decoder = decoder_lib.Decoder(
        tiny.CONFIG,
        nest_lib.nest(tiny.params()),
        contract,
        reference_ops.operations(contract),
    )
    with self.assertRaisesRegex(ValueError, "bfloat16.*compressor='float32'"):
      decoder(jnp.int32([tiny.TOKENS]), state_lib.empty(tiny.CONFIG, 1, 12))
    state = state_lib.empty(tiny.CONFIG, 1, 12, contract.graph)
    self.assertEqual(state.layers[1].compressor.kv.dtype, np.float32)
    self.assertEqual(state.layers[1].compressor.entries.dtype, jnp.bfloat16)


if __name__ == "__main__":
  absltest.main()
