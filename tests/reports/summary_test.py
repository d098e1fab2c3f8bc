"""The summary: ten lines, whatever the report holds.

Needs no accelerator.
"""

import io

from absl.testing import absltest
from absl.testing import parameterized
import rich.console

from moejax.contracts import verdict
from moejax.reports import summary as lib
from moejax.reports import words
from tests.reports import samples

_SAMPLES = ("conformant", "not_conformant", "unproven", "missing_tap",
            "degenerate", "large", "packed", "packed_wide")


def _shown(report, width=200) -> str:
  console = rich.console.Console(file=io.StringIO(), width=width)
  lib.show(report, console)
  return console.file.getvalue()


class SummaryTest(parameterized.TestCase):

  @parameterized.parameters(*_SAMPLES)
  def test_there_are_ten_lines_of_printable_text(self, name):
    lines = lib.lines(getattr(samples, name)())
    self.assertLen(lines, 10)
    for line in lines:
      self.assertTrue(line.isprintable(), line)

  @parameterized.parameters(*words.OVERALL)
  def test_the_verdict_comes_first(self, state):
    report = {**samples.conformant(), "verdict": state, "exit_code": 7}
    first = lib.lines(report)[0]
    self.assertIn(words.OVERALL[state][1], first)
    self.assertIn("exit code 7", first)

  def test_levels_difference_contract_and_certificate_are_told(self):
    text = "\n".join(lib.lines(samples.not_conformant()))
    for part in (
        "L4 beyond rule", "layers.1.moe.experts.combine",
        "[token 1, embed 2]", "ours 0.75, reference 0.5",
        "accumulator float32 / bfloat16", "1 of them legal",
        "0 of 2 the same in portable", "12,345 elements",
    ):
      self.assertIn(part, text)

  @parameterized.parameters(*verdict.ORDER)
  def test_every_verdict_has_its_words(self, state):
    report = samples.conformant()
    report["arithmetics"]["native"]["levels"]["L2"] = state
    self.assertIn(f"L2 {words.VERDICTS[state][1]}", lib.lines(report)[4])

  def test_an_arithmetic_that_was_not_run_is_said_to_be(self):
    report = samples.conformant()
    del report["arithmetics"]["portable"]
    self.assertIn("not run", lib.lines(report)[3])

  def test_packed_experts_are_said_to_have_run_packed_or_not(self):
    for name, text in (
        ("packed", "the experts ran packed (marlin_moe_hopper, pallas): 672 of"
         " 672 elements came from packed weights"),
        ("packed_wide", "the experts did NOT run packed"),
    ):
      line = lib.lines(getattr(samples, name)())[2]
      self.assertIn("transformers 5.24.0 over the weights made wide", line)
      self.assertIn(text, line)

  def test_a_prompt_cannot_write_to_the_terminal(self):
    report = samples.not_conformant()
    first = report["arithmetics"]["portable"]["first_difference"]
    first["prompt"] = "a\x1b[31mb\nc\r[bold]d[/bold]:smile:"
    lines = lib.lines(report)
    self.assertLen(lines, 10)
    self.assertNotIn("\x1b", "".join(lines))
    shown = _shown(report)
    self.assertNotIn("\x1b", shown)
    self.assertIn("[bold]d[/bold]:smile:", shown)

  @parameterized.parameters(*_SAMPLES)
  def test_the_frame_holds_the_same(self, name):
    report = getattr(samples, name)()
    shown = _shown(report, width=500)
    for line in lib.lines(report):
      self.assertIn(line[12:], shown)

  def test_a_narrow_terminal_loses_nothing(self):
    shown = _shown(samples.not_conformant(), width=60)
    self.assertLessEqual(max(map(len, shown.splitlines())), 60)
    squeezed = "".join(c for c in shown if c not in "│ \n")
    self.assertIn("layers.1.moe.experts.combine", squeezed)


if __name__ == "__main__":
  absltest.main()
