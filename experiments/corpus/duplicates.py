"""Paragraphs that were there before, exactly or nearly.

A paragraph is read as its units: Chinese characters and words of other
letters, in small letters, each run of digits as one 0. Marks do not count.

- It was there if, of its runs of 8 units, at least 80 in 100 occurred in
  earlier paragraphs of the corpus that stayed, all of them together; so
  certainly if an earlier paragraph had the same units.
- A paragraph of fewer than 8 units (a heading such as "Options") was there if
  its document had one of the same units. Repeating it elsewhere is how such
  documents are written.

Runs are compared by 64 bits of BLAKE2b.

Layer: experiments.
"""

import hashlib
import re

from experiments.corpus import paragraph

RUN = 8
NEAR = 0.8
_UNIT = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]|0|[^\\W\\d_\u3400"
                   "-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+")


def units(text: str) -> tuple[str, ...]:
  """Returns the units of a text."""
  return tuple(_UNIT.findall(re.sub(r"\d+", "0", text.lower())))


class Filter:
  """Remembers the paragraphs of a corpus."""

  def __init__(self):
    self._runs: set[int] = set()
    self.removed = 0

  def document(
      self, paragraphs: list[paragraph.Paragraph]
  ) -> list[paragraph.Paragraph]:
    """Returns the paragraphs that are new, and remembers them."""
    kept, short = [], set()
    for x in paragraphs:
      if self._is_new(units(x.text), short):
        kept.append(x)
      else:
        self.removed += 1
    return kept

  def _is_new(self, found: tuple[str, ...], short: set) -> bool:
    if len(found) < RUN:
      new = found not in short
      short.add(found)
      return new
    runs = {
        _digest(found[place : place + RUN])
        for place in range(len(found) - RUN + 1)
    }
    known = len(runs & self._runs)
    if known >= NEAR * len(runs):
      return False
    self._runs |= runs
    return True


def _digest(found: tuple[str, ...]) -> int:
  data = "\x1f".join(found).encode()
  return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
