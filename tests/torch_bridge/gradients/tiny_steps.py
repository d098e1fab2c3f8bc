"""Training steps of a tiny Qwen3-MoE model on both sides, for tests."""

import functools
import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np
import torch

from moejax.contracts.gradients import optimizer
from moejax.numerics.portable import differentiable_ops
from tests.torch_bridge.hf import tiny_models
from torch_bridge.architectures import ours
from torch_bridge.gradients import comparison
from torch_bridge.hf import checkpoint
from torch_bridge.hf import hf_config
from torch_bridge.hf import parameter_map
from torch_bridge import subject as subject_lib

# The last token of a sequence has no gradient; before it, token 9 three times:
# the order of additions to one row of the embedding shows.
TOKENS = np.array([[9, 9, 3], [9, 1, 7]])
# Equal widths where the model allows them: every shape compiles anew.
_SIZES = dict(
    num_experts_per_tok=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=16,
    moe_intermediate_size=8,
)


@functools.cache
def subject(dtype: str, **changes) -> subject_lib.Subject:
  """Three layers, the middle one dense; all weights random."""
  folder = pathlib.Path(tempfile.mkdtemp())
  made = tiny_models.model(
      dtype=getattr(torch, dtype), **{**_SIZES, **changes}
  )
  tiny_models.save(made, folder)
  config = hf_config.read(folder)
  params = parameter_map.load_parameters(
      checkpoint.Checkpoint(folder), config
  )
  return subject_lib.Subject(
      folder,
      ours.of(folder),
      config,
      {path: jnp.asarray(array) for path, array in params.items()},
      None,
      "",
  )


def compare(
    dtype: str,
    implementation: str = "eager",
    seed: float = 1.0,
    kind: str = "sgd",
    operations=differentiable_ops.DifferentiableOperations,
    tokens: np.ndarray = TOKENS,
    **changes,
) -> dict:
  """Returns the document of a comparison."""
  model = subject(dtype, **changes)
  request = comparison.Request(
      checkpoint=str(model.folder),
      prompts="",
      experts_implementation=implementation,
      step=optimizer.FirstStep(kind),
      seed=seed,
  )
  return comparison.run_tokens(request, model, tokens, operations)
