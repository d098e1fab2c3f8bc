"""The persistent state under the graph `deepseek_reference`.

Its compressors keep float32 rows, its attention runs block by block. In
contract arithmetic the state must not depend on how a text is fed. Needs no
accelerator.
"""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax.contracts import deepseek_v4 as contract_lib
from moejax.contracts import refusal
from moejax.modules import decoder as nest_lib
from moejax.modules.deepseek_v4 import decoder as decoder_lib
from moejax.modules.deepseek_v4 import state as rows_lib
from moejax.numerics import reference_ops
from moejax.protocols.state import paths
from moejax.protocols.state import working_state
from tests import bits
from tests.modules.deepseek_v4 import tiny

_NUM_TOKENS = len(tiny.TOKENS)


def _biases():
  return {
      path: np.asarray(array)
      for path, array in tiny.params().items()
      if path.endswith("position_bias")
  }


@pytest.mark.slow
class ReferenceGraphTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    contract = contract_lib.deepseek_reference("sequential", 3, 1.5, True)
    quantization = dataclasses.replace(
        contract.graph.quantization,
        activation_block=8,
        entry_block=16,
        indexer_block=8,
    )
    graph = dataclasses.replace(
        contract.graph, attention_block=3, quantization=quantization
    )
    contract = dataclasses.replace(contract, graph=graph)
    cls.graph = graph
    cls.decoder = decoder_lib.Decoder(
        tiny.CONFIG,
        nest_lib.nest(tiny.params()),
        contract,
        reference_ops.operations(contract),
    )
    cls.whole = cls.fed((_NUM_TOKENS,))

  @classmethod
  def fed(cls, chunks):
    return paths.feed(
        cls.decoder, tiny.TOKENS, chunks, _biases(), width=_NUM_TOKENS
    )

  def _feed(self, rows, state):
    """Feeds rows that are padded to one width, so that all compile once."""
    padded = [[0] * (_NUM_TOKENS - len(row)) + [*row] for row in rows]
    valid = [
        [c >= _NUM_TOKENS - len(row) for c in range(_NUM_TOKENS)]
        for row in rows
    ]
    logits, state = self.decoder(jnp.int32(padded), state, jnp.asarray(valid))
    return np.asarray(logits), state

  def _empty(self, batch):
    return rows_lib.empty(tiny.CONFIG, batch, _NUM_TOKENS, self.graph)

  def _captured(self, state, tokens):
    return working_state.capture(
        tiny.CONFIG, jax.device_get(state), _biases(), tokens
    )

  @parameterized.parameters((7, 3), (3, 3, 4), (1, 2, 1, 4, 2))
  def test_every_way_to_feed_a_text_leaves_the_same_state(self, *chunks):
    found = self.fed(chunks)
    self.assertEqual(list(found.arrays), list(self.whole.arrays))
    for name, array in self.whole.arrays.items():
      try:
        bits.assert_same_bits(found.arrays[name], array)
      except AssertionError as error:
        self.fail(f"{name}: {error}")

  def test_compressors_keep_values_that_bfloat16_has_not(self):
    for layer in (1, 2):
      kv = self.whole.arrays[f"layers.{layer}.compressor_state.kv"]
      narrow = kv.astype(ml_dtypes.bfloat16).astype(np.float32)
      self.assertGreater(int((narrow != kv).sum()), 0.9 * (kv != 0).sum())

  def test_a_restored_state_goes_on_as_the_original_did(self):
    _, state = self._feed([tiny.TOKENS[:7]], self._empty(1))
    first = self._captured(state, tiny.TOKENS[:7])
    with self.assertRaisesRegex(refusal.HarnessError, "not of bfloat16"):
      working_state.restore(first, _biases(), _NUM_TOKENS)
    state = working_state.restore(first, _biases(), _NUM_TOKENS, self.graph)
    state = jax.tree.map(jnp.asarray, state)
    _, state = self._feed([tiny.TOKENS[7:]], state)
    again = self._captured(state, tiny.TOKENS)
    for name, array in self.whole.arrays.items():
      bits.assert_same_bits(again.arrays[name], array)

  def test_a_sequence_in_a_batch_has_the_bits_it_has_alone(self):
    rows = (tiny.TOKENS[:4], tiny.TOKENS[2:])
    together, _ = self._feed(rows, self._empty(2))
    for index, row in enumerate(rows):
      alone, _ = self._feed([row], self._empty(1))
      mine = slice(_NUM_TOKENS - len(row), None)
      bits.assert_same_bits(together[index, mine], alone[0, mine])


if __name__ == "__main__":
  absltest.main()
