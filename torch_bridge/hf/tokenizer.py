"""Texts to token ids: tokenizer.json, prompt files, and what they may hold.

Prompts decide everything that follows, so nothing about them is repaired: an
empty prompt, a prompt that does not fit the model, or an id that the embedding
has no row for is refused with its values, before anything is computed.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Iterable
import dataclasses
import hashlib
import pathlib

import tokenizers

from moejax.contracts import refusal
from torch_bridge.hf import json_file

FILE = "tokenizer.json"
SCHEMA = "prompts/1"


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
  """One text and the name under which results are reported."""

  id: str
  text: str


class Tokenizer:
  """The tokenizer of a folder.

  Attributes:
    path: Its tokenizer.json.
    digest: SHA-256 of that file's bytes.
  """

  def __init__(self, folder: str | pathlib.Path):
    """Reads tokenizer.json.

    Raises:
      refusal.HarnessError: the file is absent or no tokenizer.
    """
    self.path = pathlib.Path(folder) / FILE
    if not self.path.is_file():
      raise refusal.HarnessError(f"{self.path} is absent.")
    content = self.path.read_bytes()
    self.digest = hashlib.sha256(content).hexdigest()
    try:
      self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except ValueError as error:
      raise refusal.HarnessError(
          f"{self.path} is no tokenizer: {error}"
      ) from error
    # A file may ask for both; either would change a prompt without a word.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()

  @property
  def vocab_size(self) -> int:
    """Number of tokens, added ones included."""
    return self._tokenizer.get_vocab_size(with_added_tokens=True)

  def encode(self, text: str) -> list[int]:
    """Returns the token ids of a text, with no special token added."""
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of token ids, special tokens included."""
    return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def read_prompts(path: str | pathlib.Path) -> list[Prompt]:
  """Reads a prompt file.

  A .json file holds {"schema": "prompts/1", "prompts": [{"id", "text"}, ...]}.
  A .txt file holds one prompt a line; line n has the id "line_n".

  Raises:
    refusal.HarnessError: the file is absent, of another kind or damaged, or
      holds no prompt, an empty prompt or an id twice.
  """
  path = pathlib.Path(path)
  if path.suffix == ".json":
    prompts = _from_json(path)
  elif path.suffix == ".txt":
    prompts = _from_lines(path)
  else:
    raise refusal.HarnessError(f"{path} is neither .json nor .txt.")
  if not prompts:
    raise refusal.HarnessError(f"{path} holds no prompt.")
  seen = set()
  for prompt in prompts:
    if not prompt.text.strip():
      raise refusal.HarnessError(f"{path}: prompt {prompt.id} is empty.")
    if prompt.id in seen:
      raise refusal.HarnessError(f"{path}: id {prompt.id!r} occurs twice.")
    seen.add(prompt.id)
  return prompts


def encode_prompts(
    prompts: Iterable[Prompt],
    tokenizer: Tokenizer,
    max_positions: int,
    decode_steps: int,
    vocab_size: int,
) -> list[tuple[int, ...]]:
  """Returns the token ids of each prompt, in order.

  Args:
    prompts: The texts.
    tokenizer: Their tokenizer.
    max_positions: Positions of the model.
    decode_steps: Tokens to decode after a prompt, at least 0.
    vocab_size: Rows of the model's embedding.

  Raises:
    ValueError: decode_steps is negative.
    refusal.HarnessError: a prompt has no token, does not fit the model's
      positions with the steps after it, or has an id the model does not know.
  """
  if decode_steps < 0:
    raise ValueError(f"decode_steps={decode_steps} is negative.")
  encoded = []
  for prompt in prompts:
    ids = tuple(tokenizer.encode(prompt.text))
    if not ids:
      raise refusal.HarnessError(
          f"prompt {prompt.id}: {prompt.text!r} has no token in"
          f" {tokenizer.path}."
      )
    if len(ids) + decode_steps > max_positions:
      raise refusal.HarnessError(
          f"prompt {prompt.id}: {len(ids)} tokens and {decode_steps} decode"
          f" steps exceed the model's {max_positions} positions."
      )
    if max(ids) >= vocab_size:
      raise refusal.HarnessError(
          f"prompt {prompt.id}: token id {max(ids)} of {tokenizer.path} is"
          f" outside the model's vocabulary of {vocab_size}."
      )
    encoded.append(ids)
  return encoded


def _from_json(path: pathlib.Path) -> list[Prompt]:
  content = json_file.read_object(path)
  if content.get("schema") != SCHEMA:
    raise refusal.HarnessError(
        f"{path}: schema {content.get('schema')!r} is not {SCHEMA!r}."
    )
  entries = content.get("prompts")
  if set(content) != {"schema", "prompts"} or not isinstance(entries, list):
    raise refusal.HarnessError(
        f"{path} holds {', '.join(content)}; expected schema and a list of"
        " prompts."
    )
  for entry in entries:
    if (
        not isinstance(entry, dict)
        or set(entry) != {"id", "text"}
        or not all(isinstance(value, str) for value in entry.values())
        or not entry["id"]
    ):
      raise refusal.HarnessError(
          f"{path}: prompt {entry!r} is not an id and a text."
      )
    if any("\ud800" <= c <= "\udfff" for c in entry["text"]):
      raise refusal.HarnessError(
          f"{path}: prompt {entry['id']} holds half a surrogate pair."
      )
  return [Prompt(entry["id"], entry["text"]) for entry in entries]


def _from_lines(path: pathlib.Path) -> list[Prompt]:
  if not path.is_file():
    raise refusal.HarnessError(f"{path} is absent.")
  try:
    text = path.read_bytes().decode("utf-8-sig")
  except UnicodeDecodeError as error:
    raise refusal.HarnessError(f"{path} is not UTF-8: {error}") from error
  # Only a line feed ends a line; str.splitlines would also cut at separators
  # that a prompt may well hold.
  lines = text.removesuffix("\n").split("\n") if text else []
  return [
      Prompt(f"line_{number}", line.removesuffix("\r"))
      for number, line in enumerate(lines, 1)
  ]
