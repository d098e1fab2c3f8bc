"""The report as Markdown, for a pull request or a job's summary.

The content of the page, condensed: GitHub's tables, no picture. Texts from
outside stand in code spans, where nothing is markup, and cannot end a cell.

Layer: reports. Imports contracts.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import json
import re

from moejax.contracts import verdict
from moejax.reports import headline
from moejax.reports import words

_SHOWN = 12  # Rows of a table; the page and the JSON document have the others.


def render(report: Mapping) -> str:
  """Returns the Markdown text. Equal reports give equal bytes."""
  mark, title = words.OVERALL[report["verdict"]]
  blocks = [
      f"# {mark} {title} (exit code {report['exit_code']})",
      _escape(headline.sentence(report)),
      f"Our decoder against {_escape(words.reference_name(report))};"
      f" {words.plural(len(report['prompts']), 'prompt')}.",
      "## Levels",
      _levels(report),
      "## First difference",
      *(_first(name, p) for name, p in report["arithmetics"].items()),
      "## Causes",
      *(_causes(name, p) for name, p in report["arithmetics"].items()),
      "## Taps by level",
      _taps(report["arithmetics"]),
      "## Combine contract",
      *_combine(report["explanation"]),
      *_packed(report),
      "## Margins",
      *(_margins(name, p) for name, p in report["arithmetics"].items()),
      "## Exchanges",
      _exchanges(report["arithmetics"]),
      "## Certificate",
      _certificates(report["certificates"]),
      "## Texts",
      *(_texts(n, p, report["prompts"])
        for n, p in report["arithmetics"].items()),
      "## The run",
      _run(report),
  ]
  return "\n\n".join(block for block in blocks if block) + "\n"


def _escape(text) -> str:
  """Plain text that Markdown shows as it is, also inside a table."""
  return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", words.plain(text))


def _code(text) -> str:
  """A code span that holds any text, also inside a table."""
  text = words.plain(text).replace("|", "\\|")
  if not text.strip():
    return "(empty)"
  runs = [len(run) for run in re.findall("`+", text)]
  fence = "`" * (max(runs, default=0) + 1)
  # One space on both sides is stripped again; it frees backticks and spaces
  # at the ends.
  pad = " " if "`" in text or text != text.strip() else ""
  return f"{fence}{pad}{text}{pad}{fence}"


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0
) -> str:
  """A table whose last `numbers` columns are right-aligned.

  Rows beyond the first few are counted and not shown.
  """
  rows = list(rows)
  plain = len(heads) - numbers
  lines = [heads, ["---"] * plain + ["---:"] * numbers, *rows[:_SHOWN]]
  text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
  if len(rows) > _SHOWN:
    text += f"\n\n{len(rows) - _SHOWN:,} more rows stand in `report.html`."
  return text


def _verdict(state: str) -> str:
  return " ".join(words.VERDICTS[state])


def _levels(report) -> str:
  arithmetics = report["arithmetics"]
  # A dictionary keeps each rule once, in the order of the levels.
  rules = dict.fromkeys(
      p["rules"][level] for p in arithmetics.values() for level in words.LEVELS
  )
  table = _table(
      ["Level", "Compared", "Asks", *arithmetics],
      (
          [level, *names, *(_verdict(p["levels"][level])
                            for p in arithmetics.values())]
          for level, names in words.LEVELS.items()
      ),
  )
  lines = []
  for rule in rules:
    where = [
        f"{level} {name}"
        for name, p in arithmetics.items()
        for level in words.LEVELS
        if p["rules"][level] == rule
    ]
    lines.append(f"- {', '.join(where)}: {_escape(rule)}")
  lines += [
      f"- single taps: {_escape(rule)}"
      for rule in words.rules(report)
      if rule not in rules
  ]
  return table + "\n\nRules:\n\n" + "\n".join(lines)


def _first(name, part) -> str:
  first = part["first_difference"]
  if not first:
    return f"**{name}**: none."
  where = [
      f"prompt {_code(first['prompt'])}",
      words.step(first["step"]),
      words.place(first["layer"]),
      _code(first["operator"]),
  ]
  if first["index"]:
    where.append(words.element(first["axes"], first["index"]))
  lines = [
      f"**{name}**: {', '.join(where)}; {words.KINDS[first['kind']]}.",
      "",
      f"- ours {_code(first['ours'])}, reference {_code(first['reference'])}"
      + (
          ""
          if first["distance_ulp"] is None
          else f", {first['distance_ulp']:,} ulp apart"
      ),
      f"- {first['differing']:,} of {first['elements']:,} elements differ"
      f" ({words.share(first['differing'], first['elements'])})",
  ]
  if first["margin"] is not None:
    lines.append(f"- score gap {words.number(first['margin'])}")
  if first["clause"]:
    lines.append(f"- contract clause: {_code(first['clause'])}")
  return "\n".join(lines)


def _causes(name, part) -> str:
  rows = [
      (c["layer"], c["operator"], c) for c in part["causes"]
  ] or [
      (t["layer"], t["tap"], t)
      for t in headline.beyond(part)
      if name == "native" and t["level"] == "L4"
  ]
  missing = ""
  if part["missing"]:
    shown = ", ".join(_code(m) for m in part["missing"][:_SHOWN])
    more = " and others" if len(part["missing"]) > _SHOWN else ""
    missing = f"\n\nMissing, {len(part['missing']):,}: {shown}{more}."
  if not rows:
    return f"**{name}**: none found.{missing}"
  return f"**{name}**, on the reference's own inputs:\n\n" + _table(
      ["Layer", "Operator", "Differing", "of", "Largest distance, ulp"],
      (
          [words.place(layer), _code(tap), f"{c['differing']:,}",
           f"{c['elements']:,}", words.count(c["max_ulp"])]
          for layer, tap, c in rows
      ),
      numbers=3,
  ) + missing


def _taps(arithmetics) -> str:
  rows = []
  for name, part in arithmetics.items():
    for level in words.LEVELS:
      found = [t["verdict"] for t in part["taps"] if t["level"] == level]
      if found:
        rows.append([
            name, level,
            *(f"{found.count(state):,}" for state in verdict.ORDER),
        ])
  if not rows:
    return "No tap was captured."
  return _table(
      ["Arithmetic", "Level", *(_verdict(s) for s in verdict.ORDER)],
      rows,
      numbers=len(verdict.ORDER),
  )


def _combine(explanation) -> list[str]:
  if not explanation:
    return ["Not examined."]
  found = explanation["contract"]
  blocks = [
      f"Ours: {_code(explanation['ours'])}. The reference follows"
      f" {_code(found) if found else 'no contract that was tried'}."
  ]
  if explanation["clauses"]:
    blocks.append(_table(
        ["Clause", "Ours", "Reference"],
        (
            [_code(f"combine.{field}"), _code(pair["ours"]),
             _code(pair["reference"])]
            for field, pair in explanation["clauses"].items()
        ),
    ))
  blocks.append(_table(
      ["Contract tried", "Rows reproduced", "of"],
      (
          [_code(c["name"]), f"{c['rows']:,}", f"{explanation['rows']:,}"]
          for c in explanation["candidates"]
      ),
      numbers=2,
  ))
  for other in explanation["apart"]:
    data = other["told_apart_by"]
    told = "no data found that tell it apart" if not data else (
        f"told apart by {_escape(data['data'])}, seed {data['seed']}"
        f" ({data['differing_rows']:,} of {data['rows']:,} rows)"
    )
    blocks.append(
        f"- Also possible: {_code(other['name'])}, which differs in"
        f" {', '.join(_code(f) for f in other['fields'])}; {told}."
    )
  return blocks


def _packed(report) -> list[str]:
  found = report.get("packed")
  if not found:
    return []
  blocks = [
      "## Packed experts",
      f"In this run {_escape(words.packed(report))}."
      f" {_code(found['experts'])}:"
      f" {_escape(words.PACKED.get(found['experts'], ''))}.",
      *(f"- {_escape(fault)}" for fault in found["faults"][:_SHOWN]),
  ]
  for name, run in found["arithmetics"].items():
    blocks.append(
        f"**{name}**: {run['gemms']:,} of {run['demanded_gemms']:,} GEMMs took"
        f" their weights from words; {run['held_bytes']:,} bytes held between"
        f" calls, {run['backend_bytes']:,} of them packed for a backend,"
        f" {run['loaded_bytes']:,} loaded.\n\n" + _table(
            ["Layer", "W13 elements", "demanded", "W2 elements", "demanded",
             "Bytes held", "wide"],
            (
                [str(row["layer"]),
                 *(f"{sum(part[gemm]):,}" for gemm in ("w13", "w2")
                   for part in (row, row["demanded"])),
                 f"{row['held']['bytes']:,}", f"{row['held']['wide_bytes']:,}"]
                for row in run["layers"]
            ),
            numbers=6,
        )
    )
    if found["clauses"][name]:
      blocks.append(_table(
          ["Clause", "Ours", "Reference"],
          (
              [_code(clause), _code(pair["ours"]), _code(pair["reference"])]
              for clause, pair in found["clauses"][name].items()
          ),
      ))
  return blocks


def _margins(name, part) -> str:
  margins = part["margins"]
  named = [("next token", margins["tokens"])] + [
      (f"experts, layer {m['layer']}", m) for m in margins["routers"]
  ]
  return f"**{name}**\n\n" + _table(
      ["Decision", "Decisions", "Boundary ties", "Order ties", "Smallest",
       "1 %", "10 %", "Median"],
      (
          [what, f"{m['decisions']:,}", f"{m['boundary_ties']:,}",
           words.count(m.get("order_ties")),
           *(words.number(m[key]) for key in
             ("smallest", "percent_1", "percent_10", "median"))]
          for what, m in named
      ),
      numbers=7,
  )


def _exchanges(arithmetics) -> str:
  found = arithmetics.get("native", {}).get("exchanges")
  if found is None:
    return "Native arithmetic was not run."
  legal = sum(e["legal"] for e in found)
  text = (
      f"{words.plural(len(found), 'choice')} of experts, entries or tokens"
      f" {'differs' if len(found) == 1 else 'differ'} in native arithmetic:"
      f" {legal:,} legal, {len(found) - legal:,} not legal."
  )
  bad = [e for e in found if not e["legal"]]
  if bad:
    text += "\n\n" + _table(
        ["Prompt", "Step", "Choice", "Margin", "Limit"],
        (
            [_code(e["prompt"]), words.step(e["step"]),
             words.choice(e),
             words.number(e["margin"]), words.number(e["limit"])]
            for e in bad
        ),
        numbers=2,
    )
  return text


def _certificates(certificates) -> str:
  if not certificates:
    return "None; only portable runs have one."
  return _table(
      ["Side", "Complete", "Elements", "Uncertain", "Computed exactly"],
      (
          [side, "yes" if c["complete"] else "no", f"{c['elements']:,}",
           f"{c['uncertain']:,}", f"{c['uncertain'] - c['unresolved']:,}"]
          for side, c in certificates.items()
      ),
      numbers=3,
  )


def _texts(name, part, prompts) -> str:
  texts = {p["id"]: p["text"] for p in prompts}
  return f"**{name}**\n\n" + _table(
      ["Prompt", "Ours", "Reference", "First differing token"],
      (
          [_code(texts[t["prompt"]]), _code(t["ours_text"]),
           "the same" if t["first_differing_token"] is None
           else _code(t["reference_text"]),
           "none" if t["first_differing_token"] is None
           else f"{t['first_differing_token'] + 1} of {len(t['reference'])}"]
          for t in part["trajectories"]
      ),
      numbers=1,
  )


def _value(value) -> str:
  if value is None or value == "":
    return "none"
  if isinstance(value, str):
    return _code(value)
  return _code(json.dumps(value, ensure_ascii=False, sort_keys=True))


def _run(report) -> str:
  rows = [
      [part, _escape(key), _value(value)]
      for part in ("environment", "reference", "identity", "request", "paths")
      for key, value in (report.get(part) or {}).items()
  ]
  rows += [
      ["seconds", _escape(stage), f"{seconds:.1f}"]
      for stage, seconds in (report.get("timing") or {}).items()
  ]
  if not rows:
    return "Nothing was noted."
  lines = [["Part", "Field", "Value"], ["---"] * 3, *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)
