"""A corpus on disk, made whole or not at all.

Layer: experiments.
"""

from collections.abc import Mapping
import json
import pathlib

from experiments.support import whole_folder
from moejax.contracts import refusal

DOCUMENT = "corpus.json"
SCHEMA = "corpus/1"


def check(out: str | pathlib.Path) -> None:
  """Checks that a corpus may be written to `out`, before the work is done.

  Raises:
    refusal.HarnessError: it is neither absent, nor an empty folder, nor an
      earlier corpus with nothing else in it.
  """
  out = pathlib.Path(out)
  if not out.exists():
    return
  if not out.is_dir():
    raise refusal.HarnessError(f"{out} exists and is no folder.")
  names = {path.name for path in out.iterdir()}
  if names and names != _written(out):
    raise refusal.HarnessError(
        f"{out} holds something else than a corpus: {sorted(names)}. Name an"
        " empty folder."
    )


def write(out: str | pathlib.Path, files: Mapping[str, bytes]) -> None:
  """Writes all files of a corpus to a folder beside `out` and renames it.

  Args:
    out: See `check`. Missing parents are made; an earlier corpus is replaced.
    files: {name: content}; corpus.json among them.

  Raises:
    refusal.HarnessError: see `check`; or a file cannot be written, for example
      because the disk is full. Nothing is left then, and an earlier corpus is
      as it was.
  """
  out = pathlib.Path(out).resolve()
  check(out)
  try:
    whole_folder.replace(out, files)
  except OSError as error:
    raise refusal.HarnessError(
        f"the corpus cannot be written to {out}: {error}."
    ) from error


def _written(out: pathlib.Path) -> set[str]:
  """Returns the names that the corpus.json of a folder accounts for."""
  try:
    content = json.loads((out / DOCUMENT).read_bytes())
    if content["schema"] == SCHEMA:
      return {DOCUMENT, *content["files"]}
  except (OSError, ValueError, KeyError, TypeError):
    pass
  return set()
