"""A folder in Hugging Face form, made whole or not at all.

Some files of a shipped checkpoint are written by hand and copied; the others
are generated from a config, tensors and the text of the tokenizer.

Layer: experiments.
"""

from collections.abc import Mapping, Sequence
import hashlib
import json
import pathlib
from typing import Any

import numpy as np
import safetensors.numpy

from experiments.support import whole_folder
from experiments.tiny import tokenizer

GENERATED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
# They decide what the model says.
_DECISIVE = ("model.safetensors", "tokenizer.json", "config.json")
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def make(
    out: pathlib.Path,
    sources: Sequence[pathlib.Path],
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    corpus: pathlib.Path,
) -> dict[str, object]:
  """Makes the checkpoint folder, whole or not at all.

  An older checkpoint is replaced, see `replace`.

  Args:
    out: The folder to make. It may be absent, empty, or an earlier result.
    sources: The hand-written files, copied under their names.
    config: What config.json says; max_position_embeddings and the ids of the
      special tokens are among it.
    tensors: {name: tensor} of model.safetensors.
    corpus: The text that the tokenizer is trained on.

  Returns:
    The summary, schema "make_checkpoint/1": the folder, the number of
    parameters (tables of integers are none) and the SHA-256 of the files that
    decide what the model says.

  Raises:
    ValueError: If the folder holds anything that this function did not write.
  """
  out = out.resolve()
  _check_replaceable(out, sources)
  content = {source.name: source.read_bytes() for source in sources}
  content |= _generated(config, tensors, corpus)
  whole_folder.replace(out, content)
  digests = {
      name: hashlib.sha256(content[name]).hexdigest() for name in _DECISIVE
  }
  return {
      "schema": "make_checkpoint/1",
      "out": str(out),
      "num_parameters": sum(
          t.size for t in tensors.values() if t.dtype.kind not in "iu"
      ),
      "sha256": digests,
  }


def _check_replaceable(
    out: pathlib.Path, sources: Sequence[pathlib.Path]
) -> None:
  """Raises ValueError unless the folder may be replaced.

  The names alone do not tell, since every checkpoint has a config.json. The
  hand-written files do: a folder is an earlier result only if it carries them
  unchanged.
  """
  if not out.exists():
    return
  if not out.is_dir():
    raise ValueError(f"{out} exists and is not a folder")
  entries = sorted(out.iterdir())
  known = {*(source.name for source in sources), *GENERATED}
  foreign = [
      e.name
      for e in entries
      if e.name not in known or e.is_symlink() or not e.is_file()
  ]
  if entries:
    foreign += [
        source.name
        for source in sources
        if source.name not in foreign
        and not _same_content(out / source.name, source)
    ]
  if foreign:
    raise ValueError(
        f"{out} holds files of another origin, or lacks files that an earlier "
        f"result would hold: {foreign}"
    )


def _same_content(left: pathlib.Path, right: pathlib.Path) -> bool:
  """Returns whether both are files with the same bytes."""
  if not left.is_file() or not right.is_file():
    return False
  return left.read_bytes() == right.read_bytes()


def _generated(config, tensors, corpus: pathlib.Path) -> dict[str, bytes]:
  """Returns {name: content} of the files named in `GENERATED`."""
  text = corpus.read_bytes().decode("utf-8")
  return {
      "config.json": _json(config),
      "generation_config.json": _json(
          {"do_sample": False, **{name: config[name] for name in _SPECIAL}}
      ),
      # save_file would do, but it makes the file private to its owner.
      "model.safetensors": safetensors.numpy.save(
          dict(tensors), metadata={"format": "pt"}
      ),
      "tokenizer.json": tokenizer.train(text).encode(),
      "tokenizer_config.json": _json(
          tokenizer.tokenizer_config(config["max_position_embeddings"])
      ),
  }


def _json(document: Mapping[str, Any]) -> bytes:
  text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
  return text.encode()
