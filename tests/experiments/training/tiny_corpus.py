"""A corpus folder of a few thousand tokens, from the shipped text."""

import hashlib
import io
import json
import pathlib

import numpy as np
import tokenizers

from experiments.tiny import qwen3_moe
from experiments.tiny import tokenizer


def make(folder: pathlib.Path) -> pathlib.Path:
  """Writes a corpus of schema corpus/1; the last 700 tokens validate."""
  text = qwen3_moe.CORPUS.read_text("utf-8")
  trained = tokenizer.train(text)
  ids = tokenizers.Tokenizer.from_str(trained).encode(text).ids
  ids = np.array([0, *ids, 0], np.uint16)
  files = {
      "tokenizer.json": trained.encode(),
      "LICENSES.md": b"The text ships with the project.\n",
      "train.tokens.npy": _npy(ids[:-700]),
      "validation.tokens.npy": _npy(ids[-700:]),
  }
  description = {
      "schema": "corpus/1",
      "request": {"vocab_size": tokenizer.VOCAB_SIZE},
      "files": {
          name: {"sha256": hashlib.sha256(data).hexdigest()}
          for name, data in files.items()
      },
      "documents": [
          {"part": "validation", "language": "en", "start": 1, "stop": 300},
          {"part": "validation", "language": "zh", "start": 300, "stop": 700},
      ],
      "baselines": {
          "validation": {
              "en": {"unigram": 6.0, "bigram": 5.0},
              "zh": {"unigram": 6.5, "bigram": 5.5},
          }
      },
  }
  files["corpus.json"] = json.dumps(description).encode()
  folder.mkdir(parents=True)
  for name, data in files.items():
    (folder / name).write_bytes(data)
  return folder


def _npy(tokens) -> bytes:
  buffer = io.BytesIO()
  np.save(buffer, tokens)
  return buffer.getvalue()
