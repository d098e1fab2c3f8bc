"""A packed folder as one of wide weights, for those who cannot read words.

transformers needs kernels of another package for AWQ. So that an unmodified
model can be the reference of a packed checkpoint, its words are made wide here
and written as an ordinary folder: w = R((code - zero) * R(scale)), one rounding
a weight, by the NumPy oracle. All other tensors keep their bits.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import pathlib
import tempfile

import numpy as np

from moejax.numerics import fingerprint
from moejax.numerics.packed import awq_format
from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf import hf_config
from torch_bridge.hf import json_file
from torch_bridge.hf import shards
from torch_bridge.hf.awq import config as awq_config
from torch_bridge.hf.awq import layout


@dataclasses.dataclass(frozen=True, slots=True)
class Wide:
  """A folder of wide weights and what it was made from.

  Attributes:
    folder: config.json and safetensors; no tokenizer.
    dtype: Of the wide weights.
    modules: How many were packed.
    packed_words: Digest of their words, zero points and scales.
    wide_weights: Digest of their weights, read back from the folder.
  """

  folder: pathlib.Path
  dtype: str
  modules: int
  packed_words: str
  wide_weights: str

  def describe(self) -> dict:
    """Says which weights these are, as JSON values."""
    return {
        "weights": (
            "not the checkpoint's words: they were made wide,"
            f" w = R_{self.dtype}((code - zero) * R_{self.dtype}(scale)), and"
            " written as an ordinary folder"
        ),
        "widened_modules": self.modules,
        "packed_words_digest": self.packed_words,
        "wide_weights_digest": self.wide_weights,
    }


@contextlib.contextmanager
def folder(source: str | pathlib.Path) -> Iterator[Wide]:
  """Gives a temporary folder with the wide weights of a packed one.

  Args:
    source: A folder that `loader.load` has accepted.

  Raises:
    refusal.HarnessError: a file of it is missing or damaged.
  """
  source = pathlib.Path(source)
  checkpoint = checkpoint_lib.Checkpoint(source)
  config, awq = awq_config.read(source)
  names = checkpoint.names()
  modules = [
      name.removesuffix(".qweight")
      for name in names
      if name.endswith(".qweight")
  ]
  words = [f"{m}.{leaf}" for m in modules for leaf in layout.LEAVES]

  def weight(module: str) -> np.ndarray:
    triple = (checkpoint.array(f"{module}.{leaf}") for leaf in layout.LEAVES)
    operand = awq_format.from_checkpoint(*triple, awq.group_size, module)
    return np.ascontiguousarray(awq_format.dequantize(operand, config.dtype).T)

  def tensors() -> Iterator[tuple[str, np.ndarray]]:
    for module in modules:
      yield f"{module}.weight", weight(module)
    for name in sorted(set(names) - set(words)):
      yield name, checkpoint.array(name)

  with tempfile.TemporaryDirectory(prefix="wide_weights.") as scratch:
    made = pathlib.Path(scratch)
    shards.write(made, tensors())
    fields = json_file.read_object(source / hf_config.FILE)
    del fields[awq_config.FIELD]
    json_file.write(made / hf_config.FILE, fields)
    written = checkpoint_lib.Checkpoint(made)
    yield Wide(
        made,
        config.dtype,
        len(modules),
        fingerprint.checkpoint_digest((n, checkpoint.array(n)) for n in words),
        fingerprint.checkpoint_digest(
            (name, written.array(name))
            for name in (f"{m}.weight" for m in modules)
        ),
    )
