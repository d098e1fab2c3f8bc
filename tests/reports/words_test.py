"""Words: every tap and clause has one, and numbers read as they are.

Needs no accelerator.
"""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import combine
from moejax.contracts import verdict
from moejax.protocols import taps
from moejax.reports import words as lib


class WordsTest(parameterized.TestCase):

  def test_every_tap_says_what_it_is(self):
    for tap in taps.TAPS:
      self.assertNotEmpty(lib.operation(tap), tap)

  def test_readable_names_are_unique(self):
    names = [lib.readable(tap) for tap in taps.TAPS]
    self.assertCountEqual(names, set(names))
    for group, name in names:
      self.assertNotEmpty(group)
      self.assertNotEmpty(name)

  def test_every_verdict_level_and_clause_has_words(self):
    self.assertEqual(set(lib.VERDICTS), set(verdict.ORDER))
    self.assertEqual(set(lib.MEANINGS), set(verdict.ORDER))
    self.assertEqual(set(lib.OVERALL), set(verdict.EXIT_CODES))
    self.assertEqual(tuple(lib.LEVELS), verdict.LEVELS)
    fields = {f.name for f in dataclasses.fields(combine.CombineContract)}
    self.assertEqual(set(lib.CLAUSES), fields - {"name"})

  def test_an_unknown_tap_has_no_words_but_a_name(self):
    self.assertEqual(lib.operation("new.thing_here"), "")
    self.assertEqual(lib.readable("new.thing_here"), ("new", "thing here"))

  @parameterized.parameters(
      (0, 10, "0 %"), (0, 0, "0 %"), (1, 10**6, "< 0.1 %"), (1, 1000, "0.1 %"),
      (999, 1000, "99 %"), (1000, 1000, "100 %"), (134, 320, "42 %"),
  )
  def test_a_hundred_percent_is_all(self, differing, elements, text):
    self.assertEqual(lib.share(differing, elements), text)

  @parameterized.parameters(
      (None, "–"), (float("nan"), "–"), (float("inf"), "∞"), (0.0, "0"),
      (0.00152767, "0.00153"), (4.02e-05, "4.02e-05"),
  )
  def test_numbers(self, value, text):
    self.assertEqual(lib.number(value), text)

  def test_plain_text_holds_no_command(self):
    self.assertEqual(lib.plain("a\x1b[1m\n\u202e晚"), "a\ufffd[1m \ufffd晚")

  def test_the_reference_is_named_with_its_version(self):
    about = {"backend": "transformers", "transformers": "5.24.0"}
    name = lib.reference_name({"reference": about})
    self.assertEqual(name, "transformers 5.24.0")
    about["capsule"] = True
    self.assertIn("from a capsule", lib.reference_name({"reference": about}))
    self.assertEqual(lib.reference_name({}), "the reference")


if __name__ == "__main__":
  absltest.main()
