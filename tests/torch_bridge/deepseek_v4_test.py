"""Our DeepSeek-V4 decoder against unmodified transformers, tap by tap.

In portable arithmetic every operation of both sides has one right answer, so
all of them are compared by their bits.

Needs no accelerator.
"""

import pathlib
import tempfile

from absl.testing import absltest
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from moejax.contracts import deepseek_v4 as contract_lib
from moejax.contracts import named_combines
from moejax.contracts import refusal
from moejax.modules import decoder as nest_lib
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import decoder as decoder_lib
from moejax.numerics import reference_ops
from moejax.protocols import compare
from moejax.protocols import native_rules
from moejax.protocols import selections
from moejax.protocols import taps
from moejax.protocols import trajectory
from tests.torch_bridge import tiny_deepseek_v4
from torch_bridge.hf.deepseek_v4 import parameter_map
from torch_bridge import torch_reference

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def _prompts(config, lengths) -> list[trajectory.Prompt]:
  """Without, with one and with several entries of every kind of layer."""
  rng = np.random.default_rng(3)
  return [
      trajectory.Prompt(
          f"{n} tokens", tuple(rng.integers(2, config.vocab_size, n).tolist())
      )
      for n in lengths
  ]


def _choices(name: str) -> bool:
  """Selections and what decides them."""
  return (
      selections.is_selection(name)
      or ".router." in name
      or taps.split(name)[1] in selections.INDEXER
  )


def _decoder(folder, arithmetic, implementation, dtype):
  """Our decoder of a folder, with weights through our loader."""
  config, params = parameter_map.load(folder)
  params = {path: jnp.asarray(array) for path, array in params.items()}
  combine = named_combines.at_dtype(
      named_combines.named(f"transformers_{implementation}"), dtype
  )
  contract = contract_lib.of(
      arithmetic, config_lib.router_contract(config), combine
  )
  return decoder_lib.Decoder(
      config,
      nest_lib.nest(params),
      contract,
      reference_ops.operations(contract),
  )


class DeepseekV4Test(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  # Each compiles some hundred programs, which is most of its time. The faults
  # test has bfloat16 with grouped_mm, the main job float32 with it.
  @pytest.mark.slow
  def test_every_tap_has_the_reference_s_bits_in_bfloat16(self):
    self._every_tap("bfloat16", "eager")

  def test_every_tap_has_the_reference_s_bits_in_float32(self):
    self._every_tap("float32", "eager")

  def _every_tap(self, dtype, implementation):
    tiny_deepseek_v4.save(self.folder, _DTYPES[dtype])
    reference = torch_reference.TransformersReference(
        self.folder, implementation
    )
    decoder = _decoder(self.folder, "portable", implementation, dtype)
    prompts = _prompts(decoder.config, (3, 9, 21))
    if (dtype, transformers.__version__) == ("bfloat16", "5.17.0"):
      # That release multiplies a float32 norm into a bfloat16 projection.
      with self.assertRaisesRegex(refusal.UnsupportedError, "5.17.0"):
        reference.run(prompts, 0)
      return
    theirs = reference.run(prompts, 4, arithmetic="portable")
    # One left-padded batch against each prompt on its own.
    ours = trajectory.run(decoder, prompts, 4)
    found = compare.compare(ours, theirs)
    self.assertIsNone(found.first)
    self.assertEqual(found.missing, [])
    self.assertTrue(found.tokens_equal)
    self.assertTrue(found.states_equal)
    self.assertEqual(set(found.levels().values()), {"same_bits"})
    self.assertGreater(sum(c.elements for c in found.counts.values()), 1e6)

  @pytest.mark.slow
  def test_native_float32_logits_agree_along_the_reference_s_choices(self):
    tiny_deepseek_v4.save(self.folder, torch.float32)
    reference = torch_reference.TransformersReference(self.folder, "eager")
    decoder = _decoder(self.folder, "native", "eager", "float32")
    prompts = _prompts(decoder.config, (3, 4, 7, 8, 9, 16, 45))
    theirs = reference.run(prompts, 4, wanted=_choices)
    ours = trajectory.run(
        decoder,
        prompts,
        4,
        wanted=_choices,
        given=theirs,
        given_taps=selections.is_selection,
    )
    gaps = [
        native_rules.largest_gap(x, y)
        for name, *_, x, y in native_rules.pairs(ours, theirs)
        if name == "logits"
    ]
    # The bound is that of the model's specification; 6.6e-6 was measured.
    self.assertLessEqual(max(gaps), 2e-5)
    self.assertLen(gaps, 35)
    # An indexer adds products with relu, so entries may all score exactly
    # zero. Which of equal entries a query sees, torch.topk leaves open: without
    # the reference's choices, logits differ in the first digit.
    found = native_rules.exchanges(ours, theirs, {})
    self.assertNotEmpty(found)
    self.assertEqual({e.tap for e in found}, {taps.VISIBLE})
    self.assertEqual({e.margin for e in found}, {0.0})


if __name__ == "__main__":
  absltest.main()
