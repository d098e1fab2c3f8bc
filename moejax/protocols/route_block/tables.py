"""The tables of an accepted study, tab-separated.

  route_block_trajectories.tsv   arm, history, grid, membership, four digests
  route_block_differences.tsv    two outcomes, surface, elements that differ
  route_block_moved_routes.tsv   routes that lie in other blocks

Layer: protocols.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import pathlib
from typing import Any

from moejax.contracts import refusal

NAMES = (
    "route_block_trajectories.tsv",
    "route_block_differences.tsv",
    "route_block_moved_routes.tsv",
)


def write(score: Mapping[str, Any], folder: str | pathlib.Path) -> None:
  """Writes the tables of an accepted score; earlier ones are replaced.

  Raises:
    HarnessError: the folder cannot be written.
  """
  folder = pathlib.Path(folder)
  moved = [
      {"which": which, "routes": routes}
      for which, routes in score["moved_routes"].items()
  ]
  rows = (score["trajectories"], score["differences"], moved)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in zip(NAMES, rows, strict=True):
      (folder / name).write_text(_tsv(table), "utf-8")
  except OSError as error:
    raise refusal.HarnessError(f"{folder}: {error}") from error


def _tsv(rows: Sequence[Mapping[str, Any]]) -> str:
  lines = [list(rows[0]), *(map(_text, row.values()) for row in rows)]
  return "".join("\t".join(line) + "\n" for line in lines)


def _text(value: Any) -> str:
  if isinstance(value, list):
    return ",".join(map(str, value))
  return str(value)
