"""Markdown: tables that stay tables whatever the texts hold.

Needs no accelerator.
"""

import re

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import verdict
from moejax.reports import markdown as lib
from moejax.reports import words
from tests.reports import samples

_SAMPLES = ("conformant", "not_conformant", "unproven", "missing_tap",
            "degenerate", "large", "packed", "packed_wide")


def _cells(line: str) -> list[str]:
  """Splits a row as GitHub does: at pipes without a backslash."""
  return re.split(r"(?<!\\)\|", line.strip()[1:-1])


def _outside_code(text: str) -> str:
  """The text without its code spans."""
  return re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", text)


class MarkdownTest(parameterized.TestCase):

  @parameterized.parameters(*_SAMPLES)
  def test_every_row_has_the_columns_of_its_head(self, name):
    width, tables = None, 0
    for line in lib.render(getattr(samples, name)()).splitlines():
      if not line.startswith("|"):
        width = None
        continue
      if width is None:
        width, tables = len(_cells(line)), tables + 1
      self.assertLen(_cells(line), width, line)
    self.assertGreater(tables, 1)

  @parameterized.parameters(*_SAMPLES)
  def test_equal_reports_give_equal_bytes(self, name):
    make = getattr(samples, name)
    self.assertEqual(lib.render(make()), lib.render(make()))

  def test_the_verdict_is_the_heading(self):
    text = lib.render(samples.not_conformant())
    self.assertStartsWith(text, "# ≠ Not conformant (exit code 1)\n")

  def test_hostile_texts_stay_in_code_spans(self):
    text = lib.render(samples.not_conformant())
    self.assertIn("<script>", text)
    self.assertNotIn("script", _outside_code(text))
    # The fence is longer than any run of backticks inside.
    self.assertIn(f"``` {samples.HOSTILE} ```".replace("|", "\\|"), text)

  @parameterized.parameters("a|b", "a\\|b", "``", "`", " a ", "a\nb", "", "|")
  def test_any_prompt_keeps_its_row(self, prompt):
    report = samples.conformant()
    report["prompts"][0]["text"] = prompt
    text = lib.render(report)
    row = text.splitlines()[text.splitlines().index(
        "| Prompt | Ours | Reference | First differing token |"
    ) + 2]
    self.assertLen(_cells(row), 4)

  def test_markup_outside_code_is_escaped(self):
    report = samples.conformant()
    report["reference"]["transformers"] = "<b>*5*</b> [x](y) | #1"
    text = lib.render(report)
    self.assertIn(r"\<b\>\*5\*\</b\> \[x\](y) \| \#1", text)

  def test_the_first_difference_is_shown_with_its_clause(self):
    text = lib.render(samples.not_conformant())
    for part in (
        "`moe.experts.combine`, token 1, embed 2", "ours `0.75`",
        "4,194,304 ulp", "combine.accumulator: ours float32",
    ):
      self.assertIn(part, text)

  @parameterized.parameters(*verdict.ORDER)
  def test_every_verdict_has_its_words(self, state):
    report = samples.conformant()
    report["arithmetics"]["native"]["levels"]["L2"] = state
    row = next(line for line in lib.render(report).splitlines()
               if line.startswith("| L2 |"))
    self.assertIn(" ".join(words.VERDICTS[state]), row)

  def test_each_rule_stands_once_with_its_levels(self):
    text = lib.render(samples.conformant())
    self.assertEqual(text.count(": envelope: 2 x the largest"), 1)
    self.assertIn("- L1 native, L2 native, L3 native: envelope", text)

  def test_the_rule_of_a_single_tap_is_printed(self):
    report = samples.conformant()
    report["arithmetics"]["native"]["taps"][0]["rule"] = "a rule: its source"
    self.assertIn("- single taps: a rule: its source\n", lib.render(report))

  def test_illegal_exchanges_are_listed(self):
    report = samples.conformant()
    report["arithmetics"]["native"]["exchanges"][0]["legal"] = False
    text = lib.render(report)
    self.assertIn("0 legal, 1 not legal", text)
    self.assertIn("| `first` | prefill | experts, layer 1 |", text)

  def test_packed_experts_have_their_section(self):
    text = lib.render(samples.packed())
    self.assertIn("672 of 672 elements came from packed weights", text)
    self.assertIn("| 0 | 96 | 96 | 72 | 72 | 1,234 | 4,321 |", text)
    self.assertIn("| `w13.k_streams` | `2, added (c0 + c1)` | `1` |", text)
    self.assertIn("| reference | packed\\_words\\_digest | `11aa` |", text)
    text = lib.render(samples.packed_wide())
    self.assertIn("did NOT run packed", text)
    self.assertIn("| 0 | 96 | 96 | 71 | 72 | 1,234 | 4,321 |", text)
    self.assertIn("\\<b\\>23", text)

  def test_a_missing_tap_is_named(self):
    self.assertIn(
        "`layers.0.moe.experts.combine (not in reference)`",
        lib.render(samples.missing_tap()),
    )

  def test_long_tables_are_cut_and_say_so(self):
    text = lib.render(samples.large(48))
    self.assertIn("37 more rows stand in `report.html`.", text)
    self.assertNotIn("experts, layer 47", text)

  def test_chinese_is_shown_as_it_is(self):
    self.assertIn(f"`{samples.CHINESE}`", lib.render(samples.conformant()))


if __name__ == "__main__":
  absltest.main()
