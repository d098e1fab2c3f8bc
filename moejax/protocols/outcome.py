"""The report of a comparison as one JSON document.

Everything that a page, a table or a test result shows is in here; the renderers
in `moejax.reports` compute nothing. Apart from "paths", "timing" and
"environment", which the callers add, two equal runs give equal bytes.

Layer: protocols.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import math

from moejax.contracts import combine as combine_contract
from moejax.contracts import document
from moejax.contracts import verdict
from moejax.protocols import capture as capture_lib
from moejax.protocols import compare
from moejax.protocols import explain as explain_lib
from moejax.protocols import margins
from moejax.protocols import native_rules
from moejax.protocols import taps as taps_lib
from moejax.protocols import trajectory

SCHEMA = "conformance/1"
_COMBINE_TAPS = ("moe.experts.terms", "moe.experts.combine")
Captures = Sequence[capture_lib.Capture]


@dataclasses.dataclass(slots=True)
class Part:
  """One arithmetic's outcome.

  Attributes:
    comparison: Counts by tap and the first difference.
    levels: Verdict by level.
    causes: Operators that differ on the reference's own inputs.
    exchanges: Selections that differ, native only.
    free: Our own trajectory, native only.
    limits: The envelope, native only.
  """

  comparison: compare.Comparison
  levels: dict[str, str]
  causes: list[dict] = dataclasses.field(default_factory=list)
  exchanges: list[native_rules.Exchange] | None = None
  free: Captures | None = None
  limits: Mapping | None = None


def causes(replay: compare.Comparison) -> list[dict]:
  """The operators that differ although their inputs are the reference's."""
  return [
      {
          "layer": count.layer,
          "operator": count.tap,
          "differing": count.differing,
          "elements": count.elements,
          "max_ulp": count.max_ulp,
      }
      for count in replay.counts.values()
      if count.verdict == verdict.BEYOND_RULE
      and not count.tap.startswith(taps_lib.FINAL_STATE)
  ]


def build(
    *,
    parts: Mapping[str, Part],
    certificates: Mapping[str, Mapping],
    explanation: explain_lib.Explanation | None,
    combine: combine_contract.CombineContract,
    ours: Mapping[str, Captures],
    reference: Mapping[str, Captures],
    prompts: Sequence[trajectory.Prompt],
    decode: Callable[[Sequence[int]], str],
    top_k: int,
    clause: Callable[[str, str], str] = lambda arithmetic, tap: "",
    packed: Mapping | None = None,
) -> dict:
  """Returns the report.

  Args:
    parts: {arithmetic: outcome}.
    certificates: {"ours", "reference"} of the portable runs, as
      `Certificate.to_dict` gives them; empty without portable arithmetic.
    explanation: Of the reference's combine; None if it has none.
    combine: Our combine contract.
    ours: {arithmetic: captures}.
    reference: The same of the reference.
    prompts: With their texts.
    decode: Token ids to text.
    top_k: Slots of a route.
    clause: (arithmetic, tap) to the clause that two contracts differ in there,
      or nothing.
    packed: From `packed.proof.document`; None if no experts are packed.
  """
  explained = _explanation(explanation, combine)
  arithmetics = {}
  for name, part in parts.items():
    arithmetics[name] = {
        "levels": part.levels,
        "first_difference": _difference(
            part.comparison.first, explained, functools.partial(clause, name)
        ),
        "missing": part.comparison.missing,
        "causes": part.causes,
        "taps": [_count(c) for c in part.comparison.counts.values()],
        "trajectories": _trajectories(
            part.free or ours[name], reference[name], prompts, decode
        ),
        "margins": margins.summarize(reference[name], top_k),
    }
    if part.exchanges is not None:
      arithmetics[name]["exchanges"] = [
          {
              **{k: _json(v) for k, v in dataclasses.asdict(e).items()},
              "legal": e.legal,
          }
          for e in part.exchanges
      ]
      arithmetics[name]["rules"] = {
          "L0": native_rules.MARGIN,
          "L1": native_rules.ENVELOPE,
          "L2": native_rules.ENVELOPE,
          "L3": native_rules.ENVELOPE,
          "L4": native_rules.BOUND,
      }
    else:
      arithmetics[name]["rules"] = {
          level: "same bits" for level in verdict.LEVELS
      }
  complete = all(c["complete"] for c in certificates.values())
  verdicts = [v for part in parts.values() for v in part.levels.values()]
  if not complete:
    verdicts.append(verdict.MISSING)
  if packed is not None and not packed["proven"]:
    verdicts.append(verdict.BEYOND_RULE)
  return {
      "schema": SCHEMA,
      "verdict": verdict.overall(verdicts),
      "exit_code": verdict.EXIT_CODES[verdict.overall(verdicts)],
      "arithmetics": arithmetics,
      "certificates": {n: dict(c) for n, c in certificates.items()},
      "explanation": explained,
      **({} if packed is None else {"packed": dict(packed)}),
      "prompts": [
          {"id": p.id, "text": p.text or decode(p.tokens),
           "tokens": list(p.tokens)}
          for p in prompts
      ],
  }


