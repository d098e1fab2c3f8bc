"""The capsules of a comparison: what both sides showed, for other machines.

Layer: torch_bridge. Needs no torch.
"""

import pathlib

from moejax.protocols import capsule
from torch_bridge import conformance

NAMES = {"ours": "capsule_ours", "reference": "capsule_reference"}


def write_capsules(
    result: conformance.Outcome, folder: pathlib.Path
) -> dict[str, str]:
  """Writes a capsule of each side; returns {side: manifest digest}.

  The digests also enter the report, so that it names its evidence.
  """
  report = result.report
  envelope = {
      ".".join(str(part) for part in _path(layer, tap)): limit
      for (layer, tap), limit in sorted(
          result.envelope.items(), key=lambda item: (str(item[0][0]), item[0][1])
      )
  }
  digests = {}
  for side, runs in (("ours", result.ours), ("reference", result.reference)):
    backend = report["reference"]
    if side == "ours":
      backend = {"backend": "moejax", "combine": report["combine"]}
    digests[side] = capsule.write(
        folder / NAMES[side],
        runs,
        {
            "backend": backend,
            "certificate": report["certificates"].get(side),
            "contracts": report["contracts"],
            "environment": report.get("environment"),
            "envelope": envelope,
            "not_captured": result.not_captured,
        },
        result.identity,
    )
  report["capsules"] = digests
  return digests


def _path(layer: int | None, tap: str) -> tuple:
  return (tap,) if layer is None else ("layers", layer, tap)
