"""The one sentence: it names the reason, in words.

Needs no accelerator.
"""

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import verdict
from moejax.reports import headline as lib
from tests.reports import samples


class SentenceTest(parameterized.TestCase):

  @parameterized.parameters(
      ("conformant", "every compared value has the same bits, and in native"),
      ("not_conformant", "the sum of the experts' outputs"),
      ("not_conformant", "contract transformers_eager and we follow"),
      ("unproven", "2 uncertain elements of our side were not computed"),
      ("missing_tap", "1 tap of portable arithmetic is on one side only"),
      ("packed", "compute the same thing"),
      ("packed_wide", "did not run its packed experts packed, whatever it"
       " computed: portable: layer 0, step 1: <b>23</b>"),
      ("degenerate", "(L0, L1, L2, L3, L4 of portable arithmetic)"),
  )
  def test_it_names_the_reason(self, name, part):
    text = lib.sentence(getattr(samples, name)())
    self.assertIn(part, text)
    self.assertEndsWith(text, ".")
    self.assertEqual(text.count(". "), 0)

  def test_clauses_that_are_no_combines_are_named(self):
    report = samples.not_conformant()
    first = report["arithmetics"]["portable"]["first_difference"]
    first["clause"] = "w13.k_streams: ours 2, reference 1; w13.k_step: a, b"
    self.assertIn(
        "where the contracts differ in w13.k_streams and w13.k_step.",
        lib.sentence(report),
    )

  def test_a_native_failure_names_the_first_tap_beyond_its_rule(self):
    report = samples.conformant()
    report["verdict"] = verdict.NOT_CONFORMANT
    part = report["arithmetics"]["native"]
    part["levels"]["L4"] = verdict.BEYOND_RULE
    part["taps"][3]["verdict"] = verdict.BEYOND_RULE
    self.assertIn(
        "1 tap of 12 lies beyond its rule, the first at the choice of experts"
        " (moe.router.ids, layer 0)",
        lib.sentence(report),
    )

  def test_a_level_without_a_tap_is_named(self):
    report = samples.conformant()
    report["verdict"] = verdict.NOT_CONFORMANT
    report["arithmetics"]["native"]["levels"]["L0"] = verdict.BEYOND_RULE
    self.assertIn("token ids and text", lib.sentence(report))

  def test_an_uncaptured_level_is_incomplete(self):
    report = samples.conformant()
    report["verdict"] = verdict.INCOMPLETE
    report["arithmetics"]["native"]["levels"]["L4"] = verdict.MISSING
    self.assertIn("level L4 of native arithmetic", lib.sentence(report))


if __name__ == "__main__":
  absltest.main()
