"""What the path of a file says: its form, its language, and its counterpart.

Layer: experiments.
"""

import re

EN, ZH = "en", "zh"
LANGUAGES = (EN, ZH)
HTML, MAN, TEXT = "html", "man", "text"

# ISO 639-1 codes of the languages that documentation is translated to; the
# kernel's sp stands for Spanish.
_CODES = frozenset(
    "af am ar as be bg bn bs ca cs cy da de el en eo es et eu fa fi fr ga gl"
    " gu he hi hr hu id is it ja ka kk km kn ko lt lv mk ml mr ms my nb nl nn"
    " no oc pa pl pt ro ru si sk sl sp sq sr sv ta te tg th tr uk ur uz vi zh"
    .split()
)
_CODE = re.compile(r"([a-z]{2})([-_@][A-Za-z]{2,8})?(\.utf-?8)?", re.I)
_SIMPLIFIED = frozenset(("zh", "zh_cn", "zh_hans", "zh_sg"))
_SUFFIX = re.compile(r"-(en|en-us|zh|zh-cn)$")
# Whole documents of licence, lists and generated pages.
_NO_PROSE = re.compile(
    r"^(a?gpl|l?gpl|gfdl|fdl|licen[cs]e|copying|copyright|credits|legal"
    r"|genindex|search|ix\d+|bi\d+|changelog|news|readme|todo|py-modindex"
    r"|noscript)\b|gpl|licen[cs]|release-?notes|changelog",
    re.IGNORECASE,
)


def form(path: str) -> str | None:
  """Returns how a file is written, or None if it is no document.

  Documents are HTML and plain text under usr/share and manual pages under
  usr/share/man. Sources that lie beside their HTML (_sources) are none, nor
  are licences, indices, changelogs and the like, told by the name.
  """
  name = path.rsplit("/", 1)[-1]
  if not path.startswith("usr/share/") or "/_sources/" in path:
    return None
  if _NO_PROSE.search(name):
    return None
  if path.startswith("usr/share/man/"):
    return MAN if re.search(r"\.[1-9][a-z]*$", name) else None
  if name.endswith((".html", ".htm")):
    return HTML
  return TEXT if name.endswith(".txt") else None


def language(package: str, path: str) -> str | None:
  """Returns the language that a path names: EN, ZH, or None for any other.

  The last part of the path decides that is a language code, be it a folder
  (zh_CN/), a middle ending (.zh-cn.html) or the ending of the package's name;
  without any it is English. Chinese without a country is taken as Simplified;
  that of Taiwan and Hong Kong is another language here.
  """
  parts = [*_codes(path)] or [*_codes(package.replace("-", "/", 1))]
  suffix = _SUFFIX.search(package)
  code = parts[-1] if parts else suffix[1] if suffix else EN
  code = code.lower().replace("-", "_").split(".")[0]
  if code in _SIMPLIFIED:
    return ZH
  return EN if code.split("_")[0] == EN else None


def key(package: str, path: str) -> str:
  """Returns what documents in two languages have in common.

  That is the package's name without its language, and the last folder and
  the name of the file without theirs. Manual pages belong together across
  packages. Two documents of one key never lie on two sides of a split.
  """
  parts = []
  for part in path.removesuffix(".html").removesuffix(".htm").split("/"):
    first, *rest = part.split(".")
    words = [word for word in rest if not _is_code(word)]
    if words or rest or not _is_code(first):
      words = [first, *words]
      parts.append(_SUFFIX.sub("", ".".join(words)))
  family = "man" if path.startswith("usr/share/man/") else family_of(package)
  return "/".join([family, *parts[-2:]])


def family_of(package: str) -> str:
  """Returns a package's name without its language."""
  return _SUFFIX.sub("", package)


def _codes(path: str):
  for part in path.split("/"):
    words = part.split(".")
    # A name of one word is no code: "id.html" is no Indonesian.
    for word in words if len(words) == 1 else words[1:]:
      if _is_code(word):
        yield word


def _is_code(word: str) -> bool:
  match = _CODE.fullmatch(word)
  return bool(match) and match[1].lower() in _CODES
