"""A measurement on disk, in the order in which it may be believed.

  protocol.json        what is declared; written before anything runs
  run.json             which arms can run and why not, digests of their outputs,
                       identities; written before the first sample
  samples/POINT.jsonl  a head with the digests of the two files above, then one
                       line a sample, appended as it is taken
  result.json          medians, ratios, verdicts
  manifest.json        the seal: digests of all of these; written last

A run that was stopped has no seal. It is never gone on with: samples of another
process would be of another machine state.

Layer: protocols.
"""

from collections.abc import Mapping
import hashlib
import json
import os
import pathlib
from typing import Any

from moejax.contracts import document
from moejax.contracts import refusal
from moejax.protocols.performance import protocol as protocol_lib

RUN_SCHEMA = "packed_performance_run/1"
SEAL_SCHEMA = "packed_performance_seal/1"
PROTOCOL = "protocol.json"
RUN = "run.json"
RESULT = "result.json"
MANIFEST = "manifest.json"
SAMPLES = "samples"


def begin(out: str | pathlib.Path, declared: Mapping[str, Any]) -> pathlib.Path:
  """Makes the folder and writes what is declared.

  Raises:
    HarnessError: there is something in it, or it cannot be made.
  """
  place = pathlib.Path(out)
  try:
    place.mkdir(parents=True, exist_ok=True)
    foreign = sorted(entry.name for entry in place.iterdir())
    if not foreign:
      (place / SAMPLES).mkdir()
  except OSError as error:
    raise refusal.HarnessError(f"{place} cannot be made: {error}.") from error
  if foreign:
    raise refusal.HarnessError(
        f"{place} is not empty ({', '.join(foreign[:3])}); a run starts in an"
        " empty folder, and one that was stopped is not gone on with."
    )
  write(place / PROTOCOL, declared)
  return place


def write(path: pathlib.Path, values: Mapping[str, Any]) -> None:
  """Writes a JSON file, whole or not at all."""
  text = json.dumps(
      values, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False
  )
  beside = path.with_name(f".{path.name}")
  with beside.open("w", encoding="utf-8") as file:
    file.write(text + "\n")
    file.flush()
    os.fsync(file.fileno())
  beside.rename(path)


class Appender:
  """The samples of one point, each on disk before the next is taken."""

  def __init__(self, place: pathlib.Path, point: str):
    """Starts the file with the digests of what was declared before."""
    self._file = (place / SAMPLES / f"{point}.jsonl").open(
        "x", encoding="utf-8"
    )
    self._line(head(place, point))

  def append(self, slot: protocol_lib.Slot, start_ns: int, ns: int) -> None:
    """Adds a sample: when it began on the run's clock, and how long it was."""
    self._line({
        "round": slot.round, "arm": slot.arm, "start_ns": start_ns, "ns": ns,
    })

  def close(self) -> None:
    """Sees that all is on disk."""
    os.fsync(self._file.fileno())
    self._file.close()

  def _line(self, values) -> None:
    self._file.write(document.canonical_json(values) + "\n")
    self._file.flush()


def head(place: pathlib.Path, point: str) -> dict[str, str]:
  """Returns the first line of a point's samples."""
  return {
      "point": point,
      "protocol": file_digest(place / PROTOCOL),
      "run": file_digest(place / RUN),
  }


def seal(
    place: pathlib.Path, protocol: protocol_lib.Protocol
) -> str:
  """Writes the manifest over all files; returns the digest of its text."""
  write(place / MANIFEST, {
      "schema": SEAL_SCHEMA,
      "files": {
          name: file_digest(place / name) for name in names(protocol)
      },
  })
  return file_digest(place / MANIFEST)


def names(protocol: protocol_lib.Protocol) -> list[str]:
  """Returns the files of a complete run but for its seal, sorted."""
  samples = (f"{SAMPLES}/{point.name}.jsonl" for point in protocol.points)
  return sorted((PROTOCOL, RUN, RESULT, *samples))


def found(place: pathlib.Path) -> list[str]:
  """Returns what lies in the folder but for the seal, sorted."""
  return sorted(
      path.relative_to(place).as_posix()
      for path in place.rglob("*")
      if not path.is_dir() and path != place / MANIFEST
  )


def read(path: pathlib.Path) -> dict[str, Any]:
  """Returns the object of a JSON file.

  Raises:
    ValueError: it is missing, damaged, or no object.
  """
  try:
    values = _parsed(path.read_text("utf-8"))
  except (OSError, ValueError) as error:
    raise ValueError(f"{path.name}: {error}") from error
  if not isinstance(values, dict):
    raise ValueError(f"{path.name} is no object.")
  return values


def read_lines(path: pathlib.Path) -> list[Any]:
  """Returns the values of a JSON lines file.

  Raises:
    ValueError: it is missing or damaged.
  """
  try:
    return [_parsed(x) for x in path.read_text("utf-8").splitlines()]
  except (OSError, ValueError) as error:
    raise ValueError(f"{path.name}: {error}") from error


def file_digest(path: pathlib.Path) -> str:
  """Returns the SHA-256 of a file, in lower-case hex."""
  return hashlib.sha256(path.read_bytes()).hexdigest()


def _parsed(text: str) -> Any:
  """JSON without the constants that it does not have."""

  def refuse(constant: str):
    raise ValueError(f"{constant} is no JSON.")

  return json.loads(text, parse_constant=refuse)
