"""The whole decoder: batches, padding, steps, taps and refusals.

Two layers, one dense and one sparse, with random weights. Needs no
accelerator, and float64.
"""

import dataclasses
import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from moejax.contracts import decoder as decoder_contract
from moejax.contracts import named_combines
from moejax.modules import config as config_lib
from moejax.modules import decoder as lib
from moejax.modules import moe
from moejax.modules import rotary
from moejax.modules import tap as tap_lib
from moejax.numerics import formats
from moejax.numerics import native_ops
from moejax.numerics import reference_ops
from tests import bits

_CONFIG = config_lib.DecoderConfig(
    vocab_size=32,
    embed=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden=24,
    expert_hidden=8,
    num_experts=4,
    top_k=2,
    normalize_gates=True,
    sparse_layers=(1,),
    max_positions=16,
)
_CAPACITY = 6
_CONTRACTS = {
    "native": decoder_contract.native,
    "portable": decoder_contract.portable,
    "sequential": decoder_contract.sequential,
}
_EXACT = ("portable", "sequential")
# The first sequence is padded on the left by one. What a padded row computes
# means nothing: it sees no key, and so attends to all of them alike.
_TOKENS = np.int32([[0, 9, 5, 9], [7, 5, 3, 1]])
_VALID = np.array([[0, 1, 1, 1], [1, 1, 1, 1]], bool)


def _params(config: config_lib.DecoderConfig) -> dict:
  rng = np.random.default_rng(0)
  kind = formats.of(config.dtype).numpy
  flat = {}
  for path, shape in lib.parameter_shapes(config).items():
    value = rng.standard_normal(shape)
    if path.endswith("norm"):
      value = 1 + value / 8
    else:
      value *= 1.5 * shape[-1] ** -0.5
    flat[path] = jnp.asarray(value.astype(np.float32).astype(kind))
  return lib.nest(flat)


@functools.cache
def _decoder(name: str, config=_CONFIG) -> lib.Decoder:
  contract = _CONTRACTS[name](
      config_lib.router_contract(config), named_combines.named("B")
  )
  return lib.Decoder(
      config, _params(config), contract, reference_ops.operations(contract)
  )


def _run(decoder, tokens=_TOKENS, valid=_VALID, tap=tap_lib.SILENT, state=None):
  """Feeds tokens to a state of `_CAPACITY` rows, new unless given."""
  if state is None:
    state = lib.empty_state(decoder.config, len(tokens), _CAPACITY)
  valid = None if valid is None else jnp.asarray(valid)
  return decoder(jnp.asarray(tokens), state, valid, tap)


def _rows(state) -> list[np.ndarray]:
  """Returns the keys and values of all layers."""
  return [np.asarray(rows) for rows in (*state.keys, *state.values)]


class _Recorder(tap_lib.Tap):
  """Keeps every value in order, and replaces those it is given."""

  def __init__(self, given=None):
    super().__init__()
    self.seen = {}
    self.given = given or {}

  def observe(self, name, value):
    if name in self.seen:
      raise ValueError(f"{name} is tapped twice.")
    self.seen[name] = value
    return self.given.get(name, value)


class BatchTest(parameterized.TestCase):

  @parameterized.parameters(*_EXACT)
  def test_a_sequence_alone_has_the_bits_it_has_in_a_padded_batch(self, name):
    decoder = _decoder(name)
    logits, state = _run(decoder)
    own, steps = None, []
    for column in range(1, 4):  # Alone, and one token at a time.
      step, own = _run(decoder, _TOKENS[:1, [column]], None, state=own)
      steps.append(step)
    alone = np.concatenate(steps, 1)
    bits.assert_same_bits(alone[0], np.asarray(logits)[0, 1:])
    for left, right in zip(_rows(own), _rows(state), strict=True):
      bits.assert_same_bits(left[0, :3], right[0, 1:4])
    self.assertEqual((own.length, state.length), (3, 4))

  @parameterized.parameters(*_EXACT)
  def test_two_steps_equal_one(self, name):
    decoder = _decoder(name)
    logits, state = _run(decoder)
    first, middle = _run(decoder, _TOKENS[:, :2], _VALID[:, :2])
    last, end = _run(decoder, _TOKENS[:, 2:], None, state=middle)
    both = np.concatenate([first, last], 1)
    bits.assert_same_bits(both[_VALID], np.asarray(logits)[_VALID])
    for left, right in zip(_rows(end), _rows(state), strict=True):
      bits.assert_same_bits(left[:, :4][_VALID], right[:, :4][_VALID])
    bits.assert_same_bits(end.valid, state.valid)
    self.assertEqual(end.length, state.length)

  def test_what_padding_holds_changes_no_bit(self):
    decoder = _decoder("portable")
    other = _TOKENS.copy()
    other[0, 0] = 30
    left, _ = _run(decoder)
    right, _ = _run(decoder, other)
    left, right = np.asarray(left), np.asarray(right)
    bits.assert_same_bits(left[_VALID], right[_VALID])
    self.assertTrue((left[~_VALID] != right[~_VALID]).any())

  def test_earlier_tokens_do_not_see_later_ones(self):
    decoder = _decoder("portable")
    other = _TOKENS.copy()
    other[:, 3] = 20
    left, _ = _run(decoder)
    right, _ = _run(decoder, other)
    left, right = np.asarray(left), np.asarray(right)
    before = _VALID & (np.arange(4) < 3)
    bits.assert_same_bits(left[before], right[before])
    self.assertTrue((left[:, 3] != right[:, 3]).any(-1).all())

  def test_the_contract_is_observable(self):
    # The logits may round alike; the float32 values on the way do not.
    taps = [_Recorder(), _Recorder()]
    for name, tap in zip(_EXACT, taps, strict=True):
      _run(_decoder(name), tap=tap)
    means = [np.asarray(t.seen["layers.0.input_norm.mean"]) for t in taps]
    self.assertTrue((means[0] != means[1]).any())


