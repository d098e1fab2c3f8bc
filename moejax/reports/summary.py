"""The report in ten lines, for a terminal.

The lines are plain text and always ten, so a log can be read by eye and cut by
a script. `show` puts the same ten into a frame. Texts from outside are stripped
of control characters, and rich never reads them as markup.

Layer: reports. Imports contracts.
"""

from collections.abc import Mapping

import rich.box
import rich.console
import rich.panel
import rich.table
import rich.text

from moejax.contracts import verdict
from moejax.reports import headline
from moejax.reports import words

_STYLES = {
    verdict.CONFORMANT: "green",
    verdict.NOT_CONFORMANT: "red",
    verdict.INCOMPLETE: "yellow",
    verdict.UNSUPPORTED: "yellow",
}


def lines(report: Mapping) -> list[str]:
  """Returns exactly ten lines of text."""
  return [f"{name:<12}{text}" for name, text in _rows(report)]


def show(report: Mapping, console: rich.console.Console) -> None:
  """Prints the ten lines as a table in a frame."""
  style = _STYLES[report["verdict"]]
  table = rich.table.Table(
      box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False
  )
  table.add_column(no_wrap=True)
  table.add_column(overflow="fold")
  for index, (name, text) in enumerate(_rows(report)):
    table.add_row(
        rich.text.Text(name, style="" if index else f"bold {style}"),
        rich.text.Text(text, style="" if index else f"bold {style}"),
    )
  console.print(
      rich.panel.Panel(
          table, title="Conformance", title_align="left", border_style=style,
          box=rich.box.ROUNDED, expand=False,
      )
  )


def _rows(report) -> list[tuple[str, str]]:
  """Ten (name, text)."""
  _, title = words.OVERALL[report["verdict"]]
  arithmetics = report["arithmetics"]
  rows = [
      ("verdict", f"{title}, exit code {report['exit_code']}"),
      ("meaning", headline.sentence(report)),
      ("compared", _compared(report)),
  ]
  for name in ("portable", "native"):
    rows.append((name, _levels(arithmetics.get(name))))
  rows += [
      ("difference", _difference(arithmetics)),
      ("combine", _combine(report["explanation"])),
      ("choices", _choices(arithmetics)),
      ("texts", _texts(arithmetics)),
      ("certificate", _certificate(report["certificates"])),
  ]
  return [(name, words.plain(text)) for name, text in rows]


def _compared(report) -> str:
  request = report.get("request") or {}
  steps, packed = request.get("decode_steps"), words.packed(report)
  return (
      f"our decoder against {words.reference_name(report)},"
      f" {words.plural(len(report['prompts']), 'prompt')}"
      + ("" if steps is None else f", {words.plural(steps, 'decode step')}")
      + (packed and f"; {packed}")
  )


def _levels(part) -> str:
  if part is None:
    return "not run"
  return ", ".join(
      f"{level} {words.VERDICTS[state][1]}"
      for level, state in part["levels"].items()
  )


def _difference(arithmetics) -> str:
  for name, part in arithmetics.items():
    first = part["first_difference"]
    if first:
      at = words.element(first["axes"], first["index"])
      distance = first["distance_ulp"]
      return (
          f"first in {name} arithmetic: prompt {first['prompt']},"
          f" {words.step(first['step'])},"
          f" {words.tap_name(first['layer'], first['operator'])}"
          + (f" [{at}]" if at else "")
          + f": ours {first['ours']}, reference {first['reference']}"
          + ("" if distance is None else f", {distance:,} ulp")
      )
  return "none"


def _combine(explanation) -> str:
  if not explanation:
    return "not examined"
  if not explanation["contract"]:
    return (
        f"ours {explanation['ours']}; no contract that was tried reproduces the"
        " reference"
    )
  clauses = ", ".join(
      f"{field} {pair['ours']} / {pair['reference']}"
      for field, pair in explanation["clauses"].items()
  )
  return (
      f"ours {explanation['ours']}, reference {explanation['contract']} on"
      f" {explanation['rows']:,} rows; differing clauses: {clauses or 'none'}"
  )


def _choices(arithmetics) -> str:
  exchanges = arithmetics.get("native", {}).get("exchanges")
  if exchanges is None:
    return "native arithmetic was not run"
  legal = sum(e["legal"] for e in exchanges)
  return (
      f"{len(exchanges):,} choices differ in native arithmetic,"
      f" {legal:,} of them legal"
  )


def _texts(arithmetics) -> str:
  parts = []
  for name, part in arithmetics.items():
    found = part["trajectories"]
    same = sum(t["first_differing_token"] is None for t in found)
    parts.append(f"{same} of {len(found)} the same in {name} arithmetic")
  return ", ".join(parts) or "none"


def _certificate(certificates) -> str:
  if not certificates:
    return "none; only portable runs have one"
  return "; ".join(
      f"{side} {c['elements']:,} elements, {c['uncertain']:,} uncertain,"
      f" {c['unresolved']:,} left open"
      for side, c in certificates.items()
  )
