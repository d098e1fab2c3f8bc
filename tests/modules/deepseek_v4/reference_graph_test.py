"""The graph `deepseek_reference` against a plain NumPy decoder, bit by bit.

`plain_reference.py` is written from the specification and shares no code with
the decoder. Contract arithmetic is the one in which both sides are exact.

Needs no accelerator.
"""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.contracts import deepseek_v4 as contract_lib
from moejax.modules import decoder as nest_lib
from moejax.modules.deepseek_v4 import decoder as decoder_lib
from moejax.modules.deepseek_v4 import state as state_lib
from moejax.numerics import reference_ops
from tests import bits
from tests.modules.deepseek_v4 import plain_reference
from tests.modules.deepseek_v4 import recorder as recorder_lib
from tests.modules.deepseek_v4 import tiny

_BLOCK = 3  # Ends inside the window and inside the entries.
_ACTIVATION, _ENTRY, _INDEX = 8, 16, 8


def _contract(quantized: bool) -> contract_lib.DeepseekV4Contract:
  contract = contract_lib.deepseek_reference(
      "sequential", tiny.CONFIG.top_k, tiny.CONFIG.gate_scale, quantized
  )
  quantization = dataclasses.replace(
      contract.graph.quantization,
      activation_block=_ACTIVATION,
      entry_block=_ENTRY,
      indexer_block=_INDEX,
  )
  graph = dataclasses.replace(
      contract.graph, attention_block=_BLOCK, quantization=quantization
  )
  return dataclasses.replace(contract, graph=graph)


def _run(contract, feeds):
  """({tap: values of all steps, batch axis gone}, the state)."""
  params = tiny.params(spread=4.0)
  decoder = decoder_lib.Decoder(
      tiny.CONFIG,
      nest_lib.nest(params),
      contract,
      reference_ops.operations(contract),
  )
  state = state_lib.empty(tiny.CONFIG, 1, 12, contract.graph)
  steps = []
  for tokens in feeds:
    recorder = recorder_lib.Recorder()
    _, state = decoder(jnp.int32([tokens]), state, tap=recorder)
    steps.append(recorder.seen)
  return steps, state


def _plain(quantized, frequencies):
  params = {
      path: np.asarray(v, np.int32 if v.dtype == jnp.int32 else np.float32)
      for path, v in tiny.params(spread=4.0).items()
  }
  blocks = (_ACTIVATION, _ENTRY, _INDEX) if quantized else None
  reference = plain_reference.Reference(
      params, tiny.CONFIG, _BLOCK, frequencies, blocks
  )
  reference(np.array(tiny.TOKENS))
  return reference.seen


def _joined(steps, name):
  """One tap over all steps, as float32 [token, ...]."""
  flat = ".moe." in name
  parts = [step[name] if flat else step[name][0] for step in steps]
  return np.concatenate(parts).astype(np.float32)


def _entries(state):
  """{name: [capacity, width] float32} of compressed entries of all layers."""
  out = {}
  for i, layer in enumerate(state.layers):
    for name, part in (
        ("entries", layer.compressor), ("indexer.keys", layer.indexer)
    ):
      if part is not None:
        rows = np.asarray(part.entries, np.float32)[0]
        out[f"layers.{i}.attention.{name}"] = rows
  return out


class ReferenceGraphTest(parameterized.TestCase):

  @parameterized.parameters(False, True)
  @pytest.mark.slow
  def test_every_layer_has_the_bits_of_the_plain_decoder(self, quantized):
    feeds = (tiny.TOKENS[:7], tiny.TOKENS[7:])
    steps, state = _run(_contract(quantized), feeds)
    frequencies = {
        kind: steps[0][f"rotary.{kind}.inverse_frequencies"]
        for kind in ("main", "compress")
    }
    expected = _plain(quantized, frequencies)
    entries = _entries(state)
    compared = 0
    for name, value in expected.items():
      if name in entries:
        found = entries[name][: len(value)]
      elif name.endswith("attention.entries"):
        self.assertEmpty(value)  # A layer that compresses nothing.
        continue
      else:
        found = _joined(steps, name)
      if name.endswith("exponentials"):  # Slots that no query fills are zero.
        used = value.shape[-1]
        self.assertEqual(np.abs(found[..., used:]).sum(), 0)
        found = found[..., :used]
      if name.endswith("index_scores"):
        found = np.where(np.isnan(value), value, found[:, : value.shape[1]])
      try:
        bits.assert_same_bits(found, value)
      except AssertionError as error:
        self.fail(f"first difference at {name}: {error}")
      compared += 1
    self.assertEqual(steps[0]["logits"].dtype, np.float32)
    self.assertEqual(compared, 45)


if __name__ == "__main__":
  absltest.main()
