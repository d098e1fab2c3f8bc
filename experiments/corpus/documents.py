"""From packages to documents: read, told apart by language, cleaned.

Layer: experiments.
"""

from collections.abc import Callable
import dataclasses
import hashlib
import pathlib
import re

from experiments.corpus import clean
from experiments.corpus import duplicates
from experiments.corpus import html_text
from experiments.corpus import licences
from experiments.corpus import packages
from experiments.corpus import paragraph
from experiments.corpus import place
from experiments.corpus import roff_text
from moejax.contracts import refusal

_FORMS = {place.HTML: html_text.paragraphs, place.MAN: roff_text.paragraphs}
_CHARSET = re.compile(rb"""<meta[^>]*charset=["']?([\w-]+)""", re.I)


@dataclasses.dataclass(frozen=True)
class Document:
  """One cleaned document.

  Attributes:
    package, path: Where it comes from.
    language: place.EN or place.ZH.
    key: What it shares with its counterpart in the other language.
    paragraphs: Its text.
  """

  package: str
  path: str
  language: str
  key: str
  paragraphs: tuple[paragraph.Paragraph, ...]

  @property
  def text(self) -> str:
    """The document as one text, ending in a newline."""
    return paragraph.join(list(self.paragraphs))


@dataclasses.dataclass(frozen=True)
class Reading:
  """What was read.

  Attributes:
    documents: In order of package and path.
    sources: What corpus.json says of each package, but for counts.
    dropped: How many documents and paragraphs went, and why.
  """

  documents: list[Document]
  sources: list[dict]
  dropped: dict[str, int]


def read(
    folder: str | pathlib.Path, report: Callable[[str], None]
) -> Reading:
  """Reads all packages of a folder.

  Plain text counts only in packages that have neither HTML nor manual pages,
  where it mostly is the same again. In a package with both languages, English
  documents without a Chinese counterpart are passed over.

  Args:
    folder: Holds .deb files or unpacked packages.
    report: Is told what is being read.

  Raises:
    refusal.HarnessError: the folder holds no package, a package is damaged or
      there twice or without a licence, a document is no text, or a language
      has no document.
    refusal.UnsupportedError: a package's compression cannot be read here.
  """
  found, sources, notices = [], {}, {}
  dropped = {"of_no_use": 0, "repeated_paragraphs": 0, "repeated": 0}
  seen = duplicates.Filter()
  for path in packages.find(folder):
    report(f"reading {path.name}")
    package = packages.read(path, lambda p: place.form(p) is not None)
    name = package.name
    if name in sources:
      raise refusal.HarnessError(f"{folder} holds package {name} twice.")
    notices[name] = package.copyright, package.doc_link
    if package.copyright is not None:
      licences.names(name, package.copyright)  # Refuses before the long part.
    sources[name] = {
        "name": name, "version": package.version, "sha256": package.digest,
    }
    for member, language in _chosen(package):
      raw = _paragraphs(package, member)
      kept = clean.document(raw, language)
      if not kept:
        dropped["of_no_use"] += 1
        continue
      # What was new may be too little, or headings without their text.
      kept = clean.document(seen.document(kept), language)
      if not kept:
        dropped["repeated"] += 1
        continue
      key = place.key(name, member)
      found.append(Document(name, member, language, key, tuple(kept)))
  dropped["repeated_paragraphs"] = seen.removed
  for language in place.LANGUAGES:
    if not any(x.language == language for x in found):
      raise refusal.HarnessError(
          f"{folder} holds no document of language {language} that could be"
          " used; both languages are needed."
      )
  _add_licences(sources, notices)
  return Reading(found, list(sources.values()), dropped)


def _chosen(package: packages.Package) -> list[tuple[str, str]]:
  """Returns (path, language) of the documents to read."""
  forms = {path: place.form(path) for path in package.files}
  if set(forms.values()) - {place.TEXT}:
    forms = {path: form for path, form in forms.items() if form != place.TEXT}
  found = [(path, place.language(package.name, path)) for path in forms]
  chinese = {
      place.key(package.name, path) for path, x in found if x == place.ZH
  }
  return [
      (path, x)
      for path, x in found
      if x == place.ZH
      or (
          x == place.EN
          and (not chinese or place.key(package.name, path) in chinese)
      )
  ]


def _paragraphs(package, member: str) -> list[paragraph.Paragraph]:
  content = package.files[member]
  form = place.form(member)
  charset = _CHARSET.search(content[:2048]) if form == place.HTML else None
  try:
    text = content.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    try:
      if not charset or b"\0" in content:
        raise
      text = content.decode(charset[1].decode())
    except (UnicodeDecodeError, LookupError):
      raise refusal.HarnessError(
          f"package {package.name}: {member} is no text in UTF-8: {error}"
      ) from error
  if "\0" in text:
    raise refusal.HarnessError(
        f"package {package.name}: {member} is no text: it holds a null."
    )
  if form == place.TEXT:
    return [
        paragraph.make(paragraph.TEXT, block)
        for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n"))
    ]
  return _FORMS[form](text)


def _add_licences(sources, notices) -> None:
  for name, source in sources.items():
    own, link = notices[name]
    if own is None and link in notices:
      own = notices[link][0]
    source["licences"] = list(licences.names(name, own))
    source["copyright_sha256"] = hashlib.sha256(own).hexdigest()
    source["holders"] = licences.holders(own)
