"""Attention: what is visible, what is rounded, what is kept.

Needs no accelerator, and float64.
"""

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.modules import attention as lib
from moejax.modules import config as config_lib
from moejax.numerics import formats
from moejax.numerics.portable import portable_ops
from moejax.numerics.portable import portable_oracle
from tests import bits

_OPS = portable_ops.PortableOperations()
_EPSILON = 1e-6


def _config(dtype: str = "float32"):
  return config_lib.DecoderConfig(
      vocab_size=8, embed=12, num_layers=1, num_heads=4, num_kv_heads=2,
      head_dim=8, hidden=8, expert_hidden=8, num_experts=2, top_k=1,
      normalize_gates=True, sparse_layers=(), norm_epsilon=_EPSILON,
      dtype=dtype,
  )


def _params(dtype: str = "float32", bias: bool = False):
  rng = np.random.default_rng(0)
  kind = formats.of(dtype).numpy

  def draw(*shape):
    return rng.standard_normal(shape).astype(np.float32).astype(kind)

  params = {
      "q_proj": draw(32, 12) / kind.type(4),
      "k_proj": draw(16, 12) / kind.type(4),
      "v_proj": draw(16, 12),
      "o_proj": draw(12, 32),
      "q_norm": kind.type(1) + draw(8) / kind.type(8),
      "k_norm": kind.type(1) + draw(8) / kind.type(8),
  }
  if bias:
    for name, rows in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16)):
      params[f"{name}_bias"] = draw(rows)
  return {name: jnp.asarray(value) for name, value in params.items()}


def _norm(x, weight):
  return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + _EPSILON)


