"""From samples to medians, ratios and verdicts.

The arithmetic is of whole numbers and fractions, so a validator on another
machine gets the same document to the last digit.

Layer: protocols.
"""

from collections.abc import Mapping
import fractions
import statistics
from typing import Any

from moejax.protocols.performance import interval
from moejax.protocols.performance import protocol as protocol_lib

SCHEMA = "packed_performance_result/1"
SUPPORTED = "supported"
# From the worst: over all points a comparison has the worst.
VERDICTS = (
    "inferior", "different_bits", "inconclusive", "unsupported",
    "non_inferior", "described",
)


def judge(
    protocol: protocol_lib.Protocol,
    arms: Mapping[str, str],
    outputs: Mapping[str, Mapping[str, str]],
    samples: Mapping[protocol_lib.Slot, int],
) -> dict[str, Any]:
  """Returns the result as JSON values.

  Args:
    protocol: What was declared; `protocol_lib.RULES` says how it is judged.
    arms: {arm: "supported", or why not}.
    outputs: {point: {arm: digest of its outputs}}, of the supported arms.
    samples: Nanoseconds of every slot of the protocol.
  """
  supported = [a for a in protocol.arms if arms[a] == SUPPORTED]
  points = []
  for point in protocol.points:
    judged = {
        arm: [
            samples[protocol_lib.Slot(point.name, number, arm)]
            for number in range(
                protocol.warmups, protocol.warmups + protocol.rounds
            )
        ]
        for arm in supported
    }
    points.append({
        "point": point.name,
        "arms": {
            arm: _described(judged[arm], protocol.requests)
            if arm in judged
            else arms[arm]
            for arm in protocol.arms
        },
        "comparisons": [
            _compared(protocol, comparison, judged, outputs[point.name])
            for comparison in protocol.comparisons
        ],
    })
  verdicts = {}
  for number, comparison in enumerate(protocol.comparisons):
    found = [p["comparisons"][number]["verdict"] for p in points]
    verdicts[f"{comparison.arm}/{comparison.against}"] = min(
        found, key=VERDICTS.index
    )
  return {
      "schema": SCHEMA,
      "verdicts": verdicts,
      "interpreted": protocol.interpret,
      "points": points,
  }


def _described(values: list[int], requests: int) -> dict[str, Any]:
  median = statistics.median_low(values)
  return {
      "median_ns": median,
      "least_ns": min(values),
      "largest_ns": max(values),
      "median_us_per_request": float(
          fractions.Fraction(median, 1000 * requests)
      ),
  }


def _compared(protocol, comparison, judged, outputs) -> dict[str, Any]:
  found = {
      "arm": comparison.arm,
      "against": comparison.against,
      "margin": comparison.margin,
      "verdict": "unsupported",
  }
  if comparison.arm not in judged or comparison.against not in judged:
    return found
  if comparison.same_bits and (
      outputs[comparison.arm] != outputs[comparison.against]
  ):
    return found | {"verdict": "different_bits"}
  pairs = zip(
      judged[comparison.arm], judged[comparison.against], strict=True
  )
  ratio = interval.of_median(
      [fractions.Fraction(a, b) for a, b in pairs], protocol.confidence
  )
  medians = fractions.Fraction(*(
      statistics.median_low(judged[arm])
      for arm in (comparison.arm, comparison.against)
  ))
  return found | {
      "verdict": _verdict(ratio, comparison.margin),
      "ratio": float(ratio.median),
      "lower": float(ratio.lower),
      "upper": float(ratio.upper),
      "ratio_of_medians": float(medians),
  }


def _verdict(ratio: interval.Interval, margin: float | None) -> str:
  if margin is None:
    return "described"
  if ratio.upper <= interval.exact(margin):
    return "non_inferior"
  if ratio.lower > interval.exact(margin):
    return "inferior"
  return "inconclusive"
