"""Trained weights as a Hugging Face folder, made whole or not at all.

Each leaf is written in the dtype in which the decoder computes with it, so the
folder holds what was evaluated: matrices in bfloat16; norms, hyper-connections,
sinks and biases of DeepSeek-V4 in float32, where transformers keeps them too.
Tensors are cut into files of at most `SHARD_BYTES`.

Layer: experiments.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import hashlib
import json
import pathlib
from typing import Any

import numpy as np
import safetensors.numpy

from experiments.support import whole_folder
from experiments.tiny import tokenizer
from moejax.contracts import refusal
from moejax.training import models
from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf.deepseek_v4 import config as deepseek_v4_config
from torch_bridge.hf.deepseek_v4 import names as deepseek_v4_names
from torch_bridge.hf import hf_config
from torch_bridge.hf import parameter_map

SHARD_BYTES = 6_000_000


def check_free(out: pathlib.Path) -> None:
  """Refuses a folder that holds something.

  Raises:
    refusal.HarnessError: it does.
  """
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise refusal.HarnessError(
        f"{out} holds something already; a model is exported into a new folder."
    )


def weights(model: models.Model, params: models.Arrays) -> models.Arrays:
  """{path: leaf} in the decoder's dtypes, as NumPy arrays."""
  return {
      path: np.asarray(params[path].astype(dtype))
      for path, (_, dtype) in model.leaves().items()
  }


def model_files(
    model: models.Model, params: Mapping[str, np.ndarray]
) -> dict[str, bytes]:
  """Returns {name: bytes} of the shards and their index."""
  shards: list[dict[str, np.ndarray]] = [{}]
  size = total = 0
  for name, tensor in _tensors(model, params):
    if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
      shards.append({})
      size = 0
    shards[-1][name] = tensor
    size += tensor.nbytes
    total += tensor.nbytes
  files, where = {}, {}
  for index, shard in enumerate(shards):
    file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
    files[file] = safetensors.numpy.save(shard, metadata={"format": "pt"})
    where |= dict.fromkeys(shard, file)
  index = {"metadata": {"total_size": total}, "weight_map": where}
  return {**files, checkpoint_lib.INDEX: to_json(index)}


def tokenizer_files(
    folder: pathlib.Path, max_positions: int
) -> tuple[dict[str, bytes], dict[str, int]]:
  """Returns ({name: bytes}, {field of config.json: id of a special token}).

  Raises:
    refusal.HarnessError: the tokenizer lacks the token that ends a text.
  """
  content = (folder / "tokenizer.json").read_bytes()
  ids = {t["content"]: t["id"] for t in json.loads(content)["added_tokens"]}
  if tokenizer.END_OF_TEXT not in ids:
    raise refusal.HarnessError(
        f"{folder}: the tokenizer has no {tokenizer.END_OF_TEXT}."
    )
  described = tokenizer.tokenizer_config(max_positions)
  special = {
      "bos_token_id": ids[tokenizer.END_OF_TEXT],
      "eos_token_id": ids[tokenizer.END_OF_TEXT],
  }
  if tokenizer.PAD in ids:
    special["pad_token_id"] = ids[tokenizer.PAD]
  else:
    described["pad_token"] = None
  return {
      "tokenizer.json": content,
      "tokenizer_config.json": to_json(described),
  }, special


def config_files(
    model: models.Model, special: Mapping[str, int]
) -> dict[str, bytes]:
  """Returns {name: bytes} of config.json and generation_config.json."""
  if isinstance(model, models.DeepseekV4):
    config = deepseek_v4_config.to_hf(model.config)
  else:
    config = hf_config.to_hf(model.config)
  return {
      "config.json": to_json({**config, **special}),
      "generation_config.json": to_json({"do_sample": False, **special}),
  }


def write(out: pathlib.Path, content: Mapping[str, bytes]) -> dict[str, str]:
  """Writes a folder whole; returns {name: SHA-256}.

  Raises:
    refusal.HarnessError: the folder holds something, or cannot be written.
  """
  check_free(out)
  try:
    whole_folder.replace(out, content)
  except OSError as error:
    raise refusal.HarnessError(f"{out} cannot be written: {error}") from error
  return digests(content)


def digests(content: Mapping[str, bytes]) -> dict[str, str]:
  """{name: SHA-256} of files."""
  return {
      name: hashlib.sha256(data).hexdigest()
      for name, data in sorted(content.items())
  }


def to_json(document: Any) -> bytes:
  """Canonical enough for people: indented, one newline at the end."""
  return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _tensors(model, params) -> Iterator[tuple[str, np.ndarray]]:
  if isinstance(model, models.Qwen3Moe):
    yield from parameter_map.to_hf(params, model.config)
    return
  # Transformers reads tables as int64 and one matrix an expert.
  table = deepseek_v4_names.table(model.config, deepseek_v4_names.UPSTREAM)
  for row in table:
    array = params[row.path]
    if row.dtype == "int32":
      array = array.astype(np.int64)
    yield from parameter_map.pieces(row, array)
