"""Our DeepSeek-V4 decoder against unmodified transformers, tap by tap.

In portable arithmetic every operation of both sides has one right answer, so
all of them are compared by their bits.

Needs no accelerator.
"""

import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
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
from moejax.numerics import reference_ops
from moejax.protocols import compare
from moejax.protocols import trajectory
from tests.torch_bridge import tiny_deepseek_v4
from torch_bridge.hf.deepseek_v4 import parameter_map
from torch_bridge import torch_reference

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def _prompts(config) -> list[trajectory.Prompt]:
  """Without, with one and with several entries of every kind of layer."""
  rng = np.random.default_rng(3)
  return [
      trajectory.Prompt(
          f"{n} tokens", tuple(rng.integers(2, config.vocab_size, n).tolist())
      )
      for n in (3, 9, 21)
  ]


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
    prompts = _prompts(config)
    if (dtype, transformers.__version__) == ("bfloat16", "5.17.0"):
      # That release multiplies a float32 norm into a bfloat16 projection.
      with self.assertRaisesRegex(refusal.UnsupportedError, "5.17.0"):
        reference.run(prompts, 0)
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


if __name__ == "__main__":
  absltest.main()