class PaddingTest(absltest.TestCase):

  def test_c24_positions_count_real_tokens(self):
    tap = _Recorder()
    _, state = _run(_decoder("native"), tap=tap)
    expected = np.int32([[0, 0, 1, 2], [0, 1, 2, 3]])
    bits.assert_same_bits(tap.seen["positions"], expected)
    none_before = np.zeros((len(_VALID), 1), np.int32)
    bits.assert_same_bits(expected, rotary.positions(_VALID, none_before))
    bits.assert_same_bits(
        state.valid, np.pad(_VALID, ((0, 0), (0, _CAPACITY - 4)))
    )
    tap = _Recorder()
    _run(_decoder("native"), _TOKENS[:, 2:], None, tap, state)
    bits.assert_same_bits(tap.seen["positions"], np.int32([[3, 4], [4, 5]]))

  def test_c24_padding_is_routed_to_no_expert_and_counted_in_no_load(self):
    decoder = _decoder("portable")
    ops = decoder.layers[1].moe.experts.ops
    tap = _Recorder()
    with mock.patch.object(
        ops, "expert_linear", wraps=ops.expert_linear
    ) as spy:
      _run(decoder, tap=tap)
    self.assertEqual(spy.call_count, 2)
    padded = ~_VALID.reshape(-1)
    for call in spy.call_args_list:
      ids = np.asarray(call.args[2]).reshape(8, 2)
      self.assertTrue((ids[padded] == 4).all())
      self.assertTrue((ids[~padded] < 4).all())
    loads = np.asarray(moe.expert_loads(jnp.asarray(ids), 4))
    bits.assert_same_bits(
        loads, np.bincount(ids[~padded].reshape(-1), minlength=4).astype("i4")
    )
    self.assertEqual(loads.sum(), 2 * _VALID.sum())
    combined = np.asarray(tap.seen["layers.1.moe.experts.combine"])
    bits.assert_same_bits(
        combined[padded], np.zeros((1, 16), combined.dtype)
    )


class TapTest(parameterized.TestCase):

  @parameterized.parameters(*_CONTRACTS)
  def test_watching_changes_no_bit(self, name):
    decoder = _decoder(name)
    silent, _ = _run(decoder)
    tap = _Recorder()
    watched, _ = _run(decoder, tap=tap)
    bits.assert_same_bits(watched, silent)
    bits.assert_same_bits(tap.seen["logits"], silent)
    self.assertContainsSubset(
        (
            "embed",
            "rotary.cos",
            "layers.0.mlp.down_proj",
            "layers.0.attention.probabilities",
            "layers.1.moe.router.ids",
            "layers.1.moe.experts.terms",
            "layers.1.output",
            "final_norm.output",
        ),
        tap.seen,
    )

  def test_the_names_are_the_same_in_every_arithmetic(self):
    names = []
    for name in _CONTRACTS:
      tap = _Recorder()
      _run(_decoder(name), tap=tap)
      names.append(list(tap.seen))
    self.assertEqual(names[0], names[1])
    self.assertEqual(names[0], names[2])

  def test_a_replaced_value_is_followed(self):
    decoder = _decoder("native")
    other = _TOKENS[::-1].copy()
    tap = _Recorder()
    expected, _ = _run(decoder, other, tap=tap)
    original, _ = _run(decoder)
    self.assertTrue((np.asarray(original) != np.asarray(expected)).any())
    # Behind each of these values, nothing is left of the tokens.
    for name in ("embed", "layers.0.output", "layers.1.output", "logits"):
      with self.subTest(name):
        replay = _Recorder({name: tap.seen[name]})
        logits, _ = _run(decoder, tap=replay)
        bits.assert_same_bits(logits, expected)

  def test_replaced_ids_send_the_tokens_to_other_experts(self):
    decoder = _decoder("native")
    tap = _Recorder()
    logits, _ = _run(decoder, tap=tap)
    ids = tap.seen["layers.1.moe.router.ids"]
    self.assertEqual(ids.dtype, jnp.int32)
    replay = _Recorder({"layers.1.moe.router.ids": 3 - ids})
    other, _ = _run(decoder, tap=replay)
    self.assertTrue((np.asarray(other) != np.asarray(logits)).any())

  def test_a_tap_within_a_part_sees_the_full_name(self):
    tap = _Recorder()
    tap.within("layers.0").within("mlp")("up_proj", 1)
    self.assertEqual(tap.seen, {"layers.0.mlp.up_proj": 1})


