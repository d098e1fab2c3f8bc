"""Manual pages (roff source with the man macros) to paragraphs.

A page is read line by line: requests that start with a dot, and text. Fonts
go, escapes become characters, paragraphs and listings stay. Left out: the
title, comments, definitions of macros, conditional parts, tables, equations,
and the sections that say who wrote the page or list its options in short
(`_LEFT_OUT`). Pages in the mdoc macros of BSD, whose words only a full macro
package can place, and pages that only include another page give nothing.

Layer: experiments.
"""

import re
import shlex

from experiments.corpus import paragraph

_LEFT_OUT = re.compile(
    r"synopsis|author|copyright|colophon|see also|report|history|resources"
    r"|conforming|availability|translat|license|version|library|attributes"
    r"|standards"
    r"|总览|总\s*览|概要|概述|语法|作者|版权|参见|参考|另见|跋|报告|历史|译者|翻译"
    r"|中文版|可用性|遵循|计划|维护|许可|摘要|相关|又见|更多信息",
    re.IGNORECASE,
)
_SKIP_UNTIL = {"TS": "TE", "EQ": "EN", "PS": "PE", "de": ".", "am": ".",
               "ig": ".", "de1": ".", "SY": "YS"}
_FONTS = frozenset("B I R SM SB BR RB BI IB IR RI UL".split())
_PARAGRAPH = frozenset("PP P LP HP sp RS RE IP TP TQ br".split())
_NAMED = {
    "em": "—", "en": "–", "hy": "-", "lq": "“", "rq": "”", "oq": "‘",
    "cq": "’", "dq": '"', "aq": "'", "bu": "•", "co": "©", "rg": "®",
    "tm": "™", "ti": "~", "ha": "^", "rs": "\\", "mc": "µ", "mu": "×",
    "->": "→", "<-": "←", "+-": "±", "<=": "≤", ">=": "≥", "!=": "≠",
    "de": "°", "ga": "`", "aa": "´", "at": "@", "sh": "#", "bv": "|",
    "ba": "|", "lB": "[", "rB": "]", "lC": "{", "rC": "}", "Do": "$",
    "Fo": "«", "Fc": "»", "fo": "‹", "fc": "›", "pl": "+", "eq": "=",
}
_ESCAPE = re.compile(
    r"\\(?:f(?:\[[^\]]*\]|\(..|.)|s[+-]?\d{1,2}|s\[[^\]]*\]"
    r"|[mFk](?:\[[^\]]*\]|\(..|.)"
    r"|[hvwoLlD]'[^']*'|n(?:\[[^\]]*\]|\(..|[+-]?.)"
    r"|\*(?P<string>\[[^\]]*\]|\(..|.)|\((?P<two>..)|\[(?P<long>[^\]]*)\]"
    r"|(?P<one>.)|$)"
)
_SINGLE = {"-": "-", "e": "\\", "\\": "\\", " ": " ", "0": " ", "~": " ",
           "'": "'", "`": "`", "t": " ", ".": ".", '"': ""}
_STRINGS = {"lq": "“", "rq": "”", "L\"": "“", "R\"": "”", "Aq": "'",
            "R": "®", "Tm": "™", "--": "—", "C+": "C++"}


def paragraphs(source: str) -> list[paragraph.Paragraph]:
  """Returns the paragraphs of a manual page."""
  if re.search(r"^\.\s*(Dd|Sh|so)\b", source, re.M):
    return []
  page = _Page()
  for line in _meant(source):
    page.line(line)
  page.flush()
  return page.found


def _meant(source: str):
  """Yields the lines that are text or requests of the page itself."""
  until, depth = None, 0
  for line in re.sub(r"\\\n", "", source).split("\n"):
    request = re.match(r"[.']\s*(\S+)?", line)
    name = request[1] if request else None
    if until:
      until = None if request and (name or "") == until else until
      continue
    if depth or (request and re.match(r"(if|ie|el|while)\b", name or "")):
      depth += line.count(r"\{") - line.count(r"\}")
      continue
    if name in _SKIP_UNTIL:
      until = _SKIP_UNTIL[name]
      continue
    yield re.sub(r'\\["#].*', "", line)


