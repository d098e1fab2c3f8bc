"""A paragraph of a document, and the characters it may hold.

Layer: experiments.
"""

import dataclasses
import re
import unicodedata

HEADING = "heading"
TEXT = "text"
ITEM = "item"  # of a list
LISTING = "listing"  # commands and code; its lines are kept

_CJK = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_CJK_OR_MARK = f"[{_CJK}\u3000-\u303f\uff00-\uffef\u2018-\u201d\u2026]"
# Invisible or control; the replacement character stays, so that it is seen.
_NO_CHARACTER = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\ufeff\ue000-\uf8ff]"
)
_BULLET = re.compile("[•‣∙●▪◦] *")
_BETWEEN_CJK = re.compile(f"(?<={_CJK_OR_MARK}) +(?={_CJK_OR_MARK})")


@dataclasses.dataclass(frozen=True)
class Paragraph:
  """One paragraph: its kind and its text in NFC."""

  kind: str
  text: str


def make(kind: str, text: str) -> Paragraph:
  """Normalises white space and characters.

  Control, invisible and private characters are dropped. A listing keeps its
  lines, without common indentation; elsewhere white space becomes one blank,
  and none at all between two Chinese characters, where it only comes from the
  line width of a source. A text that starts with a bullet is an item.
  """
  text = unicodedata.normalize("NFC", text.replace("\r\n", "\n"))
  text = text.replace("\u2028", "\n").replace("\u2029", "\n")
  text = _NO_CHARACTER.sub("", text.replace("\t", "    "))
  if kind == LISTING:
    lines = [re.sub(r"\s", " ", line).rstrip() for line in text.split("\n")]
    indents = [len(x) - len(x.lstrip()) for x in lines if x]
    cut = min(indents, default=0)
    return Paragraph(kind, "\n".join(x[cut:] for x in lines).strip("\n"))
  text = _BETWEEN_CJK.sub("", " ".join(text.split()))
  bullet = _BULLET.match(text)
  if bullet and kind != HEADING:
    return Paragraph(ITEM, text[bullet.end() :])
  return Paragraph(kind, text)


def count_cjk(text: str) -> int:
  """Returns the number of Chinese characters, marks not counted."""
  return len(re.findall(f"[{_CJK}]", text))


def cjk_share(text: str) -> float:
  """Returns the share of Chinese characters in the letters of a text."""
  letters = sum(map(str.isalpha, text))
  return count_cjk(text) / letters if letters else 0.0


def join(paragraphs: list[Paragraph]) -> str:
  """Returns a document: paragraphs apart by one empty line, items by none."""
  text, last = "", None
  for paragraph in paragraphs:
    mark = "- " if paragraph.kind == ITEM else ""
    gap = "\n" if last == paragraph.kind == ITEM else "\n\n"
    text += (gap if text else "") + mark + paragraph.text
    last = paragraph.kind
  return text + "\n"
