"""JUnit: right counts, failures and errors where they belong.

Needs no accelerator.
"""

from xml.etree import ElementTree

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import verdict
from moejax.reports import junit as lib
from tests.reports import samples

_SAMPLES = ("conformant", "not_conformant", "unproven", "missing_tap",
            "degenerate", "large", "packed", "packed_wide")


def _case(root, group: str, name: str) -> ElementTree.Element:
  (found,) = [
      c for c in root.iter("testcase")
      if (c.get("classname"), c.get("name")) == (group, name)
  ]
  return found


class JunitTest(parameterized.TestCase):

  @parameterized.parameters(*_SAMPLES)
  def test_counts_are_those_of_the_cases(self, name):
    report = getattr(samples, name)()
    root = ElementTree.fromstring(lib.render(report))
    self.assertEqual(root.tag, "testsuites")
    self.assertLen(list(root), len(report["arithmetics"]))
    for element in (root, *root):
      cases = list(element.iter("testcase"))
      self.assertEqual(int(element.get("tests")), len(cases))
      for kind in ("failure", "error"):
        self.assertEqual(
            int(element.get(f"{kind}s")),
            sum(c.find(kind) is not None for c in cases),
        )

  @parameterized.parameters(*_SAMPLES)
  def test_each_level_tap_and_certificate_has_one_case(self, name):
    report = getattr(samples, name)()
    root = ElementTree.fromstring(lib.render(report))
    for suite, (arithmetic, part) in zip(root, report["arithmetics"].items()):
      certificates = len(report["certificates"]) * (arithmetic == "portable")
      cases = 5 + len(part["taps"]) + certificates + ("packed" in report)
      self.assertLen(list(suite), cases)
      names = [(c.get("classname"), c.get("name")) for c in suite]
      self.assertCountEqual(names, set(names))

  @parameterized.parameters(*_SAMPLES)
  def test_ci_is_green_exactly_if_the_report_conforms(self, name):
    report = getattr(samples, name)()
    root = ElementTree.fromstring(lib.render(report))
    bad = int(root.get("failures")) + int(root.get("errors"))
    self.assertEqual(bad == 0, report["verdict"] == verdict.CONFORMANT)

  def test_beyond_the_rule_is_a_failure_with_the_numbers(self):
    root = ElementTree.fromstring(lib.render(samples.not_conformant()))
    case = _case(
        root, "conformance.portable.L4", "layers.1.moe.experts.combine"
    )
    message = case.find("failure").get("message")
    for part in ("2 of 12 elements", "4194304 ulp", "largest difference 0.25"):
      self.assertIn(part, message)
    self.assertEqual(case.find("failure").text, "rule: same bits")

  @parameterized.parameters(
      (verdict.SAME_BITS, []), (verdict.WITHIN_RULE, []),
      (verdict.BEYOND_RULE, ["failure"]), (verdict.MISSING, ["error"]),
      (verdict.UNSUPPORTED, ["error"]),
  )
  def test_no_verdict_is_skipped(self, state, children):
    report = samples.conformant()
    report["arithmetics"]["native"]["levels"]["L3"] = state
    report["arithmetics"]["native"]["taps"][0]["verdict"] = state
    root = ElementTree.fromstring(lib.render(report))
    for group, name in (
        ("conformance.native.levels", "L3"), ("conformance.native.L4", "embed")
    ):
      case = _case(root, group, name)
      self.assertEqual([child.tag for child in case], children)

  def test_a_missing_tap_says_where_it_is_missing(self):
    root = ElementTree.fromstring(lib.render(samples.missing_tap()))
    case = _case(
        root, "conformance.portable.L4", "layers.0.moe.experts.combine"
    )
    self.assertIn("not in reference", case.find("error").text)

  def test_a_run_that_was_not_packed_is_a_failure(self):
    root = ElementTree.fromstring(lib.render(samples.packed_wide()))
    case = _case(root, "conformance.portable.packed", "ran packed")
    self.assertEqual(case.find("failure").get("type"), "beyond_rule")
    self.assertIn("334 of 336", case.find("failure").get("message"))
    self.assertIn("23", case.find("failure").text)

  def test_an_open_certificate_is_an_error(self):
    root = ElementTree.fromstring(lib.render(samples.unproven()))
    case = _case(root, "conformance.portable.certificate", "ours")
    self.assertIn("2 of 3 uncertain", case.find("error").get("message"))

  def test_characters_that_xml_forbids_are_replaced(self):
    report = samples.not_conformant()
    for part in report["arithmetics"].values():
      part["rules"] = {k: "a\x00\x1b<&\ud800" for k in part["rules"]}
    root = ElementTree.fromstring(lib.render(report).encode("utf-8"))
    self.assertIn("a\ufffd\ufffd<&", _case(
        root, "conformance.portable.levels", "L0"
    ).find("failure").text)

  @parameterized.parameters(*_SAMPLES)
  def test_equal_reports_give_equal_bytes_without_times(self, name):
    make = getattr(samples, name)
    text = lib.render(make())
    self.assertEqual(text, lib.render(make()))
    times = {e.get("time") for e in ElementTree.fromstring(text).iter()}
    self.assertLessEqual(times, {"0", None})


if __name__ == "__main__":
  absltest.main()
