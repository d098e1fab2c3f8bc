"""Debian packages as documents: a .deb file, or the folder it was unpacked to.

A .deb is an `ar` archive of three members: debian-binary, control.tar.* and
data.tar.*. Its compression may be gzip, xz or none; zstd, which the standard
library of this Python does not read, goes through dpkg-deb where that exists.
An unpacked package is a folder with DEBIAN/control, as `dpkg-deb -R` makes it.

Nothing is run out of a package and nothing is written: members are read as
bytes, whatever their names say.

Layer: experiments.
"""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import gzip
import hashlib
import io
import lzma
import pathlib
import re
import shutil
import subprocess
import tarfile
import zlib

from moejax.contracts import refusal

_AR = b"!<arch>\n"
_DAMAGE = (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError)


@dataclasses.dataclass(frozen=True)
class Package:
  """What one package holds that matters here.

  Attributes:
    name, version: As its control file says.
    digest: SHA-256 of the .deb; of a folder, that of its sorted lines
      "<SHA-256 of the file>  <path>".
    copyright: Its copyright file, or None. Debian demands one at
      usr/share/doc/<name>/copyright.
    doc_link: The package that its documentation folder is a link to, or None.
      Such a package shares that one's copyright file.
    files: {path: bytes} of the wanted files, sorted by path, gunzipped; the
      ending .gz is gone from their names.
  """

  name: str
  version: str
  digest: str
  copyright: bytes | None
  doc_link: str | None
  files: dict[str, bytes]


def find(folder: str | pathlib.Path) -> list[pathlib.Path]:
  """Returns the packages of a folder, sorted by name.

  Raises:
    refusal.HarnessError: the folder is absent or holds no package.
  """
  folder = pathlib.Path(folder)
  if not folder.is_dir():
    raise refusal.HarnessError(f"{folder} is no folder.")
  found = sorted(
      path
      for path in folder.iterdir()
      if path.suffix == ".deb" or (path / "DEBIAN" / "control").is_file()
  )
  if not found:
    raise refusal.HarnessError(
        f"{folder} holds no .deb file and no unpacked package (a folder with"
        " DEBIAN/control, as `dpkg-deb -R` makes it)."
    )
  return found


def read(path: pathlib.Path, wanted: Callable[[str], bool]) -> Package:
  """Reads a package.

  Args:
    path: A .deb file or an unpacked package.
    wanted: Whether a file is to be kept, by its path in the package without
      leading "./" and without a last .gz.

  Raises:
    refusal.HarnessError: the package is damaged, or names no package and
      version.
    refusal.UnsupportedError: it is compressed in a way that cannot be read
      here.
  """
  try:
    if path.is_dir():
      control, entries, digest = _unpacked(path)
    else:
      content = path.read_bytes()
      digest = hashlib.sha256(content).hexdigest()
      control, entries = _archive(path, content)
    fields = dict(
        re.findall(r"^(Package|Version): *(\S+)\s*$", control.decode(), re.M)
    )
    if len(fields) != 2:
      raise refusal.HarnessError(f"{path}: control names {sorted(fields)}.")
    return _collect(fields["Package"], fields["Version"], digest, entries,
                    wanted)
  except (*_DAMAGE, UnicodeDecodeError) as error:
    raise refusal.HarnessError(f"{path} is damaged: {error}") from error


def _collect(name, version, digest, entries, wanted) -> Package:
  docs = f"usr/share/doc/{name}"
  files, notice, link = {}, None, None
  for member, content, target in entries:
    plain = member.removesuffix(".gz")
    if member == docs and target:
      link = target.rstrip("/").rsplit("/", 1)[-1]
    elif target is not None:
      continue
    elif plain == f"{docs}/copyright":
      notice = _gunzipped(member, content())
    elif wanted(plain):
      files[plain] = _gunzipped(member, content())
  return Package(
      name, version, digest, notice, link, dict(sorted(files.items()))
  )


def _gunzipped(member: str, content: bytes) -> bytes:
  return gzip.decompress(content) if member.endswith(".gz") else content


def _archive(path: pathlib.Path, content: bytes):
  """Returns the control file and an iterator over the data of a .deb."""
  members = _ar_members(path, content)
  control = None
  for member, data, _ in _tar(path, *_member(path, members, "control.tar")):
    if member == "control":
      control = data()
  if control is None:
    raise refusal.HarnessError(f"{path} is damaged: it has no control file.")
  return control, _tar(path, *_member(path, members, "data.tar"))


def _ar_members(path: pathlib.Path, content: bytes) -> dict[str, bytes]:
  if not content.startswith(_AR):
    raise refusal.HarnessError(f"{path} is no .deb: it is no ar archive.")
  members, place = {}, len(_AR)
  while place < len(content):
    header = content[place : place + 60]
    size = header[48:58].strip()
    end = place + 60 + int(size if size.isdigit() else 0)
    if header[58:] != b"`\n" or not size.isdigit() or end > len(content):
      raise refusal.HarnessError(
          f"{path} is damaged: the ar member at byte {place} is cut off or has"
          " no valid header."
      )
    name = header[:16].decode("ascii", "replace").strip().rstrip("/")
    members[name] = content[place + 60 : end]
    place = end + end % 2
  return members


def _member(path, members, stem) -> tuple[str, bytes]:
  for name, data in members.items():
    if name.startswith(stem):
      return name, data
  raise refusal.HarnessError(f"{path} is damaged: it has no {stem} member.")


def _tar(path, name: str, data: bytes) -> Iterator[tuple]:
  """Yields (path, function that returns the bytes, target of a link)."""
  if name.endswith(".zst"):
    data = _through_dpkg(path, name)
  elif not name.endswith((".tar", ".gz", ".xz")):
    raise refusal.UnsupportedError(f"{path}: {name} cannot be read here.")
  with tarfile.open(fileobj=io.BytesIO(data), mode="r|*") as tar:
    for entry in tar:
      member = entry.name.removeprefix("./").rstrip("/")
      if entry.issym():
        yield member, None, entry.linkname
      elif entry.isfile():
        yield member, lambda e=entry: tar.extractfile(e).read(), None


def _through_dpkg(path: pathlib.Path, name: str) -> bytes:
  program = shutil.which("dpkg-deb")
  if program is None:
    raise refusal.UnsupportedError(
        f"{path}: {name} is zstd, which needs dpkg-deb; it is not installed."
        " Unpack the package elsewhere with `dpkg-deb -R`."
    )
  which = "--ctrl-tarfile" if name.startswith("control") else "--fsys-tarfile"
  done = subprocess.run(
      [program, which, str(path)], capture_output=True, check=False
  )
  if done.returncode:
    raise refusal.HarnessError(
        f"{path} is damaged: {done.stderr.decode(errors='replace').strip()}"
    )
  return done.stdout


def _unpacked(folder: pathlib.Path):
  paths = sorted(p for p in folder.rglob("*") if p.is_file() or p.is_symlink())
  whole = hashlib.sha256()
  entries = []
  for path in paths:
    member = path.relative_to(folder).as_posix()
    if path.is_symlink():
      entries.append((member, None, str(path.readlink())))
      continue
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    whole.update(f"{digest}  {member}\n".encode())
    entries.append((member, path.read_bytes, None))
  control = (folder / "DEBIAN" / "control").read_bytes()
  return control, entries, whole.hexdigest()
