"""HTML to paragraphs: what a reader reads, without what leads around.

Left out: navigation, tables of contents, indices, footers, legal notices,
headers of authors and revisions, figures, formulas, forms, and tables but for
those that only lay out a note. Which elements these are is told by their tag
or by the class, id or role that the common writers of documentation give them
(DocBook, Sphinx, AsciiDoc, LibreOffice's help). Of words that LibreOffice's
help says differently for each system or program, the first is read.

Layer: experiments.
"""

import html.parser
import re

from experiments.corpus import paragraph

_VOID = frozenset(
    "area base br col embed hr img input link meta param source track wbr"
    .split()
)
_BLOCK = frozenset(
    "address article aside blockquote body center dd details div dl dt"
    " fieldset figure figcaption h1 h2 h3 h4 h5 h6 html li main ol p pre"
    " section table tbody td tfoot th thead tr ul".split()
)
_LEFT_OUT_TAGS = frozenset(
    "aside button canvas figure footer form head header iframe label math nav"
    " noscript object script select style svg template textarea".split()
)
# Words of class, id and role.
_LEFT_OUT = frozenset(
    "MAC admonition-title affiliation author authorgroup authors banner"
    " bibliography breadcrumb breadcrumbs caption citation colophon contents"
    " copyright debug docnav embeddedfile equation figure footer footnote"
    " footnotes genindex header headerlink howtoget imageblock index"
    " indexterm legalnotice linenos list-of-examples list-of-figures"
    " list-of-tables lot math mediaobject nav navfooter navheader navigation"
    " noscript pubdate relatedtopics related relations releaseinfo revhistory"
    " search sig sphinxsidebar tableblock toc toctree-wrapper viewcode-link"
    .split()
)
_NOTE = frozenset(
    "admonitionblock caution important note tip warning".split()
)
_HEADINGS = frozenset("h1 h2 h3 h4 h5 h6".split())
# "3.1. ", "Chapter 3. ", "第 3 章 ", "附录 A. "
_NUMBER = re.compile(
    r"^((Chapter|Appendix|Part|Section|附录|部分)\s*)?"
    r"([A-Z0-9]+\.)+([0-9]+)?\s+|^第\s*\S{1,3}\s*[章节部分]+[.:：、]?\s*"
)


def paragraphs(source: str) -> list[paragraph.Paragraph]:
  """Returns the paragraphs of an HTML document.

  A term of a definition list and its first paragraph become one, "term: text".
  Numbers of headings go, because they point into a book that is not whole any
  more.
  """
  reader = _Reader()
  reader.feed(source)
  reader.close()
  reader.flush()
  reader.flush_term()
  return reader.found


class _Reader(html.parser.HTMLParser):
  """Collects text until a block starts or ends."""

  def __init__(self):
    super().__init__(convert_charrefs=True)
    self.found: list[paragraph.Paragraph] = []
    self._open: list[tuple[str, bool, bool]] = []  # tag, left out, a note
    self._text: list[str] = []
    self._bullet = False
    self._terms: list[str] = []
    self._switched = False  # One of several readings was taken.

  def handle_starttag(self, tag, attrs):
    if tag in _BLOCK:
      self.flush()
    if tag in _VOID:
      if tag == "br":
        self._text.append("\n")
      return
    # Some writers leave these open.
    if tag in ("p", "li", "dt", "dd") and self._open:
      if self._open[-1][0] in ("p", tag):
        self._open.pop()
    attributes = dict(attrs)
    words = set()
    for name in ("class", "id", "role"):
      words |= set((attributes.get(name) or "").split())
    _, out, note = self._open[-1] if self._open else ("", False, False)
    note = note or bool(words & _NOTE)
    out = out or tag in _LEFT_OUT_TAGS or (tag == "table" and not note)
    # A whole page may be of class "index" or "note"; its body is still text.
    out = out or (tag not in ("html", "body") and bool(words & _LEFT_OUT))
    if "switchinline" in words:
      self._switched = False
    elif "hidden" in attributes and tag == "span" and not out:
      out, self._switched = self._switched, True
    self._open.append((tag, out, note))
    if tag == "li":
      self._bullet = True

  def handle_endtag(self, tag):
    if tag in _BLOCK:
      self.flush()
    for place in range(len(self._open) - 1, -1, -1):
      if self._open[place][0] == tag:
        del self._open[place:]
        return

  def handle_data(self, data):
    if not (self._open and self._open[-1][1]):
      self._text.append(data)

  def flush(self):
    """Ends a paragraph."""
    raw, self._text = "".join(self._text), []
    if not raw.strip():
      return
    tags = [tag for tag, *_ in self._open]
    if "pre" in tags:
      self.flush_term()
      self.found.append(paragraph.make(paragraph.LISTING, raw))
      return
    if _HEADINGS & set(tags):
      self.flush_term()
      text = paragraph.make(paragraph.HEADING, raw).text
      self.found.append(
          paragraph.Paragraph(paragraph.HEADING, _NUMBER.sub("", text))
      )
      return
    made = paragraph.make(paragraph.TEXT, raw)
    text = made.text
    if tags and tags[-1] == "dt":
      self._terms.append(text.rstrip(":："))
      return
    if self._terms:
      colon = "：" if paragraph.count_cjk(text) else ": "
      text = ", ".join(self._terms) + colon + text
      self._terms = []
    kind = paragraph.ITEM if self._bullet and "li" in tags else made.kind
    self._bullet = False
    self.found.append(paragraph.Paragraph(kind, text))

  def flush_term(self):
    """A term that no text follows is a paragraph of its own."""
    for term in self._terms:
      self.found.append(paragraph.Paragraph(paragraph.TEXT, term))
    self._terms = []