def _in_float64(params, x, cos, sin, visible):
  """The same attention head by head: [batch, token, embed] in float64."""
  p = {k: np.asarray(v, np.float64) for k, v in params.items()}
  out = np.zeros((*x.shape[:2], 4, 8))

  def rotate(v, cos, sin):
    turned = np.concatenate([-v[:, 4:], v[:, :4]], -1)
    return v * cos + turned * sin

  def project(name, rows, row):
    bias = p.get(f"{name}_bias", np.zeros(p[name].shape[0]))
    return x[row] @ p[name][rows].T + bias[rows]

  for row in range(len(x)):
    for head in range(4):
      own = slice(8 * head, 8 * head + 8)
      shared = slice(8 * (head // 2), 8 * (head // 2) + 8)
      q = _norm(project("q_proj", own, row), p["q_norm"])
      k = _norm(project("k_proj", shared, row), p["k_norm"])
      q, k = rotate(q, cos[row], sin[row]), rotate(k, cos[row], sin[row])
      scores = np.where(visible[row], q @ k.T / np.sqrt(8), -np.inf)
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      weights /= weights.sum(-1, keepdims=True)
      out[row, :, head] = weights @ project("v_proj", shared, row)
  return out.reshape(*x.shape[:2], 32) @ p["o_proj"].T


class VisibilityTest(parameterized.TestCase):

  def _visible(self, valid, start, num_tokens, window, dtype="float32"):
    bias = lib.visibility_bias(
        jnp.asarray(valid), start, num_tokens, window, dtype
    )
    lowest = np.array(ml_dtypes.finfo(dtype).min, dtype)
    words = np.asarray(bias)
    bits.assert_same_bits(
        words, np.where(words == 0, np.zeros((), dtype), lowest)
    )
    return words == 0

  def test_a_query_sees_itself_and_what_came_before(self):
    visible = self._visible(np.ones((1, 6), bool), 0, 6, None)
    bits.assert_same_bits(visible[0], np.tri(6, dtype=bool))

  @parameterized.parameters("float32", "bfloat16", "float16")
  def test_c23_a_window_of_four_shows_four_keys(self, dtype):
    visible = self._visible(np.ones((1, 8), bool), 0, 8, 4, dtype)
    self.assertEqual(
        visible[0].sum(-1).tolist(), [1, 2, 3, 4, 4, 4, 4, 4]
    )
    self.assertEqual(np.flatnonzero(visible[0, 6]).tolist(), [3, 4, 5, 6])

  def test_a_later_step_sees_the_rows_that_one_step_would_show(self):
    valid = np.ones((1, 8), bool)
    for window in (None, 3):
      whole = self._visible(valid, 0, 8, window)
      bits.assert_same_bits(
          self._visible(valid, 5, 3, window), whole[:, 5:]
      )

  def test_padding_and_unwritten_rows_are_seen_by_nobody(self):
    valid = np.array([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]], bool)
    visible = self._visible(valid, 0, 5, None)
    self.assertFalse(visible[0, :, :2].any())
    self.assertFalse(visible[:, :, 5].any())
    self.assertEqual(visible[0].sum(-1).tolist(), [0, 0, 1, 2, 3])
    self.assertEqual(visible[1].sum(-1).tolist(), [1, 2, 3, 4, 5])


class WriteRowsTest(absltest.TestCase):

  def test_writes_at_the_row_and_nowhere_else(self):
    buffer = jnp.full((2, 5, 1, 2), 7, jnp.bfloat16)
    words = np.arange(1, 9, dtype=np.uint16)  # Subnormals.
    rows = words.view(ml_dtypes.bfloat16).reshape(2, 2, 1, 2)
    expected = np.array(buffer)
    expected[:, 3:] = rows
    bits.assert_same_bits(
        lib.write_rows(buffer, jnp.asarray(rows), 3), expected
    )

  def test_refuses_another_dtype(self):
    with self.assertRaisesRegex(ValueError, "float32 do not fit .* bfloat16"):
      lib.write_rows(
          jnp.zeros((1, 2, 1, 2), jnp.bfloat16),
          jnp.zeros((1, 1, 1, 2), jnp.float32),
          0,
      )


class ProjectionTest(parameterized.TestCase):

  @parameterized.parameters("float32", "bfloat16")
  def test_a_bias_joins_the_sum_before_its_one_rounding(self, dtype):
    kind = formats.of(dtype).numpy
    rng = np.random.default_rng(0)
    x, weight, bias = (
        rng.standard_normal(shape).astype(np.float32).astype(kind)
        for shape in ((2, 3, 12), (5, 12), (5,))
    )
    layer = lib.Projection(
        jnp.asarray(weight), jnp.asarray(bias), "projection", _OPS
    )
    bits.assert_same_bits(
        layer(jnp.asarray(x)),
        portable_oracle.PortableOracle().matmul(x, weight.T, dtype, bias=bias),
    )


class AttentionTest(parameterized.TestCase):

  def _run(self, params, x, visible, config, keys=None, values=None, start=0):
    rng = np.random.default_rng(1)
    batch, capacity = x.shape[0], visible.shape[-1]
    kind = formats.of(config.dtype).numpy
    angle = rng.uniform(-3, 3, (batch, capacity, 4))
    angle = np.concatenate([angle, angle], -1)[:, start : start + x.shape[1]]
    cos, sin = np.cos(angle).astype(kind), np.sin(angle).astype(kind)
    bias = np.where(visible, 0, ml_dtypes.finfo(kind).min).astype(kind)
    zeros = jnp.zeros((batch, capacity, 2, 8), kind)
    module = lib.Attention(params, config, _OPS)
    out = module(
        jnp.asarray(x),
        jnp.asarray(cos),
        jnp.asarray(sin),
        zeros if keys is None else keys,
        zeros if values is None else values,
        start,
        jnp.asarray(bias),
    )
    return out, (cos, sin)

  @parameterized.parameters(False, True)
  def test_is_close_to_float64_head_by_head(self, bias):
    params = _params(bias=bias)
    x = np.random.default_rng(2).standard_normal((2, 5, 12)).astype(np.float32)
    visible = np.tile(np.tri(5, dtype=bool), (2, 1, 1))
    visible[1] &= np.arange(5) > np.arange(5)[:, None] - 2
    (out, _, _), (cos, sin) = self._run(params, x, visible, _config())
    expected = _in_float64(
        params, *(v.astype(np.float64) for v in (x, cos, sin)), visible
    )
    # About twenty float32 roundings deep, sums of up to 32 terms.
    scale = np.abs(expected).max()
    np.testing.assert_allclose(out, expected, rtol=0, atol=scale * 2.0**-19)

  def test_the_state_holds_keys_and_values_of_each_step(self):
    params, config = _params("bfloat16"), _config("bfloat16")
    rng = np.random.default_rng(2)
    x = rng.standard_normal((1, 6, 12)).astype(ml_dtypes.bfloat16)
    visible = np.tri(6, dtype=bool)[None]
    (whole, keys, values), _ = self._run(params, x, visible, config)
    (first, k, v), _ = self._run(params, x[:, :3], visible[:, :3], config)
    self.assertFalse(np.asarray(k)[:, 3:].any())
    (last, k, v), _ = self._run(
        params, x[:, 3:], visible[:, 3:], config, k, v, start=3
    )
    bits.assert_same_bits(np.concatenate([first, last], 1), whole)
    bits.assert_same_bits(k, keys)
    bits.assert_same_bits(v, values)
    oracle = portable_oracle.PortableOracle()
    expected = oracle.matmul(x, np.asarray(params["v_proj"]).T, "bfloat16")
    bits.assert_same_bits(values, expected.reshape(1, 6, 2, 8))

  def test_c23_a_key_outside_the_window_changes_no_bit(self):
    params, config = _params("bfloat16"), _config("bfloat16")
    rng = np.random.default_rng(2)
    x = rng.standard_normal((1, 6, 12)).astype(ml_dtypes.bfloat16)
    valid = jnp.ones((1, 6), bool)
    visible = np.asarray(
        lib.visibility_bias(valid, 0, 6, 4, "bfloat16")
    ) == 0
    other = x.copy()
    other[0, 1] = -x[0, 1]  # Query 4 sees keys 1 to 4, query 5 keys 2 to 5.
    (left, _, _), _ = self._run(params, x, visible, config)
    (right, _, _), _ = self._run(params, other, visible, config)
    left, right = np.asarray(left), np.asarray(right)
    bits.assert_same_bits(left[0, 5], right[0, 5])
    self.assertTrue((left[0, 4] != right[0, 4]).any())


if __name__ == "__main__":
  absltest.main()
