"""Validation losses and generated text, by a model whose answers are known."""

import types

from absl.testing import absltest
import jax.numpy as jnp
import numpy as np

from experiments.training import evaluation as lib
from moejax.training import models
from tests import bits
from tests.training import tiny


class _Bigram:
  """Predicts a token from the one before it; routes token t to t mod 4."""

  config = types.SimpleNamespace(num_experts=4)

  def __init__(self, table):
    self._table = jnp.asarray(table)

  def state(self, batch, length):
    return jnp.zeros((batch, length), jnp.float32)

  def apply(self, params, tokens, state):
    assert state.shape == tokens.shape
    ids = (tokens.reshape(-1, 1) % 4).astype(jnp.int32)
    return models.Outputs(self._table[tokens] * params, {}, {2: ids})


class EvaluationTest(absltest.TestCase):

  def test_every_token_but_the_first_is_predicted_once(self):
    table = np.random.default_rng(0).standard_normal((32, 32)).astype("float32")
    one = jnp.ones((), jnp.float32)
    for count in (11, 30, 41, 47):  # One window; whole ones; a rest.
      tokens = tiny.tokens(count)
      nats, routes = lib.token_nats(_Bigram(table), one, tokens, 10, 3)
      rows = table.astype(np.float64)[tokens[:-1]]
      expected = np.log(np.exp(rows).sum(-1)) - rows[
          np.arange(count - 1), tokens[1:]
      ]
      np.testing.assert_allclose(nats, expected, rtol=1e-5)
      bits.assert_same_bits(
          routes[2], np.bincount(tokens[:-1] % 4, minlength=4)
      )
    with self.assertRaisesRegex(ValueError, "no window of 10"):
      lib.token_nats(_Bigram(table), one, tiny.tokens(10), 10, 3)

  def test_a_part_is_the_mean_over_its_tokens(self):
    nats = np.arange(1, 10, dtype=np.float32)  # Of tokens 1 to 9.
    parts = {"en": [(1, 3), (9, 10)], "zh": [(3, 9)], "none": [(0, 1)]}
    self.assertEqual(lib.summary(nats, parts), {
        "all": {"nats": 5.0, "tokens": 9},
        "en": {"nats": 4.0, "tokens": 3},
        "zh": {"nats": 5.5, "tokens": 6},
    })

  def test_text_goes_on_from_prompts_of_any_length(self):
    table = np.zeros((32, 32), np.float32)
    table[np.arange(32), (5 * np.arange(32) + 1) % 32] = 1.0
    run = lambda t, seed: lib.generate(  # pylint: disable=g-long-lambda
        _Bigram(table), jnp.ones((), jnp.float32), [[1], [9, 9, 3]], 4, t, seed
    )
    self.assertEqual(
        run(0.0, 0), [[1, 6, 31, 28, 13], [9, 9, 3, 16, 17, 22, 15]]
    )
    warm = run(1.0, 0)
    self.assertEqual(run(1.0, 0), warm)
    self.assertNotEqual(run(1.0, 1), warm)
    self.assertEqual(run(0.001, 5), run(0.0, 0))


if __name__ == "__main__":
  absltest.main()
