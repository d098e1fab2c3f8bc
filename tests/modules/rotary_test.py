"""Rotary embedding: frequencies, factors, tables, rotation and positions.

Needs no accelerator, and float64.
"""

import math

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from moejax.modules import config as config_lib
from moejax.modules import rotary as lib
from moejax.modules import tap as tap_lib
from moejax.numerics import formats
from moejax.numerics.portable import portable_ops
from moejax.numerics.portable import portable_oracle
from moejax.numerics import ulp
from tests import bits

_OPS = portable_ops.PortableOperations()


def _config(scaling=config_lib.RopeScaling(), **fields):
  values = dict(
      vocab_size=8, embed=8, num_layers=1, num_heads=1, num_kv_heads=1,
      head_dim=64, hidden=8, expert_hidden=8, num_experts=2, top_k=1,
      normalize_gates=True, sparse_layers=(), rope_theta=1e6,
      max_positions=4096, rope_scaling=scaling,
  )
  return config_lib.DecoderConfig(**{**values, **fields})


def _yarn(**fields):
  return config_lib.RopeScaling("yarn", **fields)


class FactorTest(parameterized.TestCase):

  @parameterized.parameters(
      (16.0, 0.0, 0.0, 1.277258872),
      (16.0, 1.0, 1.0, 1.0),
      (40.0, 0.707, 1.0, 0.921042355),
      (4.0, 0.0, 0.0, 1.138629436),
      (16.0, 0.707, 0.0, 1.277258872),  # One of the pair counts as none.
      (16.0, 0.0, 0.707, 1.277258872),
      (1.0, 0.0, 0.0, 1.0),
  )
  def test_c22_attention_factor(self, factor, mscale, all_dim, expected):
    scaling = _yarn(factor=factor, mscale=mscale, mscale_all_dim=all_dim)
    # The case gives nine decimals.
    self.assertAlmostEqual(
        lib.attention_factor(scaling), expected, delta=6e-10
    )

  def test_c22_scale_of_the_scores(self):
    self.assertAlmostEqual(
        lib.yarn_scale(40.0, 1.0) ** 2, 1.873854207, delta=6e-10
    )

  def test_a_given_factor_comes_before_the_derived_one(self):
    scaling = _yarn(factor=16.0, attention_factor=1.5)
    self.assertEqual(lib.attention_factor(scaling), 1.5)

  @parameterized.parameters("default", "linear")
  def test_only_yarn_scales_cos_and_sin(self, kind):
    scaling = config_lib.RopeScaling(kind, factor=16.0, attention_factor=1.5)
    self.assertEqual(lib.attention_factor(scaling), 1.0)


class FrequenciesTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("default", config_lib.RopeScaling(), {}),
      ("linear", config_lib.RopeScaling("linear", factor=8.0), {}),
      ("yarn", _yarn(factor=4.0, original_positions=2048), {}),
      (
          "yarn_unrounded_range",
          _yarn(factor=16.0, original_positions=4096, truncate=False),
          {"rope_theta": 10000.0},
      ),
      (
          "yarn_other_betas",
          _yarn(
              factor=40.0, original_positions=4096, beta_fast=16.0,
              beta_slow=2.0, mscale=0.707, mscale_all_dim=1.0,
          ),
          {"head_dim": 128},
      ),
      (
          # Few rotations: both ends of the ramp fall on pair 0.
          "yarn_empty_range",
          _yarn(factor=4.0, original_positions=6, beta_fast=2.0),
          {},
      ),
      (
          # Fewer still: the ramp would end before it begins.
          "yarn_inverted_range",
          _yarn(factor=4.0, original_positions=4, beta_fast=2.0),
          {},
      ),
  )
  def test_equal_those_of_transformers_within_two_steps(self, scaling, fields):
    import transformers
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    config = _config(scaling, **fields)
    parameters = {"rope_type": scaling.kind, "rope_theta": config.rope_theta}
    if scaling.kind != "default":
      parameters["factor"] = scaling.factor
    if scaling.kind == "yarn":
      parameters |= {
          "original_max_position_embeddings": scaling.original_positions,
          "beta_fast": scaling.beta_fast,
          "beta_slow": scaling.beta_slow,
          "truncate": scaling.truncate,
      }
      if scaling.mscale:
        parameters |= {
            "mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim
        }
    theirs = modeling_qwen3_moe.Qwen3MoeRotaryEmbedding(
        transformers.Qwen3MoeConfig(
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rope_parameters=parameters,
        )
    )
    ours = np.asarray(lib.inverse_frequencies(config, _OPS))
    # torch's float32 pow is not correctly rounded; two more roundings follow.
    distance = ulp.distance_ulp(ours, theirs.inv_freq.numpy())
    self.assertBetween(distance.min(), 0, 2)  # -1 is a NaN.
    self.assertLessEqual(distance.max(), 2)
    self.assertAlmostEqual(
        lib.attention_factor(scaling), theirs.attention_scaling, delta=1e-15
    )

  def test_default_rounds_exponent_power_and_quotient(self):
    oracle = portable_oracle.PortableOracle()
    exponent = (np.arange(0, 64, 2) / 64).astype(np.float32)
    period = oracle.power(1e6, exponent, "float32")
    expected = oracle.divide(np.float32(1), period, "float32")
    bits.assert_same_bits(lib.inverse_frequencies(_config(), _OPS), expected)

  def test_yarn_keeps_fast_pairs_and_stretches_slow_ones(self):
    plain = np.asarray(lib.inverse_frequencies(_config(), _OPS))
    scaling = _yarn(factor=4.0, original_positions=2048)
    scaled = np.asarray(lib.inverse_frequencies(_config(scaling), _OPS))
    # Pair i turns 2048 * frequency / (2 pi) times in the trained context.
    turns = 2048 * plain.astype(float) / (2 * math.pi)
    fast, slow = np.flatnonzero(turns > 33), np.flatnonzero(turns < 0.5)
    self.assertNotEmpty(fast)
    bits.assert_same_bits(scaled[fast[:-1]], plain[fast[:-1]])
    bits.assert_same_bits(scaled[slow[1:]], plain[slow[1:]] / np.float32(4))
    between = (turns < 30) & (turns > 1.1)
    ratio = scaled[between] / plain[between]
    self.assertTrue(((ratio > 0.25) & (ratio < 1)).all())


