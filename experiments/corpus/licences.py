"""Under which licences a package stands, as its copyright file says.

Debian's machine-readable form names licences in fields; other files are
searched for the sentences that name a well-known licence. Whether a licence
is free is for whoever chose the packages to judge (Debian's main archive
admits no other); names that forbid commercial use or changes are refused.

Layer: experiments.
"""

from collections.abc import Iterable
import re

from moejax.contracts import refusal

_FIELD = re.compile(r"^License:[ \t]*(\S.*?)\s*$", re.M)
_NOT_FREE = re.compile(r"\bNC\b|\bND\b|non-?commercial|no-?deriv", re.I)
_SIGN = re.compile(r"^((copyright|©|\(c\))\s*)+", re.I)
_KNOWN = (
    (r"General Public License.{0,160}version 3", "GPL-3"),
    (r"General Public License.{0,160}version 2|common-licenses/GPL-2"
     r"|GNU GPL, version 2|GPL-2\+", "GPL-2"),
    (r"common-licenses/GPL-3", "GPL-3"),
    (r"General Public License|common-licenses/GPL\b", "GPL"),
    (r"Free Documentation License|common-licenses/GFDL", "GFDL"),
    (r"Attribution-ShareAlike 3\.0", "CC-BY-SA-3.0"),
    (r"Attribution-ShareAlike 4\.0", "CC-BY-SA-4.0"),
    (r"Mozilla Public License.{0,40}2\.0", "MPL-2.0"),
    (r"CC0 1\.0|CC0-1\.0", "CC0-1.0"),
    (r"Permission is hereby granted, free of charge", "Expat"),
    (r"Permission is granted to make and distribute verbatim copies of this"
     r" .{0,60}permission notice are preserved.*modified versions",
     "Verbatim-and-modified-copies"),
    (r"Redistribution and use in source and binary forms", "BSD"),
)


def names(package: str, copyright_file: bytes | None) -> tuple[str, ...]:
  """Returns the names of the licences, sorted.

  Raises:
    refusal.HarnessError: there is no copyright file, it names no licence, or
      one that is not free.
  """
  if copyright_file is None:
    raise refusal.HarnessError(
        f"package {package} has no usr/share/doc/{package}/copyright, so its"
        " licence is unknown. If its documentation folder is a link to another"
        " package, put that one beside it."
    )
  text = copyright_file.decode("utf-8", "replace")
  found = {
      name
      for field in _FIELD.findall(text)
      for name in re.split(r"\s+(?:and/or|and|or)\s+|,\s*", field)
      if name
  }
  if not found:
    flat = " ".join(text.split())
    found = {name for rule, name in _KNOWN if re.search(rule, flat, re.I)}
    if found & {"GPL-2", "GPL-3"}:
      found.discard("GPL")
  if not found:
    raise refusal.HarnessError(
        f"package {package}: its copyright file names no licence."
    )
  closed = sorted(name for name in found if _NOT_FREE.search(name))
  if closed:
    raise refusal.HarnessError(
        f"package {package} stands under {', '.join(closed)}, which is not"
        " free."
    )
  return tuple(sorted(found))


def holders(copyright_file: bytes) -> list[str]:
  """Returns the lines that name who holds the copyright, each once."""
  text = copyright_file.decode("utf-8", "replace")
  found, inside = {}, False
  for line in text.splitlines():
    field = re.match(r"\s*(?:Upstream-Author|Copyright)s?\s*:(.*)", line, re.I)
    if field:
      line, inside = field[1], True
    elif inside and not re.match(r"\s+\S", line):
      inside = False
    notice = re.search(r"(?:copyright\s|©|\(c\)\s)(.*\d{4}.*)", line, re.I)
    value = line if inside else notice[1] if notice else ""
    value = _SIGN.sub("", " ".join(value.split()).strip(" ,.*#"))
    if re.search(r"\d{4}", value) and len(value) < 120:
      found[value] = None
  return list(found)


def notice(sources: Iterable[dict]) -> str:
  """Returns the text about sources and licences for a model card.

  Args:
    sources: What corpus.json says of each package: name, version, licences,
      holders, sha256, documents.
  """
  lines = [
      "# Sources and licences of the training text",
      "",
      "The text was taken from the packages below, cut down to prose and"
      " deduplicated. It stands under the licences that the copyright file of"
      " each package names; a package may name several, one for each part of"
      " it. The holders are listed as that file has them.",
      "",
  ]
  for source in sources:
    lines += [
        f"## {source['name']} {source['version']}",
        "",
        f"- Licences: {', '.join(source['licences'])}",
        f"- Documents used: {source['documents']}",
        f"- SHA-256 of the package: {source['sha256']}",
    ]
    if source["holders"]:
      lines += ["- Holders:"]
      lines += [f"  - {holder}" for holder in source["holders"]]
    lines += [""]
  return "\n".join(lines)
