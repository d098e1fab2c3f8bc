"""Writes a report, whole or not at all.

A comparison may take hours, so the place is checked before it starts. What it
writes grows in a folder beside the place and is moved there at the end; until
then an earlier report stays as it was, and whatever is not a report of ours is
never touched.

Layer: reports. Imports contracts.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import json
import os
import pathlib
import shutil
import tempfile

from moejax.contracts import refusal
from moejax.reports import junit
from moejax.reports import markdown
from moejax.reports import page

_DOCUMENT = "report.json"
_NAMES = frozenset({
    "report.html",
    "report.md",
    _DOCUMENT,
    "junit.xml",
    "capsule_ours",
    "capsule_reference",
})
_SCHEMA = "conformance/"


@contextlib.contextmanager
def folder(out: str | pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives a fresh folder that takes the place of `out` on success.

  Args:
    out: Where the report shall be. Missing parents are made. It may be absent,
      empty, or an earlier report, which is replaced.

  Yields:
    An empty folder beside `out`. If the body raises, nothing of it is left.

  Raises:
    HarnessError: on entry, `out` cannot be written or holds anything else; on
      exit, that has become so meanwhile, and then the new report is kept in
      the folder that the message names.
  """
  place = pathlib.Path(os.path.realpath(out))
  _check(place)
  made = _make_parents(place)
  try:
    fresh = pathlib.Path(
        tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent)
    )
  except OSError as error:
    _remove(made)
    raise refusal.HarnessError(
        f"{place.parent} cannot be written: {error}."
    ) from error
  try:
    yield fresh
  except BaseException:
    shutil.rmtree(fresh, ignore_errors=True)
    _remove(made)
    raise
  _readable(fresh)
  try:
    _check(place)
    _replace(place, fresh)
  except (OSError, refusal.HarnessError) as error:
    raise refusal.HarnessError(
        f"the report is kept in {fresh}, for it cannot be moved to {place}:"
        f" {error}"
    ) from error


def write(report: Mapping, folder: pathlib.Path) -> None:
  """Writes report.html, report.md, report.json and junit.xml into a folder."""
  document = json.dumps(report, indent=1, sort_keys=True, ensure_ascii=False)
  for name, text in (
      ("report.html", page.render(report)),
      ("report.md", markdown.render(report)),
      (_DOCUMENT, document + "\n"),
      ("junit.xml", junit.render(report)),
  ):
    file = folder / name
    # A lone surrogate in a prompt has no UTF-8; its escape is legal JSON.
    file.write_bytes(text.encode("utf-8", "backslashreplace"))
    file.chmod(0o644)


def _check(place: pathlib.Path) -> None:
  """Refuses a place that holds what is not ours to replace."""
  if not os.path.lexists(place):
    return
  if not place.is_dir():
    raise refusal.HarnessError(f"{place} exists and is not a folder.")
  if place.is_mount():
    raise refusal.HarnessError(
        f"{place} is a mount point and cannot be replaced; name a folder in it."
    )
  try:
    entries = sorted(entry.name for entry in place.iterdir())
  except OSError as error:
    raise refusal.HarnessError(f"{place} cannot be read: {error}.") from error
  if not os.access(place, os.W_OK):
    raise refusal.HarnessError(f"{place} cannot be written.")
  foreign = [name for name in entries if name not in _NAMES]
  if foreign:
    more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
    raise refusal.HarnessError(
        f"{place} holds other things than a report:"
        f" {', '.join(foreign[:3])}{more}."
    )
  if entries and not _is_report(place):
    raise refusal.HarnessError(
        f"{place} holds {', '.join(entries[:3])} but no {_DOCUMENT} of a"
        " conformance report."
    )


def _is_report(place: pathlib.Path) -> bool:
  try:
    report = json.loads((place / _DOCUMENT).read_text("utf-8"))
  except (OSError, ValueError):
    return False
  schema = report.get("schema") if isinstance(report, dict) else None
  return isinstance(schema, str) and schema.startswith(_SCHEMA)


def _make_parents(place: pathlib.Path) -> list[pathlib.Path]:
  """Makes missing parents; returns those it made, deepest first."""
  missing = [p for p in place.parents if not os.path.exists(p)]
  try:
    place.parent.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    _remove(missing)
    raise refusal.HarnessError(
        f"{place.parent} cannot be made: {error}."
    ) from error
  return missing


def _remove(made: list[pathlib.Path]) -> None:
  """Removes folders that we made, as far as nobody else uses them."""
  for path in made:
    with contextlib.suppress(OSError):
      path.rmdir()


def _readable(fresh: pathlib.Path) -> None:
  """Lets everybody read a folder and all in it."""
  for root, _, files in os.walk(fresh):
    os.chmod(root, 0o755)
    for name in files:
      os.chmod(os.path.join(root, name), 0o644)


def _replace(place: pathlib.Path, fresh: pathlib.Path) -> None:
  """Moves `fresh` to `place`; an earlier report steps aside until then."""
  if not place.exists():
    fresh.rename(place)
    return
  aside = pathlib.Path(
      tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent)
  )
  earlier = aside / "earlier"
  try:
    place.rename(earlier)
    try:
      fresh.rename(place)
    except BaseException:
      earlier.rename(place)
      raise
  except BaseException:
    aside.rmdir()
    raise
  shutil.rmtree(aside, ignore_errors=True)