class TablesTest(parameterized.TestCase):

  @parameterized.parameters("float32", "bfloat16")
  def test_round_angle_function_factor_and_dtype(self, dtype):
    factor = 1.2772588722239782  # Between two float32 numbers.
    positions = np.int32([[0, 1, 2, 1000], [5, 6, 7, 8]])
    frequencies = np.asarray(lib.inverse_frequencies(_config(), _OPS))
    oracle = portable_oracle.PortableOracle()
    angle = oracle.multiply(
        positions[..., None].astype(np.float32), frequencies, "float32"
    )
    angle = np.concatenate([angle, angle], -1)
    actual = lib.tables(
        jnp.asarray(frequencies),
        jnp.asarray(positions),
        factor,
        dtype,
        _OPS,
        tap_lib.SILENT,
    )
    for table, name in zip(actual, ("cos", "sin"), strict=True):
      value = oracle.unary(name, angle, "float32")
      value = oracle.multiply(value, factor, "float32")
      bits.assert_same_bits(table, value.astype(formats.of(dtype).numpy))


class RotateTest(parameterized.TestCase):

  @parameterized.parameters("float32", "bfloat16")
  def test_turns_pairs_half_a_head_apart_with_three_roundings(self, dtype):
    kind = formats.of(dtype).numpy
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 4, 8)).astype(np.float32).astype(kind)
    angle = rng.uniform(-3, 3, (2, 3, 4))
    angle = np.concatenate([angle, angle], -1)
    cos, sin = np.cos(angle).astype(kind), np.sin(angle).astype(kind)
    out = lib.rotate(
        *map(jnp.asarray, (x, cos, sin)), _OPS, tap_lib.SILENT
    )
    oracle = portable_oracle.PortableOracle()
    expected = np.empty_like(x)
    for i in range(8):
      partner, sign = (i + 4) % 8, -1 if i < 4 else 1
      along = oracle.multiply(x[..., i], cos[:, :, None, i], dtype)
      turned = (sign * x[..., partner].astype(np.float32)).astype(kind)
      across = oracle.multiply(turned, sin[:, :, None, i], dtype)
      expected[..., i] = oracle.add(along, across, dtype)
    bits.assert_same_bits(out, expected)

  def test_a_quarter_turn_swaps_the_pair(self):
    x = jnp.asarray([[[[1, 2, 3, 4]]]], jnp.float32)
    cos = jnp.zeros((1, 1, 4), jnp.float32)
    sin = jnp.ones((1, 1, 4), jnp.float32)
    bits.assert_same_bits(
        lib.rotate(x, cos, sin, _OPS, tap_lib.SILENT),
        np.float32([[[[-3, -4, 1, 2]]]]),
    )


class PositionsTest(absltest.TestCase):

  def test_c24_left_padding_is_not_counted(self):
    valid = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], bool)
    bits.assert_same_bits(
        lib.positions(valid, np.zeros((2, 1), np.int32)),
        np.int32([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]),
    )

  def test_a_later_step_goes_on(self):
    bits.assert_same_bits(
        lib.positions(
            np.ones((2, 2), bool), np.full((2, 1), 7, np.int32)
        ),
        np.int32([[7, 8], [7, 8]]),
    )


if __name__ == "__main__":
  absltest.main()