def _plain(text: str) -> str:
  def one(match):
    if match["string"]:
      return _STRINGS.get(match["string"].strip("[]("), "")
    if match["two"] or match["long"]:
      name = match["two"] or match["long"]
      code = re.fullmatch(r"u([0-9A-F]{4,6})", name)
      return chr(int(code[1], 16)) if code else _NAMED.get(name, "")
    return _SINGLE.get(match["one"] or "", "")

  return _ESCAPE.sub(one, text)


def _arguments(rest: str) -> list[str]:
  """Returns the arguments of a request; quotation marks hold blanks."""
  rest = rest.strip().replace(r"\ ", "\u00a0")
  lexer = shlex.shlex(rest, posix=True, punctuation_chars=False)
  lexer.whitespace_split, lexer.quotes = True, '"'
  lexer.escape = lexer.commenters = ""
  try:
    return list(lexer)
  except ValueError:  # A quotation mark without its partner.
    return rest.replace('"', "").split()


class _Page:
  """Paragraphs as they grow."""

  def __init__(self):
    self.found: list[paragraph.Paragraph] = []
    self._text: list[str] = []
    self._term: str | None = None
    self._listing = self._term_next = self._out = False
    self._bullet = self._heading_next = self._hanging = False

  def line(self, line: str) -> None:
    """Takes one line of the source."""
    request = re.match(r"[.'][ \t]*([^\s\\]*)(.*)", line)
    if not request:
      if not line.strip() and not self._listing:
        self.flush()
      else:
        self._add(_plain(line))
      return
    name, arguments = request[1], _arguments(request[2])
    if name in ("SH", "SS"):
      self._heading(name, " ".join(arguments))
    elif name in _FONTS:
      apart = "" if len(name) == 2 and name not in ("SM", "SB", "UL") else " "
      self._add(_plain(apart.join(arguments)))
    elif name in ("nf", "EX"):
      self.flush()
      self._listing = True
    elif name in ("fi", "EE"):
      self.flush()
      self._listing = False
    elif name in ("UR", "MT"):
      self._add(_plain(" ".join(arguments)))
    elif name in ("UE", "ME", "YS"):
      if arguments and self._text:
        self._text[-1] += arguments[0]
    elif name in _PARAGRAPH:
      if self._listing and name in ("sp", "br", "PP"):
        self._text.append("")
        return
      if name == "br" and self._term_next:
        return
      # A hanging paragraph with an indented one below is a term as well, and
      # so is a short one before an indented part, as DocBook writes them.
      text = " ".join(" ".join(self._text).split())
      if (name == "IP" and not arguments and self._hanging) or (
          name == "RS"
          and len(text) <= 60
          and not text.endswith((".", ":", ";", "。", "：", "；"))
      ):
        self._term, self._text = text or self._term, []
      self._hanging = name == "HP"
      self.flush()
      if name == "IP" and arguments:
        mark = _plain(arguments[0]).strip()
        self._bullet = mark in ("•", "*", "-", "o", "·", "+")
        self._term = None if self._bullet else mark
      self._term_next = name == "TP"

  def _heading(self, name: str, text: str) -> None:
    self.flush()
    self._listing = self._term_next = self._hanging = False
    if not text:
      self._heading_next = True
      return
    text = paragraph.make(paragraph.HEADING, _plain(text)).text
    if name == "SH":
      self._out = bool(_LEFT_OUT.search(text))
    if not self._out:
      self.found.append(paragraph.Paragraph(paragraph.HEADING, text))

  def _add(self, text: str) -> None:
    if self._heading_next:
      self._heading_next = False
      self._heading("SH", text)
    elif self._term_next:
      self._term, self._term_next = text.strip(), False
    else:
      self._text.append(text)

  def flush(self) -> None:
    """Ends a paragraph."""
    raw, self._text = "\n".join(self._text), []
    if not raw.strip():
      return
    term, self._term = self._term, None
    bullet, self._bullet = self._bullet, False
    if self._out:
      return
    if self._listing:
      made = paragraph.make(paragraph.LISTING, raw)
    else:
      kind = paragraph.ITEM if bullet else paragraph.TEXT
      made = paragraph.make(kind, raw)
    if term:
      colon = "：" if paragraph.count_cjk(made.text) else ": "
      made = paragraph.make(
          paragraph.TEXT, term.rstrip(":：") + colon + made.text
      )
    self.found.append(made)
