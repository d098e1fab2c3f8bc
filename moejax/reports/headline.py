"""The one sentence that answers the question of a report.

It comes first on the page, in the table and on the terminal, and must be
understood without any of them. It repeats what the report says and decides
nothing.

Layer: reports. Imports contracts.
"""

from collections.abc import Mapping

from moejax.contracts import verdict
from moejax.reports import words


def sentence(report: Mapping) -> str:
  """Returns the verdict of a report as one sentence for a newcomer."""
  return {
      verdict.CONFORMANT: _conformant,
      verdict.NOT_CONFORMANT: _not_conformant,
      verdict.INCOMPLETE: _incomplete,
      verdict.UNSUPPORTED: _unsupported,
  }[report["verdict"]](report)


def beyond(part: Mapping) -> list[dict]:
  """The taps of one arithmetic that lie beyond their rule, in order."""
  return [t for t in part["taps"] if t["verdict"] == verdict.BEYOND_RULE]


def _conformant(report) -> str:
  parts = []
  for name, part in report["arithmetics"].items():
    same = set(part["levels"].values()) == {verdict.SAME_BITS}
    parts.append(
        f"in {name} arithmetic every compared value has the same bits"
        if same
        else f"in {name} arithmetic every difference stays within its declared"
        " rule"
    )
  return (
      "Our decoder and the reference compute the same thing: "
      + ", and ".join(parts)
      + "."
  )


def _not_conformant(report) -> str:
  packed = report.get("packed")
  if packed and not packed["proven"]:
    return (
        "Our decoder did not run its packed experts packed, whatever it"
        f" computed: {packed['faults'][0]}."
    )
  start = "Our decoder and the reference do not compute the same thing: "
  for name, part in report["arithmetics"].items():
    if verdict.BEYOND_RULE in part["levels"].values():
      return start + _where(name, part, report) + "."
  return start + "see the levels."


def _where(name, part, report) -> str:
  first = part["first_difference"]
  if name == "portable" and first:
    explained, clause = report["explanation"], first["clause"]
    text = (
        f"in portable arithmetic they first part at {_operator(first)}"
    )
    if clause.startswith("combine.") and explained and explained["clauses"]:
      text += (
          ", where the reference follows the combine contract"
          f" {explained['contract']} and we follow {explained['ours']}"
      )
    elif clause:
      names = [part.split(":")[0] for part in clause.split("; ")]
      text += f", where the contracts differ in {' and '.join(names)}"
    return text
  found = beyond(part)
  if found:
    here = {"layer": found[0]["layer"], "operator": found[0]["tap"]}
    lie = "lies beyond its" if len(found) == 1 else "lie beyond their"
    return (
        f"in {name} arithmetic {words.plural(len(found), 'tap')} of"
        f" {len(part['taps']):,} {lie} rule, the first at {_operator(here)}"
    )
  names = [words.LEVELS[v][0] for v in _levels(part, verdict.BEYOND_RULE)]
  return (
      f"in {name} arithmetic {' and '.join(names)} differ beyond their rule"
  )


def _levels(part, state) -> list[str]:
  return [level for level, v in part["levels"].items() if v == state]


def _operator(first) -> str:
  where = words.place(first["layer"])
  what = words.operation(first["operator"])
  name = first["operator"]
  return f"{what} ({name}, {where})" if what else f"{name} ({where})"


def _incomplete(report) -> str:
  reasons = []
  for name, part in report["arithmetics"].items():
    if part["missing"]:
      reasons.append(
          f"{words.plural(len(part['missing']), 'tap')} of {name} arithmetic"
          f" {'is' if len(part['missing']) == 1 else 'are'} on one side only"
      )
    else:
      reasons += [
          f"level {level} of {name} arithmetic was not compared in full"
          for level in _levels(part, verdict.MISSING)
      ]
  for side, one in report["certificates"].items():
    if not one["complete"]:
      reasons.append(
          f"{words.plural(one['unresolved'], 'uncertain element')} of"
          f" {'our side' if side == 'ours' else 'the reference'}"
          f" {'was' if one['unresolved'] == 1 else 'were'} not computed exactly"
      )
  return (
      "No verdict: nothing that was compared lies beyond its rule, but "
      + (", and ".join(reasons) or "the comparison is incomplete")
      + "."
  )


def _unsupported(report) -> str:
  where = [
      f"{', '.join(levels)} of {name} arithmetic"
      for name, part in report["arithmetics"].items()
      if (levels := _levels(part, verdict.UNSUPPORTED))
  ]
  return (
      "No verdict: the comparison asks for arithmetic that is not known here"
      + (f" ({' and '.join(where)})" if where else "")
      + ", and a guess would make the verdict worthless."
  )
