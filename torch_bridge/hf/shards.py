"""Writing named arrays as safetensors: one file, or numbered shards.

Arrays are taken one at a time, so memory holds one shard and not the model.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Iterable
import os
import pathlib

import numpy as np
import safetensors.numpy

from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf import json_file

MAX_BYTES = 4 << 30


def write(
    folder: pathlib.Path,
    tensors: Iterable[tuple[str, np.ndarray]],
    max_bytes: int = MAX_BYTES,
) -> None:
  """Writes model.safetensors, or numbered shards and their index.

  Args:
    folder: An existing one.
    tensors: (name, array) pairs.
    max_bytes: A file ends before the tensor that would carry it over.
  """
  shards, held, size = [], {}, 0
  for name, array in tensors:
    if held and size + array.nbytes > max_bytes:
      shards.append(_write_one(folder, len(shards), held))
      held, size = {}, 0
    held[name] = np.ascontiguousarray(array)
    size += array.nbytes
  shards.append(_write_one(folder, len(shards), held))
  if len(shards) == 1:
    os.rename(folder / shards[0][0], folder / checkpoint_lib.SINGLE)
    return
  weight_map, total = {}, 0
  for number, (path, names, nbytes) in enumerate(shards, 1):
    final = f"model-{number:05}-of-{len(shards):05}.safetensors"
    os.rename(folder / path, folder / final)
    weight_map |= dict.fromkeys(names, final)
    total += nbytes
  json_file.write(
      folder / checkpoint_lib.INDEX,
      {"metadata": {"total_size": total}, "weight_map": weight_map},
  )


def _write_one(folder, number: int, held: dict) -> tuple[str, list, int]:
  path = f"shard-{number}"
  # Not save_file, which makes the file private to its owner.
  (folder / path).write_bytes(
      safetensors.numpy.save(held, metadata={"format": "pt"})
  )
  return path, list(held), sum(a.nbytes for a in held.values())
