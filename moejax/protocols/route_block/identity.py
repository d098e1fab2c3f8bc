"""What made a study: digests of source files and of native libraries.

A study can be repeated only by the code that made it, and its bits are the
doing of a binary. Both are named by what is in the files, not by where they
lie or what they are called.

Layer: protocols.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import hashlib
import importlib.metadata
import pathlib
from typing import Any

from moejax.contracts import document
from moejax.contracts import refusal

_NATIVE = (".so", ".pyd", ".dylib")


def source(root: pathlib.Path, packages: Sequence[str]) -> str:
  """Returns the digest of all Python files of some packages.

  It covers each file's path below `root` and its SHA-256, in order of paths.

  Raises:
    HarnessError: a package has no file.
  """
  rows = []
  for package in packages:
    paths = sorted((root / package).rglob("*.py"))
    if not paths:
      raise refusal.HarnessError(f"{root} holds no source of {package}.")
    rows += [
        (path.relative_to(root).as_posix(), file_digest(path))
        for path in paths
    ]
  return _digest(rows)


def binary(
    backend: str,
    versions: Mapping[str, str | None],
    files: Mapping[str, str],
    device: str,
) -> dict[str, Any]:
  """Returns the identity of what computed, as JSON values with its "digest".

  Args:
    backend: Name of the backend.
    versions: {package: version}.
    files: {name: SHA-256} of native files.
    device: Kind of the device.
  """
  values = {
      "backend": backend,
      "versions": dict(sorted(versions.items())),
      "files": dict(sorted(files.items())),
      "device": device,
  }
  return values | {"digest": _digest(values)}


def binary_digest(values: Mapping[str, Any]) -> str:
  """Returns the digest that a binary identity should carry."""
  return _digest({k: v for k, v in values.items() if k != "digest"})


def native_files(package: str) -> str:
  """Returns one digest of the native libraries that a package installed.

  Raises:
    HarnessError: the package is not installed, or has no native library.
  """
  try:
    files = importlib.metadata.files(package) or []
  except importlib.metadata.PackageNotFoundError as error:
    raise refusal.HarnessError(f"{package} is not installed.") from error
  rows = sorted(
      (file.as_posix(), file_digest(pathlib.Path(file.locate())))
      for file in files
      if file.suffix in _NATIVE
  )
  if not rows:
    raise refusal.HarnessError(f"{package} has no native library.")
  return _digest(rows)


def file_digest(path: pathlib.Path) -> str:
  """Returns the SHA-256 of a file, in lower-case hex."""
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(value: Any) -> str:
  return document.sha256(document.canonical_json(value))