def last_line(report: Mapping) -> dict:
  """The summary that a binary prints as its last line."""
  arithmetics = report["arithmetics"]
  first = next(
      (
          {"arithmetic": name, **arithmetics[name]["first_difference"]}
          for name in ("portable",)
          if name in arithmetics and arithmetics[name]["first_difference"]
      ),
      None,
  )
  explanation = report["explanation"]
  return {
      "schema": report["schema"],
      "verdict": report["verdict"],
      **{
          name: arithmetics[name]["levels"] if name in arithmetics else None
          for name in ("portable", "native")
      },
      "explained_contract": explanation and explanation["contract"],
      "uncertain": {
          "found": sum(
              c["uncertain"] for c in report["certificates"].values()
          ),
          "unresolved": sum(
              c["unresolved"] for c in report["certificates"].values()
          ),
      },
      "first_difference": first,
      **_packed_line(report.get("packed")),
  }


def _packed_line(packed: Mapping | None) -> dict:
  """Whether packed experts ran packed, for reports that have any."""
  if packed is None:
    return {}
  runs = packed["arithmetics"].values()
  return {
      "packed": {
          "proven": packed["proven"],
          "experts": packed["experts"],
          "elements": sum(run["elements"] for run in runs),
          "demanded": sum(run["demanded"] for run in runs),
          "faults": len(packed["faults"]),
      }
  }


def _explanation(explanation, ours) -> dict | None:
  if explanation is None:
    return None
  found = explanation.survivors[0] if explanation.survivors else None
  clauses = {}
  if found is not None:
    clauses = {
        field: {"ours": _json(pair[0]), "reference": _json(pair[1])}
        for field, pair in combine_contract.differing_fields(
            ours, found
        ).items()
    }
  return {
      "contract": explanation.name,
      "rows": explanation.rows,
      "ours": ours.name,
      "clauses": clauses,
      "survivors": [
          {"name": c.name, "digest": document.digest(c)}
          for c in explanation.survivors
      ],
      "candidates": [
          {"name": c.contract.name, "rows": c.rows}
          for c in explanation.candidates
      ],
      "apart": list(explanation.apart),
  }


def _difference(
    first: compare.Difference | None, explained, clause
) -> dict | None:
  if first is None:
    return None
  out = {k: _json(v) for k, v in dataclasses.asdict(first).items()}
  measured = "" if first.operator not in _COMBINE_TAPS else "; ".join(
      f"combine.{field}: ours {pair['ours']}, reference {pair['reference']}"
      for field, pair in (explained["clauses"] if explained else {}).items()
  )
  stated = clause(first.operator)
  out["clause"] = stated or measured
  if first.operator == _COMBINE_TAPS[-1] and measured:
    out["clause"] = measured
  elif first.kind.endswith("tie"):
    site = "indexer" if first.operator == taps_lib.VISIBLE else "router"
    out["clause"] = f"{site}.tie_rule"
  return out


def _count(count: compare.TapCount) -> dict:
  return {k: _json(v) for k, v in dataclasses.asdict(count).items()}


def _json(value):
  """Tuples to lists, and numbers that JSON cannot carry to null."""
  if isinstance(value, tuple):
    return [_json(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def _trajectories(ours, reference, prompts, decode) -> list[dict]:
  out = []
  for mine, theirs, prompt in zip(ours, reference, prompts, strict=True):
    left, right = mine.generated, theirs.generated
    differs = [i for i, (a, b) in enumerate(zip(left, right)) if a != b]
    out.append({
        "prompt": prompt.id,
        "ours": list(left),
        "reference": list(right),
        "ours_text": decode(left),
        "reference_text": decode(right),
        "first_differing_token": differs[0] if differs else None,
    })
  return out
