"""Our DeepSeek-V4 decoder against unmodified transformers, tap by tap.

In portable arithmetic every operation of both sides has one right answer, so
all of them are compared by their bits.

Needs no accelerator.
"""

import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from moejax.contracts import deepseek_v4 as contract_lib
from moejax.contracts import named_combines
from moejax.contracts import refusal
from moejax.modules import decoder as nest_lib
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import decoder as decoder_lib
from moejax.modules.deepseek_v4 import state as state_lib
from moejax.numerics import reference_ops
from moejax.protocols import capture
from moejax.protocols import deepseek_v4_layout
from moejax.protocols import taps
from moejax.protocols import trajectory
from tests import bits
from tests.torch_bridge import tiny_deepseek_v4
from torch_bridge.hf.deepseek_v4 import parameter_map
from torch_bridge import torch_reference

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def _ours(decoder, feeds, capacity):
  """[{tap: value}] of one sequence, cut as a run that grows shows them."""
  state = state_lib.empty(decoder.config, 1, capacity)
  steps, seen = [], 0
  for tokens in feeds:
    recorder = capture.BatchRecorder(trajectory.keep_all)
    _, state = decoder(jnp.int32([tokens]), state, tap=recorder)
    step = {}
    for name, value in recorder.seen.items():
      value = np.asarray(jax.device_get(value))
      if {"token", "window"} & {*taps.axes(name)}:
        value = value if ".moe." in name else value[0]
        at = deepseek_v4_layout.region(
            name, decoder.config, len(tokens), 0, seen, capacity
        )
        value = value[at]
      if value.size:
        step[name] = value
    steps.append(step)
    seen += len(tokens)
  return steps, state


def _prompt(config) -> trajectory.Prompt:
  """Longer than two windows; it completes compressed entries of all kinds."""
  ids = np.random.default_rng(3).integers(2, config.vocab_size, 21)
  return trajectory.Prompt("p", tuple(ids.tolist()))


class DeepseekV4Test(parameterized.TestCase):

  # Each compiles some hundred programs, which is most of its time.
  @parameterized.parameters(
      ("bfloat16", "grouped_mm"), ("float32", "eager")
  )
  def test_every_tap_has_the_reference_s_bits(self, dtype, implementation):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    tiny_deepseek_v4.save(folder, _DTYPES[dtype])
    reference = torch_reference.TransformersReference(folder, implementation)
    config, params = parameter_map.load(folder)
    params = {path: jnp.asarray(array) for path, array in params.items()}
    prompt = _prompt(config)
    if (dtype, transformers.__version__) == ("bfloat16", "5.17.0"):
      # That release multiplies a float32 norm into a bfloat16 projection.
      with self.assertRaisesRegex(refusal.UnsupportedError, "5.17.0"):
        reference.run([prompt], 0)
      return
    combine = named_combines.at_dtype(
        named_combines.named(f"transformers_{implementation}"), dtype
    )
    contract = contract_lib.of(
        "portable", config_lib.router_contract(config), combine
    )
    decoder = decoder_lib.Decoder(
        config,
        nest_lib.nest(params),
        contract,
        reference_ops.operations(contract),
    )
    theirs = reference.run([prompt], 4, arithmetic="portable")[0]
    feeds = [s.tokens for s in theirs.steps]
    ours, _ = _ours(decoder, feeds, 48)
    for mine, step in zip(ours, theirs.steps, strict=True):
      self.assertEqual(set(mine), set(step.taps))
      for name, value in mine.items():
        try:
          bits.assert_same_bits(value, step.taps[name])
        except AssertionError as error:
          self.fail(f"first difference at {name}: {error}")


if __name__ == "__main__":
  absltest.main()
