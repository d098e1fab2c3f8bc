"""From a decoder's working state and back.

Needs no accelerator.
"""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import ml_dtypes
import numpy as np

from moejax.contracts import refusal
from moejax.protocols.state import layout as layout_lib
from moejax.protocols.state import persistent_state
from moejax.protocols.state import working_state as lib
from tests import bits
from tests.protocols.state import sample


def _assert_same_state(actual, expected):
  assert list(actual.arrays) == list(expected.arrays)
  for name, array in expected.arrays.items():
    bits.assert_same_bits(actual.arrays[name], array)


class RestoreTest(parameterized.TestCase):

  @parameterized.product(
      dtype=("float32", "bfloat16", "float16"),
      length=(1, 4, 7, 8, 13, 24),
      layout=layout_lib.LAYOUTS,
  )
  def test_the_working_state_gives_the_state_again(self, dtype, length, layout):
    config = sample.tiny(dtype=dtype)
    state = sample.state(config, length, layout)
    bias = sample.biases(config)
    working = lib.restore(state, bias, capacity=9)
    self.assertEqual(working.layers[1].compressor.entries.shape, (1, 9, 6))
    self.assertEqual(working.layers[1].compressor.gate.dtype.name, dtype)
    again = lib.capture(config, working, bias, (1, 2, 3), layout)
    _assert_same_state(again, state)

  @parameterized.parameters("float32", "bfloat16")
  def test_a_gate_is_found_for_every_score(self, dtype):
    """Biases from far below to far above the gates, ties and signs."""
    rng = np.random.default_rng(0)
    shape = (64, 512)
    narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    gate = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 30, shape)
    gate = gate.astype(narrow)
    bias = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 30, shape)
    bias = bias.astype(np.float32)
    gate[0, :6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40]
    bias[0, :6] = [-0.0, -0.0, 1, 1, 1, 0.0]
    score = gate.astype(np.float32) + bias
    found = lib._gate(
        "x", score, bias, np.dtype(narrow), np.ones(len(score), bool)
    )
    bits.assert_same_bits(found.astype(np.float32) + bias, score)

  def test_every_sequence_of_a_batch_is_cut_out(self):
    config, bias = sample.CONFIGS[0], sample.biases(sample.CONFIGS[0])
    runs = [
        sample.working(config, sample.streams(config, 9, seed), bias)
        for seed in (1, 2)
    ]
    both = jax.tree.map(lambda *a: np.concatenate(a), *runs)
    for i, run in enumerate(runs):
      _assert_same_state(
          lib.capture(config, both, bias, (1,), sequence=i),
          lib.capture(config, run, bias, (1,)),
      )

  def test_refuses_values_that_the_dtype_does_not_have(self):
    config = sample.tiny(dtype="bfloat16")
    state, bias = sample.state(config, 9), sample.biases(config)
    state.arrays["layers.0.window_kv"][2, 1] = np.float32(1 + 2**-20)
    with self.assertRaisesRegex(refusal.HarnessError, "not of bfloat16"):
      lib.restore(state, bias, 9)

  def test_refuses_a_score_that_no_gate_gives(self):
    config = sample.tiny(dtype="bfloat16")
    state, bias = sample.state(config, 9), sample.biases(config)
    name = "layers.1.compressor_state.score"
    score = state.arrays[name]
    ape = bias[lib.bias_name(1, layout_lib.COMPRESSOR)]
    score[4, 0] = np.float32(3.14159265) + ape[0, 0]
    with self.assertRaisesRegex(refusal.HarnessError, "no bfloat16 gate"):
      lib.restore(state, bias, 9)

  def test_refuses_too_small_a_buffer_and_a_missing_bias(self):
    config, bias = sample.CONFIGS[0], sample.biases(sample.CONFIGS[0])
    state = sample.state(config, 24)
    with self.assertRaisesRegex(refusal.HarnessError, "6 entries"):
      lib.restore(state, bias, 5)
    working = lib.restore(state, bias, 6)
    name = lib.bias_name(1, layout_lib.INDEXER)
    with self.assertRaisesRegex(refusal.HarnessError, name):
      lib.capture(config, working, {**bias, name: bias[name][:2]}, (1,))
    with self.assertRaisesRegex(refusal.HarnessError, f"{name} is None"):
      lib.restore(state, {k: v for k, v in bias.items() if k != name}, 6)
    with self.assertRaisesRegex(refusal.HarnessError, "window_kv"):
      lib.capture(sample.tiny(window=9), working, bias, (1,))


class NarrowTest(parameterized.TestCase):

  @parameterized.parameters(*sample.LENGTHS)
  def test_narrowing_in_steps_or_at_once_is_the_same(self, length):
    raw = sample.state(length=length)
    live = persistent_state.narrow(raw, layout_lib.LIVE)
    _assert_same_state(
        persistent_state.narrow(live, layout_lib.CARRIED),
        persistent_state.narrow(raw, layout_lib.CARRIED),
    )

  def test_live_rows_are_where_the_tokens_are(self):
    config, bias = sample.CONFIGS[0], sample.biases(sample.CONFIGS[0])
    given = sample.streams(config, 13)  # 13 = 3 * 4 + 1 = 8 + 5.
    live = sample.state(length=13, layout="live").arrays
    bits.assert_same_bits(live["layers.0.window_kv"], given[0]["window"][5:])
    csa = "layers.1.compressor_state"
    kv = given[1]["compressor.kv"]
    ape = bias[lib.bias_name(1, layout_lib.COMPRESSOR)]
    gate = given[1]["compressor.gate"]
    bits.assert_same_bits(live[f"{csa}.previous_kv"], kv[8:12, :6])
    bits.assert_same_bits(
        live[f"{csa}.previous_score"], (gate[8:12] + ape)[:, :6]
    )
    bits.assert_same_bits(live[f"{csa}.kv"], kv[12:])
    bits.assert_same_bits(live[f"{csa}.score"], gate[12:] + ape[:1])
    hca = given[2]["compressor.kv"]
    bits.assert_same_bits(live["layers.2.compressor_state.kv"], hca[8:])

  def test_refuses_to_widen(self):
    with self.assertRaisesRegex(refusal.HarnessError, "'carried'.*'live'"):
      persistent_state.narrow(sample.state(layout="carried"), "live")


if __name__ == "__main__":
  absltest.main()
