"""Which paragraphs of a document are text that one would want to learn from.

Layer: experiments.
"""

import re

from experiments.corpus import paragraph
from experiments.corpus import place

# A Chinese document has at least this share of Chinese characters among its
# letters, each of its paragraphs the second; English ones at most the third.
# Technical Chinese is full of commands, hence far from 1.
_CJK_DOCUMENT, _CJK_PARAGRAPH, _CJK_IN_ENGLISH = 0.25, 0.2, 0.01
_MIN_CHARACTERS = {place.EN: 400, place.ZH: 150}
# Of a paragraph without its blanks, at least so much is letters.
_LETTERS = {paragraph.LISTING: 0.4, paragraph.HEADING: 0.4}
_OTHER_LETTERS = 0.65
# A document of at least so many licence paragraphs, and of this share of them,
# is a licence with some words between; one of this share of ways through menus
# is an index of them.
_LICENCE_COUNT, _LICENCE_SHARE, _MENU_SHARE = 4, 0.1, 0.5
_LABEL = 16
_LISTING_LINES, _LISTING_CHARACTERS = 4, 240
_LICENCE = re.compile(
    r"copyright\s*(©|\(c\)|:|\d)|©|general public licen[cs]e|free documentation"
    r" licen[cs]e|creative commons|all rights reserved|redistribut\w+ it"
    r"|permission is (hereby )?granted|without (any )?warranty|free software"
    r" foundation|verbatim copies|warrant(y|ies) of|mozilla public|this (file|"
    r"page|manual|document|book) (is|may be|was) (licen[cs]ed|distributed)"
    r"|版权所有|版权声明|版权归|通用公共许可|公共许可证|自由文档许可|知识共享"
    r"|自由软件基金会|不提供任何担保|没有任何担保"
    r"|许可协议|保留所有权利",
    re.IGNORECASE,
)
_TRANSLATION = re.compile(
    r"此文件的目的是为让中文读者|如果您对此文件有任何意见|^原文|^:?Original[:：]"
    r"|^(翻译|校译|译者|中文版维护者|时间)[:：]|^校译"
    r"|man 手册页计划|新浪微博|QQ"
    r"|translat(ed|ion|or)s? (by|of this|team)|last (updated|modified)",
    re.IGNORECASE,
)
_LEADS_ON = re.compile(
    r"(previous|prev|next|up|home|contents?|table of contents|index|top|back"
    r"|note|warning|tip|caution|important|example|see also|related topics"
    r"|上一页|下一页|上一级|起始页|目录|索引|注意|警告|提示|小心|重要|示例|参见"
    r"|另请参阅|相关主题|备注|注)[\s:：.|\d-]*",
    re.IGNORECASE,
)
_ADDRESS = re.compile(
    r"(https?|ftp|mailto|git|irc)[:：]\S*[\w/]|www\.\S*[\w/]"
    r"|[\w.+-]+@[\w-]+\.[\w.-]*\w",
    re.IGNORECASE,
)
_MENU = re.compile(
    r"(Choose|In|From|On|Open|Click|选择|打开|点击|在)"
    r".{1,60} [-–] .*"
)
_NAME = re.compile(r"(name|名称|名字|命令名)", re.IGNORECASE)
_ENDS = re.compile(r"[.!?:;…。！？：；]['\")\]”’）」』]*$")


def document(
    paragraphs: list[paragraph.Paragraph], language: str
) -> list[paragraph.Paragraph]:
  """Returns the paragraphs that stay, or none if the document is no use.

  The document goes if its share of Chinese characters does not fit its
  language, if it is a licence or an index of menus, or if what stays is too
  short. A heading that no text follows goes as well.
  """
  whole = " ".join(x.text for x in paragraphs if x.kind != paragraph.LISTING)
  share = paragraph.cjk_share(whole)
  if share < _CJK_DOCUMENT if language == place.ZH else (
      share > _CJK_IN_ENGLISH
  ):
    return []
  licence = sum(bool(_LICENCE.search(x.text)) for x in paragraphs)
  menus = sum(bool(_MENU.fullmatch(x.text)) for x in paragraphs)
  if licence >= max(_LICENCE_COUNT, _LICENCE_SHARE * len(paragraphs)):
    return []
  if menus > _MENU_SHARE * len(paragraphs):
    return []
  kept = _with_text([x for x in paragraphs if is_text(x, language)])
  if sum(len(x.text) for x in kept) < _MIN_CHARACTERS[language]:
    return []
  return kept


def is_text(x: paragraph.Paragraph, language: str) -> bool:
  """Whether a paragraph stays.

  It goes if it is empty, of another language, part of a licence or of
  navigation, mostly addresses, mostly something else than letters, a listing
  of more than 4 lines or 240 characters, or a scrap of text: English of fewer
  than four words or Chinese of fewer than four characters that no mark ends.
  """
  text = x.text
  solid = "".join(text.split())
  # The replacement character stands for bytes that were no text.
  if not solid or "\ufffd" in text or _LICENCE.search(text):
    return False
  if _LEADS_ON.fullmatch(text) or _TRANSLATION.search(text):
    return False
  letters = sum(map(str.isalpha, solid)) / len(solid)
  if letters < _LETTERS.get(x.kind, _OTHER_LETTERS):
    return False
  cjk = paragraph.count_cjk(text)
  if language == place.EN and cjk:
    return False
  if x.kind == paragraph.LISTING:
    return (
        text.count("\n") < _LISTING_LINES and len(text) <= _LISTING_CHARACTERS
    )
  if language == place.ZH and paragraph.cjk_share(text) < _CJK_PARAGRAPH:
    # Names of commands and programs head sections in Chinese books, too.
    return x.kind == paragraph.HEADING and len(text.split()) == 1
  addresses = sum(len(match[0]) for match in _ADDRESS.finditer(text))
  if addresses > 0.5 * len(text):
    return False
  if x.kind == paragraph.HEADING:
    return len(text) <= 120
  return bool(_ENDS.search(text)) or (
      cjk >= 4 if language == place.ZH else len(text.split()) >= 4
  )


def _with_text(
    paragraphs: list[paragraph.Paragraph],
) -> list[paragraph.Paragraph]:
  """Drops headings that no text follows.

  Of a row of headings the last two may be a chapter and its section, but not
  in capitals, as manual pages have them: these stand side by side. A label
  ("Syntax:") counts as one.
  """
  kept, headings = [], []
  for x in paragraphs:
    if x.kind == paragraph.HEADING or (
        len(x.text) <= _LABEL and x.text.endswith((":", "："))
    ):
      if x.text.isupper():
        headings = []
      headings = [y for y in headings if not _NAME.fullmatch(y.text)] + [x]
      continue
    kept += [*headings[-2:], x]
    headings = []
  return kept
