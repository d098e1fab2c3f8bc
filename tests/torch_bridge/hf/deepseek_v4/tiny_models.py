"""Small DeepSeek-V4 models of transformers, and folders of them.

All layer kinds, both routes. Every parameter and buffer gets random values:
transformers starts hash tables, sinks and biases at zero, and then a loader
that swaps two of them goes unnoticed.
"""

import pathlib
import tempfile

from absl.testing import parameterized
import numpy as np
import safetensors.numpy
import torch
import transformers

from moejax.contracts import refusal
from torch_bridge.hf import checkpoint
from torch_bridge.hf.deepseek_v4 import names
from torch_bridge.hf.deepseek_v4 import parameter_map
from torch_bridge import tensor_bits

transformers.utils.logging.disable_progress_bar()

FIELDS = {
    "vocab_size": 256,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "num_experts_per_tok": 6,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "compress_ratios": [0, 4, 128, 4, 0],
    "compress_rate_hca": 8,
    "num_hash_layers": 2,
    "sliding_window": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "max_position_embeddings": 1024,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def config() -> transformers.DeepseekV4Config:
  """Window 8, compression rates 4 and 8, four entries seen by an indexer."""
  # transformers writes into the nested mapping that it is given.
  scaling = dict(FIELDS["rope_scaling"])
  return transformers.DeepseekV4Config(**{**FIELDS, "rope_scaling": scaling})


def model(seed: int = 0) -> transformers.DeepseekV4ForCausalLM:
  """Returns a float32 model whose parameters and buffers are all random."""
  made = transformers.DeepseekV4ForCausalLM(config()).eval()
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, tensor in made.state_dict().items():
      if name.endswith("tid2eid"):
        orders = torch.rand(tensor.shape[0], 16, generator=generator)
        tensor.copy_(orders.argsort(dim=1)[:, : tensor.shape[1]])
      else:
        values = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(values * 0.3 + 0.05)
  return made


def state(made: transformers.DeepseekV4ForCausalLM) -> dict[str, np.ndarray]:
  """Returns {name in memory: array} of a model, bit for bit."""
  return {
      name: tensor_bits.to_numpy(tensor)
      for name, tensor in made.state_dict().items()
  }


def upstream(made_state, shape) -> dict[str, np.ndarray]:
  """Returns a model's tensors under upstream names."""
  out = {}
  rows = zip(
      names.table(shape, names.MEMORY),
      names.table(shape, names.UPSTREAM),
      strict=True,
  )
  for memory, row in rows:
    array = made_state[memory.names[0]]
    pieces = array.reshape(len(row.names), *row.source_shape)
    out |= zip(row.names, pieces, strict=True)
  return out


class FolderTestCase(parameterized.TestCase):
  """Each test has a folder of its own."""

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory())
    )

  def write(self, tensors):
    """Replaces the folder's weights by {name: array}."""
    for path in self.folder.glob("model*"):  # And the index of shards.
      path.unlink()
    tensors = {k: np.ascontiguousarray(v) for k, v in tensors.items()}
    safetensors.numpy.save_file(
        tensors, self.folder / checkpoint.SINGLE, metadata={"format": "pt"}
    )

  def tensors(self):
    """Returns {name: array} of the folder."""
    return dict(checkpoint.Checkpoint(self.folder).items())

  def assert_refused(self, *patterns, **options):
    """Fails unless loading is refused with the folder and all patterns."""
    with self.assertRaises(refusal.HarnessError) as caught:
      parameter_map.load(self.folder, **options)
    self.assertIn(str(self.folder), str(caught.exception))
    for pattern in patterns:
      self.assertRegex(str(caught.exception), pattern)
