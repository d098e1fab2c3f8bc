"""A study on disk, made whole or not at all.

  manifest.json         request, fixture, histories, contracts, identities
  cells.jsonl           one `CellRecord` a line, in the order of execution
  fixture.safetensors   activations, routes and gates
  raw/CELL.safetensors  the four surfaces of a cell, by route id

Layer: protocols.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import dataclasses
import json
import os
import pathlib
import tempfile
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from moejax.contracts import document
from moejax.contracts import refusal
from moejax.protocols.route_block import record as record_lib

SCHEMA = "route_block_study/1"
MANIFEST = "manifest.json"
CELLS = "cells.jsonl"
FIXTURE = "fixture.safetensors"
RAW = "raw"
_NAMES = frozenset({MANIFEST, CELLS, FIXTURE, RAW})


@contextlib.contextmanager
def folder(out: str | pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives a fresh folder that takes the place of `out` on success.

  `out` may be absent, empty, or an earlier study, which is replaced at the
  end. If the body raises, `out` stays as it was.

  Raises:
    HarnessError: on entry, `out` holds anything else or cannot be written; on
      exit, it has become so meanwhile.
  """
  place = pathlib.Path(os.path.realpath(out))
  _check(place)
  try:
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = tempfile.TemporaryDirectory(
        dir=place.parent, prefix=f".{place.name}."
    )
  except OSError as error:
    raise refusal.HarnessError(f"{place} cannot be made: {error}.") from error
  with beside as name:
    # A temporary directory is private to its owner, and a study is not.
    fresh, earlier = pathlib.Path(name) / "new", pathlib.Path(name) / "earlier"
    (fresh / RAW).mkdir(parents=True)
    yield fresh
    _check(place)
    if place.exists():
      place.rename(earlier)
    try:
      fresh.rename(place)
    except BaseException:
      if earlier.exists():  # Leaving the block deletes what is still in it.
        earlier.rename(place)
      raise


def write_tensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray]):
  """Writes named arrays; readable by everybody, unlike `save_file`."""
  path.write_bytes(safetensors.numpy.save(
      {name: np.ascontiguousarray(t) for name, t in tensors.items()}
  ))


def write_manifest(place: pathlib.Path, manifest: Mapping[str, Any]) -> None:
  """Writes manifest.json."""
  text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False)
  (place / MANIFEST).write_text(text + "\n", "utf-8")


def append_record(
    place: pathlib.Path, record: record_lib.CellRecord
) -> None:
  """Adds a line to cells.jsonl."""
  line = document.canonical_json(dataclasses.asdict(record))
  with (place / CELLS).open("a", encoding="utf-8") as file:
    file.write(line + "\n")


def read_manifest(place: str | pathlib.Path) -> dict[str, Any]:
  """Returns the manifest of a study.

  Raises:
    HarnessError: there is none, or it is of another schema.
  """
  path = pathlib.Path(place) / MANIFEST
  if not path.is_file():
    raise refusal.HarnessError(f"{place} is no study: it has no {MANIFEST}.")
  try:
    manifest = json.loads(path.read_text("utf-8"))
  except ValueError as error:
    raise refusal.HarnessError(f"{path}: {error}") from error
  schema = manifest.get("schema") if isinstance(manifest, dict) else None
  if schema != SCHEMA:
    raise refusal.HarnessError(f"{path}: schema {schema!r} is not {SCHEMA!r}.")
  return manifest


def read_records(place: str | pathlib.Path) -> list[record_lib.CellRecord]:
  """Returns the records of cells.jsonl in the file's order.

  Raises:
    HarnessError: the file is missing, or a line is no record.
  """
  path = pathlib.Path(place) / CELLS
  try:
    lines = path.read_text("utf-8").splitlines()
    return [
        document.from_dict(record_lib.CellRecord, json.loads(line))
        for line in lines
    ]
  except (OSError, ValueError) as error:
    raise refusal.HarnessError(f"{path}: {error}") from error


def read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns the arrays of a file.

  Raises:
    ValueError: it is missing or damaged.
  """
  try:
    return safetensors.numpy.load_file(path)
  except (OSError, KeyError, safetensors.SafetensorError) as error:
    raise ValueError(f"{path.name}: {error}") from error


def foreign_files(
    place: str | pathlib.Path, cells: Mapping[str, Any] | set[str]
) -> list[str]:
  """Returns what lies in a study and is no part of it, sorted."""
  place = pathlib.Path(place)
  raw = {f"{name}.safetensors" for name in cells}
  found = [p.name for p in place.iterdir() if p.name not in _NAMES]
  if (place / RAW).is_dir():
    found += [
        f"{RAW}/{p.name}" for p in (place / RAW).iterdir() if p.name not in raw
    ]
  return sorted(found)


def _check(place: pathlib.Path) -> None:
  """Refuses a place that holds what is not ours to replace."""
  if not os.path.lexists(place):
    return
  if not place.is_dir():
    raise refusal.HarnessError(f"{place} exists and is not a folder.")
  entries = sorted(entry.name for entry in place.iterdir())
  foreign = [name for name in entries if name not in _NAMES]
  if foreign:
    raise refusal.HarnessError(
        f"{place} holds other things than a study: {', '.join(foreign[:3])}."
    )
  if entries:
    read_manifest(place)
