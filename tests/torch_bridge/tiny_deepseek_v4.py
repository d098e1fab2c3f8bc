"""A small DeepSeek-V4 model of transformers with all kinds of layers.

transformers starts hash tables, biases and sinks at zero and scales at one;
then a graph that leaves one of them out goes unnoticed. So all get values.
"""

import pathlib

import torch
import transformers

from tests.torch_bridge.hf.deepseek_v4 import tiny_models

transformers.utils.logging.disable_progress_bar()

def save(folder: pathlib.Path, dtype: torch.dtype) -> pathlib.Path:
  """Has transformers write a model whose values are all random."""
  torch.manual_seed(0)
  config = tiny_models.config()
  model = transformers.DeepseekV4ForCausalLM(config)
  normal = torch.randn
  with torch.no_grad():
    for name, values in [*model.named_parameters(), *model.named_buffers()]:
      if name.endswith("inv_freq"):
        continue
      if name.endswith("tid2eid"):
        values.copy_(torch.stack([torch.randperm(16)[:6] for _ in values]))
      elif name.endswith("e_score_correction_bias"):
        values.copy_(0.1 * normal(values.shape))
      elif name.endswith(("sinks", "position_bias", "base")):
        values.copy_(0.5 * normal(values.shape))
      elif "norm" in name:
        values.copy_(1 + 0.1 * normal(values.shape))
      elif name.endswith("scale"):
        values.copy_(1 + 0.2 * normal(values.shape))
      else:
        values.mul_(5)
  model.save_pretrained(folder)
  if dtype != torch.float32:
    # As transformers loads it: some parts stay in float32.
    transformers.DeepseekV4ForCausalLM.from_pretrained(
        folder, dtype=dtype
    ).save_pretrained(folder)
  return folder
