"""The report as JUnit XML, which every CI system shows.

One suite for each arithmetic; in it one case for each level, for each tap of
each layer and, where there is one, for each side's certificate. Beyond the
rule is a failure. What is missing or unsupported is an error, never skipped: a
comparison that did not happen must not look like one that passed.

Layer: reports. Imports contracts.
"""

from collections.abc import Mapping
from xml.etree import ElementTree

from moejax.contracts import verdict
from moejax.reports import words


def render(report: Mapping) -> str:
  """Returns the XML document. Equal reports give equal bytes."""
  root = ElementTree.Element("testsuites", {"name": "conformance"})
  for name, part in report["arithmetics"].items():
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": f"conformance.{name}"}
    )
    for level in verdict.LEVELS:
      _level(suite, name, level, part)
    for tap in part["taps"]:
      _tap(suite, name, tap, part)
    if "packed" in report:
      _packed(suite, name, report["packed"]["arithmetics"][name])
    if name == "portable":
      for side, certificate in report["certificates"].items():
        _certificate(suite, side, certificate)
    _count(suite, [suite])
  _count(root, list(root))
  ElementTree.indent(root, " ")
  text = ElementTree.tostring(root, encoding="unicode")
  return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _count(element, suites) -> None:
  cases = [case for suite in suites for case in suite.iter("testcase")]
  element.set("tests", str(len(cases)))
  for kind in ("failure", "error"):
    found = sum(case.find(kind) is not None for case in cases)
    element.set(f"{kind}s", str(found))
  element.set("time", "0")


def _case(suite, group, name, state, message, details="") -> None:
  case = ElementTree.SubElement(suite, "testcase", {
      "classname": words.plain(group),
      "name": words.plain(name),
      "time": "0",
  })
  if state in (verdict.SAME_BITS, verdict.WITHIN_RULE):
    return
  kind = "failure" if state == verdict.BEYOND_RULE else "error"
  problem = ElementTree.SubElement(
      case, kind, {"type": state, "message": words.plain(message)}
  )
  problem.text = words.plain(details or message)


def _level(suite, arithmetic, level, part) -> None:
  compared, question = words.LEVELS[level]
  state = part["levels"][level]
  _case(
      suite, f"conformance.{arithmetic}.levels", level, state,
      f"{words.VERDICTS[state][1]}: {compared} ({question})",
      f"rule: {part['rules'][level]}",
  )


def _tap(suite, arithmetic, tap, part) -> None:
  state, name = tap["verdict"], words.tap_name(tap["layer"], tap["tap"])
  limit = "" if tap["limit"] is None else f", limit {tap['limit']:g}"
  size = "" if tap["max_abs"] is None else (
      f", largest difference {tap['max_abs']:g}{limit}"
  )
  message = (
      f"{words.VERDICTS[state][1]}: {tap['differing']} of {tap['elements']}"
      f" elements differ, largest distance {tap['max_ulp']} ulp{size}"
  )
  details = f"rule: {tap['rule'] or part['rules'][tap['level']]}"
  if state in (verdict.MISSING, verdict.UNSUPPORTED):
    message = f"{words.VERDICTS[state][1]}: not compared in full"
    details = "\n".join(
        m for m in part["missing"] if m.split(" ")[0] == name
    )
  group = f"conformance.{arithmetic}.{tap['level']}"
  _case(suite, group, name, state, message, details)


def _packed(suite, arithmetic, run) -> None:
  _case(
      suite, f"conformance.{arithmetic}.packed", "ran packed",
      verdict.BEYOND_RULE if run["faults"] else verdict.SAME_BITS,
      f"{run['elements']} of {run['demanded']} elements came from packed"
      " weights",
      "\n".join(run["faults"]),
  )


def _certificate(suite, side, certificate) -> None:
  _case(
      suite, "conformance.portable.certificate", side,
      verdict.SAME_BITS if certificate["complete"] else verdict.MISSING,
      f"{certificate['unresolved']} of {certificate['uncertain']} uncertain"
      " elements were not computed exactly",
  )
