"""From sources to paragraphs: what stays of HTML, of manual pages, of text."""

import random

from absl.testing import absltest
from absl.testing import parameterized

from experiments.corpus import clean
from experiments.corpus import duplicates
from experiments.corpus import html_text
from experiments.corpus import paragraph
from experiments.corpus import roff_text
from tests.experiments.corpus import made_up

_LONG = "One two three four five six seven eight nine ten."
_WORDS = [f"w{chr(97 + i)}" for i in range(20)]


def _pairs(paragraphs):
  return [(x.kind, x.text) for x in paragraphs]


class HtmlTest(parameterized.TestCase):

  @parameterized.parameters(
      "<nav>out</nav>",
      "<p class='author'>out",
      "<div class='toc'><p>out<ul><li>out</li></ul></div>",
      "<div class='navheader'><table><tr><td>out</table></div>",
      "<div id='footer'>out</div>",
      "<div role='navigation'>out</div>",
      "<script>out</script><style>out</style>",
      "<table><tr><td>out</td></tr></table>",
      "<ul class='docnav'><li>out</li></ul>",
      "<head><title>out</title></head>",
      "<span hidden class='MAC'>x</span>".replace("hidden", "id='MAC'"),
  )
  def test_what_leads_around_is_left_out(self, part):
    source = f"<html><body><p>Before.</p>{part}<p>After.</p></body></html>"
    self.assertEqual(
        _pairs(html_text.paragraphs(source)),
        [("text", "Before."), ("text", "After.")],
    )

  def test_kinds(self):
    source = """<body class="index"><h2>3.1. The <code>ls</code> command<a
      class="headerlink">P</a></h2><p>A <b>bold</b>
      &amp; plain text.<ul><li><p>One</p><p>more</p><li>Two</ul>
      <dl><dt>-a</dt><dt>-b</dt><dd>All.</dd></dl>
      <dl><dt>-c</dt><dd>全部。</dd></dl>
      <pre>  a\n    b &lt; c\n</pre>
      <div class="note"><table><tr><td>A note.</td></tr></table></div>"""
    self.assertEqual(_pairs(html_text.paragraphs(source)), [
        ("heading", "The ls command"),
        ("text", "A bold & plain text."),
        ("item", "One"),
        ("text", "more"),
        ("item", "Two"),
        ("text", "-a, -b: All."),
        ("text", "-c：全部。"),
        ("listing", "a\n  b < c"),
        ("text", "A note."),
    ])

  def test_of_several_readings_the_first_is_read(self):
    source = (
        "<p>Press <span class='switchinline'><span hidden='true' class='MAC'>"
        "Command</span><span hidden='true' class='A'>Ctrl</span><span"
        " hidden='true'>Ctrl</span></span>+A, <span class='switchinline'><span"
        " hidden='true'>then</span></span> B.</p>"
    )
    self.assertEqual(
        _pairs(html_text.paragraphs(source)),
        [("text", "Press Ctrl+A, then B.")],
    )

  def test_chinese_lines_are_joined_without_blanks(self):
    made = html_text.paragraphs("<p>系统\n  文件，\n目录 ls 命令</p>")
    self.assertEqual(_pairs(made), [("text", "系统文件，目录 ls 命令")])


class RoffTest(parameterized.TestCase):

  def test_a_page(self):
    source = r"""'\" t
.\" A comment
.TH LS 1 2020
.SH NAME
ls \- list \fIfiles\fP
.SH SYNOPSIS
.B ls
.SH DESCRIPTION
.BR ls (1)
shows \(lqall\(rq files.\" not this
.PP
A second
paragraph with \s-1POSIX\s0 and a backslash \e.
.TP
.BR \-a ", " \-\-all
everything
.TP 4
\fB\-b\fR
more
.IP \(bu 2
a point
.HP
\fB\-c\fP
.IP
hanging
.PP
\fB\-\-long\fR
.RS 4
as DocBook has it.
.RE
.nf
$ ls
  a b
.fi
.TS
l l.
out	out
.TE
.de XX
out
..
.ie n \{\
out
.\}
.el out
.if t out
.if n \{
out
.\}
.SS 选项
.B 中文
说明。
.SH AUTHOR
out
.SS out
out
"""
    self.assertEqual(_pairs(roff_text.paragraphs(source)), [
        ("heading", "NAME"),
        ("text", "ls - list files"),
        ("heading", "DESCRIPTION"),
        ("text", "ls(1) shows “all” files."),
        ("text", "A second paragraph with POSIX and a backslash \\."),
        ("text", "-a, --all: everything"),
        ("text", "-b: more"),
        ("item", "a point"),
        ("text", "-c: hanging"),
        ("text", "--long: as DocBook has it."),
        ("listing", "$ ls\n  a b"),
        ("heading", "选项"),
        ("text", "中文说明。"),
    ])

  @parameterized.parameters(".so man1/ls.1\n", ".Dd today\n.Sh NAME\n.Nm ls\n")
  def test_pages_that_give_nothing(self, source):
    self.assertEmpty(roff_text.paragraphs(source))