class StateTest(parameterized.TestCase):

  def test_refuses_tokens_beyond_the_rows_of_the_state(self):
    decoder = _decoder("native")
    state = lib.empty_state(_CONFIG, 2, 3)
    with self.assertRaisesRegex(ValueError, "4 positions .* state of 3 rows"):
      _run(decoder, state=state)
    _, state = _run(decoder)
    with self.assertRaisesRegex(ValueError, "8 positions .* state of 6 rows"):
      _run(decoder, state=state)

  def test_refuses_tokens_beyond_the_positions_of_the_model(self):
    state = lib.empty_state(_CONFIG, 1, 32)
    tokens = np.zeros((1, 17), np.int32)
    with self.assertRaisesRegex(ValueError, "17 positions .* 16 positions"):
      _run(_decoder("native"), tokens, None, state=state)

  def test_refuses_a_state_of_another_dtype(self):
    state = lib.empty_state(_CONFIG, 2, _CAPACITY, "float32")
    with self.assertRaisesRegex(ValueError, "bfloat16 do not fit .* float32"):
      _run(_decoder("native"), state=state)

  def test_an_empty_state_has_no_valid_row(self):
    state = lib.empty_state(_CONFIG, 2, _CAPACITY)
    self.assertLen(state.keys, 2)
    self.assertLen(state.values, 2)
    for rows in _rows(state):
      bits.assert_same_bits(rows, np.zeros((2, 6, 2, 8), rows.dtype))
    self.assertEqual(state.keys[0].dtype, jnp.bfloat16)
    self.assertEqual(state.length, 0)
    self.assertFalse(np.asarray(state.valid).any())

  def test_a_step_leaves_the_given_state_as_it_was(self):
    state = lib.empty_state(_CONFIG, 2, _CAPACITY)
    before = [rows.copy() for rows in _rows(state)]
    _run(_decoder("native"), state=state)
    for left, right in zip(_rows(state), before, strict=True):
      bits.assert_same_bits(left, right)
    self.assertFalse(np.asarray(state.valid).any())


class VariantTest(absltest.TestCase):

  def test_tied_embeddings_biases_and_a_window_are_followed(self):
    config = dataclasses.replace(
        _CONFIG,
        tied_embeddings=True,
        attention_bias=True,
        sliding_window=2,
        dtype="float32",
    )
    shapes = lib.parameter_shapes(config)
    self.assertNotIn("lm_head", shapes)
    self.assertEqual(shapes["layers.0.attention.k_proj_bias"], (16,))
    decoder = _decoder("native", config)
    logits, _ = _run(decoder)
    self.assertEqual((logits.shape, logits.dtype), ((2, 4, 32), jnp.float32))
    self.assertTrue(np.isfinite(np.asarray(logits)).all())
    # Two layers of window 2 look back by two tokens, and no farther.
    other = _TOKENS.copy()
    other[1, 0] = 30
    moved = np.asarray(_run(decoder, other)[0])
    logits = np.asarray(logits)
    bits.assert_same_bits(moved[1, 3], logits[1, 3])
    self.assertTrue((moved[1, 2] != logits[1, 2]).any())

  def test_logits_come_from_the_output_projection_or_the_embeddings(self):
    for tied in (False, True):
      with self.subTest(tied=tied):
        config = dataclasses.replace(_CONFIG, tied_embeddings=tied)
        decoder, tap = _decoder("native", config), _Recorder()
        logits, _ = _run(decoder, tap=tap)
        head = _params(config)["embedding" if tied else "lm_head"]
        ops = native_ops.NativeOperations()
        bits.assert_same_bits(
            logits, ops.linear(tap.seen["final_norm.output"], head, "lm_head")
        )

  def test_parameters_are_nested_by_path_and_layer(self):
    nested = lib.nest({"a": 1, "layers.0.mlp.x": 2, "layers.10.mlp.x": 3})
    self.assertEqual(
        nested,
        {"a": 1, "layers": {0: {"mlp": {"x": 2}}, 10: {"mlp": {"x": 3}}}},
    )

  def test_sparse_and_dense_layers_have_their_own_parameters(self):
    shapes = lib.parameter_shapes(_CONFIG)
    self.assertEqual(shapes["layers.1.moe.gate_up"], (4, 16, 16))
    self.assertEqual(shapes["layers.1.moe.down"], (4, 16, 8))
    self.assertEqual(shapes["layers.1.moe.router"], (4, 16))
    self.assertEqual(shapes["layers.0.mlp.down_proj"], (16, 24))
    self.assertNotIn("layers.0.moe.router", shapes)
    self.assertNotIn("layers.1.mlp.down_proj", shapes)
    self.assertEqual(shapes["lm_head"], (32, 16))


if __name__ == "__main__":
  absltest.main()
