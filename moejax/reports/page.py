"""The report as one HTML page that needs nothing else.

No script, no font, no image and no address is loaded: the page can be mailed,
archived and opened years later. Texts of prompts and models come from outside;
every one is escaped. The template is `page.html`, its look `page_style.html`,
what its sections share `page_parts.html`.

Layer: reports. Imports contracts.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import json
import os
import pathlib

import jinja2

from moejax.contracts import verdict
from moejax.reports import headline
from moejax.reports import heat_map
from moejax.reports import words

_FOLDER = pathlib.Path(__file__).parent
_SHOWN = 12  # Rows of a long table that stand outside its fold.
_MOST = 1000  # Exchanges on the page; a long run has tens of thousands.


def render(report: Mapping) -> str:
  """Returns the page. Equal reports give equal bytes."""
  environment = jinja2.Environment(
      loader=jinja2.FileSystemLoader(_FOLDER),
      autoescape=True,
      undefined=jinja2.StrictUndefined,
      trim_blocks=True,
      lstrip_blocks=True,
  )
  environment.globals.update(
      words=words, verdict=verdict, shown=_SHOWN, most=_MOST
  )
  environment.filters.update(
      count=words.count, number=words.number, pretty=_pretty, mark=_mark
  )
  arithmetics = {
      name: _arithmetic(name, part)
      for name, part in report["arithmetics"].items()
  }
  return environment.get_template("page.html").render(
      report=report,
      arithmetics=arithmetics,
      headline=headline.sentence(report),
      reference=words.reference_name(report),
      texts={p["id"]: p["text"] for p in report["prompts"]},
      aliases=_aliases(report["explanation"]),
      operations=_operations(report["certificates"]),
      meanings=words.MEANINGS,
      rules=words.rules(report),
      colours=heat_map.COLOURS,
  )


def _arithmetic(name: str, part: Mapping) -> dict:
  """One arithmetic's part of the report, with what the page adds to it."""
  found = {(t["layer"], t["tap"]): t for t in part["taps"]}
  first = part["first_difference"]
  differing = [t for t in part["taps"] if t["verdict"] != verdict.SAME_BITS]
  exchanges = [
      {**e, "slots": _slots(e)} for e in part.get("exchanges") or []
  ]
  title = f"{name.capitalize()} arithmetic"
  return {
      **part,
      "title": title,
      "tap_of_first": first and found.get((first["layer"], first["operator"])),
      "differing": differing,
      "operations_beyond": [
          t for t in headline.beyond(part) if t["level"] == "L4"
      ],
      "elements": sum(t["elements"] for t in part["taps"]),
      "elements_differing": sum(t["differing"] for t in part["taps"]),
      "exchanges": exchanges if "exchanges" in part else None,
      "illegal": [e for e in exchanges if not e["legal"]],
      "trajectories": [
          {**t, "pair": _split(t["ours_text"], t["reference_text"])}
          for t in part["trajectories"]
      ],
      "picture": heat_map.render(part["taps"], title),
  }


def _split(ours: str, reference: str) -> dict:
  """Cuts two texts where they part: (common start, ours, reference)."""
  same = len(os.path.commonprefix([ours, reference]))
  return {
      "common": ours[:same],
      "ours": ours[same:],
      "reference": reference[same:],
  }


def _slots(exchange: Mapping) -> list[tuple[int, int, bool]]:
  """(ours, the reference's, whether they differ) of each slot."""
  pairs = zip(exchange["ours"], exchange["reference"])
  return [(a, b, a != b) for a, b in pairs]


def _aliases(explanation: Mapping | None) -> list[str]:
  """Other names of the contract that the reference follows."""
  survivors = explanation["survivors"] if explanation else []
  return [
      s["name"] for s in survivors[1:] if s["digest"] == survivors[0]["digest"]
  ]


def _operations(certificates: Mapping) -> list[tuple[str, list]]:
  """(operation, its counts on each side or None), in the order of names."""
  names = sorted({n for c in certificates.values() for n in c["operations"]})
  return [
      (name, [c["operations"].get(name) for c in certificates.values()])
      for name in names
  ]


def _pretty(value) -> str:
  return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)


def _mark(ids: Sequence[int], first: int | None) -> list[tuple[int, bool]]:
  """Token ids, each with whether it is the first that differs."""
  return [(token, index == first) for index, token in enumerate(ids)]
