"""The text that a model is trained on, as a folder of schema corpus/1.

Read here: corpus.json, tokenizer.json, LICENSES.md, and the training and the
validation part as train.tokens.npy and validation.tokens.npy, [token] uint16.

Layer: experiments.
"""

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import numpy as np

from moejax.contracts import refusal

DESCRIPTION = "corpus.json"
TOKENIZER = "tokenizer.json"
LICENCES = "LICENSES.md"
_SCHEMA = "corpus/1"


@dataclasses.dataclass(frozen=True, slots=True)
class Corpus:
  """A folder that was read and checked.

  Attributes:
    folder: Where it lies.
    train: [token] uint16.
    validation: The same.
    vocab_size: Of the tokenizer.
    description: corpus.json.
    digest: SHA-256 of corpus.json, which holds those of the other files.
  """

  folder: pathlib.Path
  train: np.ndarray
  validation: np.ndarray
  vocab_size: int
  description: dict[str, Any]
  digest: str

  @property
  def validation_parts(self) -> dict[str, list[tuple[int, int]]]:
    """{language: [(first, end), ...]} of the validation tokens."""
    out: dict[str, list[tuple[int, int]]] = {}
    for row in self.description["documents"]:
      if row["part"] == "validation":
        spans = out.setdefault(row["language"], [])
        spans.append((row["start"], row["stop"]))
    return out

  @property
  def baselines(self) -> dict[str, dict[str, float]]:
    """{language: {baseline: nats per token}} of the validation tokens."""
    return self.description["baselines"]["validation"]


def load(folder: str | pathlib.Path) -> Corpus:
  """Reads a corpus.

  Raises:
    refusal.HarnessError: a file is missing, empty, damaged or not the one that
      corpus.json speaks of, or a token is not of the vocabulary.
  """
  folder = pathlib.Path(folder)
  content = _read(folder, DESCRIPTION)
  try:
    description = json.loads(content)
    if description["schema"] != _SCHEMA:
      raise ValueError(f"schema {description['schema']!r}, not {_SCHEMA!r}")
    vocab_size = int(description["request"]["vocab_size"])
    promised = {n: f["sha256"] for n, f in description["files"].items()}
  except (ValueError, KeyError, TypeError) as error:
    raise refusal.HarnessError(
        f"{folder / DESCRIPTION} is damaged: {error!r}"
    ) from error
  for name in (TOKENIZER, LICENCES):
    _check(folder, name, promised)
  return Corpus(
      folder,
      _tokens(folder, "train", promised, vocab_size),
      _tokens(folder, "validation", promised, vocab_size),
      vocab_size,
      description,
      hashlib.sha256(content).hexdigest(),
  )


def _read(folder: pathlib.Path, name: str) -> bytes:
  try:
    return (folder / name).read_bytes()
  except OSError as error:
    raise refusal.HarnessError(f"{folder} is no corpus: {error}") from error


def _check(folder, name: str, promised: dict[str, str]) -> None:
  found = hashlib.sha256(_read(folder, name)).hexdigest()
  if found != promised.get(name):
    raise refusal.HarnessError(
        f"{folder / name} has SHA-256 {found}; {DESCRIPTION} says"
        f" {promised.get(name)}."
    )


def _tokens(folder, part: str, promised, vocab_size: int) -> np.ndarray:
  path = folder / f"{part}.tokens.npy"
  _check(folder, path.name, promised)
  try:
    tokens = np.load(path, allow_pickle=False)
  except (OSError, ValueError, EOFError) as error:
    raise refusal.HarnessError(f"{path} is damaged: {error}") from error
  if tokens.dtype != np.uint16 or tokens.ndim != 1 or not tokens.size:
    raise refusal.HarnessError(
        f"{path} holds {tokens.dtype}{tokens.shape}, not tokens in uint16."
    )
  if int(tokens.max()) >= vocab_size:
    raise refusal.HarnessError(
        f"{path} holds token {int(tokens.max())}; the vocabulary has"
        f" {vocab_size}."
    )
  return tokens
