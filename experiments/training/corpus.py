"""The text that a model is trained on, as a folder.

  train.tokens.npy        [token] uint16
  validation.tokens.npy   the same, of other documents
  tokenizer.json          makes them
  corpus.json             sources, licences, baselines, digests

Layer: experiments.
"""

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import numpy as np

from moejax.contracts import refusal

TRAIN, VALIDATION = "train.tokens.npy", "validation.tokens.npy"
TOKENIZER, DESCRIPTION = "tokenizer.json", "corpus.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Corpus:
  """A folder that was read and checked.

  Attributes:
    folder: Where it lies.
    train: [token] uint16.
    validation: The same.
    vocab_size: Of the tokenizer.
    description: corpus.json.
    digest: SHA-256 over the digests of the four files.
  """

  folder: pathlib.Path
  train: np.ndarray
  validation: np.ndarray
  vocab_size: int
  description: dict[str, Any]
  digest: str

  @property
  def validation_parts(self) -> dict[str, list]:
    """{language: [[first, end], ...]} spans of the validation tokens."""
    return self.description.get("validation_parts", {})

  @property
  def baselines(self) -> dict[str, dict[str, float]]:
    """{language, or "all": {baseline: nats per token}}."""
    return self.description.get("baselines", {})

  @property
  def licence_text(self) -> str:
    """Sources and licences, for people."""
    return self.description.get("licence_text", "")


def load(folder: str | pathlib.Path) -> Corpus:
  """Reads a corpus.

  Raises:
    refusal.HarnessError: a file is missing, empty or damaged, or a token is
      not of the tokenizer's vocabulary.
  """
  folder = pathlib.Path(folder)
  digest = hashlib.sha256()
  for name in (TRAIN, VALIDATION, TOKENIZER, DESCRIPTION):
    path = folder / name
    if not path.is_file():
      raise refusal.HarnessError(f"{folder} is no corpus: {name} is absent.")
    digest.update(hashlib.sha256(path.read_bytes()).digest())
  description = _json(folder / DESCRIPTION)
  model = _json(folder / TOKENIZER).get("model", {})
  added = _json(folder / TOKENIZER).get("added_tokens", [])
  ids = {*model.get("vocab", {}).values(), *(t["id"] for t in added)}
  vocab_size = max(ids, default=-1) + 1
  train, validation = (
      _tokens(folder / name, vocab_size) for name in (TRAIN, VALIDATION)
  )
  return Corpus(
      folder, train, validation, vocab_size, description, digest.hexdigest()
  )


def _json(path: pathlib.Path) -> dict[str, Any]:
  try:
    found = json.loads(path.read_text("utf-8"))
  except ValueError as error:
    raise refusal.HarnessError(f"{path} is damaged: {error}") from error
  if not isinstance(found, dict):
    raise refusal.HarnessError(f"{path} holds no object.")
  return found


def _tokens(path: pathlib.Path, vocab_size: int) -> np.ndarray:
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
        f"{path} holds token {int(tokens.max())}; the tokenizer has"
        f" {vocab_size}."
    )
  return tokens