class CleanTest(parameterized.TestCase):

  @parameterized.parameters(
      ("text", "Permission is granted to copy and change this text.", "en"),
      ("text", "Copyright © 2001 A. Writer and friends of hers.", "en"),
      ("text", "版权所有，请按照通用公共许可证使用本文件。", "zh"),
      ("text", "So see https://example.org/a/very/long/address.html.", "en"),
      ("text", "0x00 0x01 -- 12 34 56 78 == ## %% && ||", "en"),
      ("text", "上一页", "zh"),
      ("text", "Next", "en"),
      ("text", "three short words", "en"),
      ("text", "An untranslated sentence in a Chinese book.", "zh"),
      ("text", "An English sentence with 中文 in it.", "en"),
      ("text", "A damaged \ufffd sentence of some words.", "en"),
      ("heading", "An untranslated heading", "zh"),
      ("listing", "a\nb\nc\nd\ne", "en"),
      ("listing", "word " * 60, "en"),
  )
  def test_what_goes(self, kind, text, language):
    made = paragraph.make(kind, text)
    self.assertFalse(clean.is_text(made, language))

  @parameterized.parameters(
      ("text", "A sentence of some plain words.", "en"),
      ("text", "See https://example.org for all the other ways.", "en"),
      ("text", "使用 apt install 命令安装软件包。", "zh"),
      ("heading", "SSH", "zh"),
      ("heading", "Options", "en"),
      ("listing", "# apt install hello", "zh"),
  )
  def test_what_stays(self, kind, text, language):
    self.assertTrue(clean.is_text(paragraph.make(kind, text), language))

  def test_headings_without_text_go(self):
    text = paragraph.make("text", _LONG * 10)
    made = [paragraph.make("heading", x) for x in ("Aa", "Bb", "Cc", "Dd")]
    self.assertEqual(
        clean.document([*made[:3], text, made[3]], "en"),
        [made[1], made[2], text],
    )
    made = [paragraph.make("heading", x) for x in ("ERRORS", "NOTES")]
    label = paragraph.make("text", "Syntax:")
    self.assertEqual(
        clean.document([*made, text, label, made[1]], "en"), [made[1], text]
    )

  def test_a_licence_with_words_between_goes_whole(self):
    licence = paragraph.make("text", "The GNU General Public License says so.")
    text = paragraph.make("text", _LONG * 3)
    self.assertLen(clean.document([licence] * 3 + [text] * 9, "en"), 9)
    self.assertEmpty(clean.document([licence] * 4 + [text] * 9, "en"))

  def test_a_document_of_another_language_or_too_short_goes(self):
    rng = random.Random(0)
    english = [paragraph.make("text", made_up.english(rng, 90))]
    chinese = [paragraph.make("text", made_up.chinese(rng, 200))]
    self.assertEqual(clean.document(english, "en"), english)
    self.assertEqual(clean.document(chinese, "zh"), chinese)
    self.assertEqual(clean.document(chinese + english, "zh"), chinese)
    self.assertEmpty(clean.document(chinese + 4 * english, "zh"))
    self.assertEmpty(clean.document(english, "zh"))
    self.assertEmpty(clean.document(chinese, "en"))
    self.assertEmpty(clean.document([paragraph.make("text", _LONG)], "en"))

  def test_invisible_characters_go_and_forms_are_composed(self):
    self.assertEqual(
        paragraph.make("text", "e\u0301\u200b  a\xa0b\x07").text, "é a b"
    )

  def test_items_follow_each_other_closely(self):
    made = [paragraph.make(k, k) for k in ("text", "item", "item", "text")]
    self.assertEqual(paragraph.join(made), "text\n\n- item\n- item\n\ntext\n")


class DuplicatesTest(parameterized.TestCase):

  @parameterized.parameters(
      (" ".join(_WORDS).upper() + "!", False),  # the same units
      (" ".join(_WORDS + ["x", "y", "z"]), False),  # 13 of 16 runs are known
      (" ".join(_WORDS + ["x", "y", "z", "u"]), True),  # 13 of 17
      (" ".join(_WORDS[::-1]), True),  # none
      (" ".join(_WORDS[:7]), True),  # too short to be looked up
  )
  def test_against_a_paragraph_of_20_units(self, text, stays):
    seen = duplicates.Filter()
    seen.document([paragraph.make("text", " ".join(_WORDS))])
    text = paragraph.make("text", text)
    self.assertEqual(bool(seen.document([text])), stays)
    self.assertEqual(seen.removed, int(not stays))

  def test_numbers_do_not_make_a_paragraph_new(self):
    seen = duplicates.Filter()
    text = "Version {} of it came out after {} days of long work by all."
    made = [paragraph.make("text", text.format(i, 7 * i)) for i in (1, 23)]
    self.assertEqual(seen.document(made), made[:1])

  def test_chinese_characters_are_units(self):
    self.assertEqual(
        duplicates.units("系统ls，2 文"), ("系", "统", "ls", "0", "文")
    )

  def test_short_ones_repeat_in_other_documents_only(self):
    seen = duplicates.Filter()
    options = paragraph.make("heading", "Options")
    self.assertEqual(seen.document([options, options]), [options])
    self.assertEqual(seen.document([options]), [options])


if __name__ == "__main__":
  absltest.main()
