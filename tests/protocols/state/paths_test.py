"""The live state does not depend on how a text is cut into forward passes."""

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.contracts import deepseek_v4 as contract_lib
from moejax.contracts import named_combines
from moejax.contracts import refusal
from moejax.modules import decoder as nest_lib
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import decoder as decoder_lib
from moejax.modules.deepseek_v4 import parameters as parameters_lib
from moejax.numerics import reference_ops
from moejax.protocols.state import difference
from moejax.protocols.state import layout
from moejax.protocols.state import paths
from moejax.protocols.state import persistent_state
from tests.protocols.state import sample

_CHUNKS = (3, 5, 1, 7, 2, 16, 11)
_TOKENS = np.random.default_rng(5).integers(0, 16, sum(_CHUNKS)).tolist()
_CONFIG = sample.tiny(attentions=("swa", "csa", "hca"))


def _parameters():
  rng = np.random.default_rng(11)
  return {
      path: jnp.asarray(
          rng.random((shape[0], 4)).argsort(-1)[:, :2].astype(np.int32)
          if path.endswith("table")
          else rng.standard_normal(shape).astype(dtype)
      )
      for path, (shape, dtype) in parameters_lib.leaves(_CONFIG).items()
  }


def _decoder(parameters):
  contract = contract_lib.of(
      "portable",
      config_lib.router_contract(_CONFIG),
      named_combines.at_dtype(
          named_combines.named("transformers_grouped_mm"), "float32"
      ),
  )
  return decoder_lib.Decoder(
      _CONFIG,
      nest_lib.nest(parameters),
      contract,
      reference_ops.operations(contract),
  )


class PathsTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_at_once_in_chunks_and_one_by_one(self):
    parameters = _parameters()
    decoder = _decoder(parameters)
    whole = paths.feed(decoder, _TOKENS, [len(_TOKENS)], parameters)
    for chunks in (_CHUNKS, [1] * len(_TOKENS)):
      # One width is compiled once, whatever the chunks.
      other = paths.feed(decoder, _TOKENS, chunks, parameters, width=16)
      self.assertIsNone(difference.same_live(other, whole))
      # Our buffers hold the same even where nothing reads them again.
      self.assertEmpty(list(difference.rows(other, whole)))
    values = persistent_state.narrow(whole, layout.LIVE).arrays
    self.assertGreater(sum(np.count_nonzero(a) for a in values.values()), 300)
    # The comparison can fail: another last token is seen.
    changed = [*_TOKENS[:-1], (_TOKENS[-1] + 1) % 16]
    other = paths.feed(decoder, changed, _CHUNKS, parameters, width=16)
    other = persistent_state.PersistentState(
        other.config, whole.identity, other.arrays
    )
    self.assertEqual(difference.same_live(other, whole).position, 44)

  @parameterized.parameters(
      ([3, 4], None, "no way to feed 45"),
      ([45, 0], None, "no way to feed 45"),
      ([], None, "no way to feed 45"),
      ([40, 5], 16, "a chunk of 40 tokens does not fit 16"),
  )
  def test_other_chunks_are_refused(self, chunks, width, message):
    with self.assertRaisesRegex(refusal.HarnessError, message):
      paths.feed(None, _TOKENS, chunks, {}, width)


if __name__ == "__main__":
  absltest.main()
