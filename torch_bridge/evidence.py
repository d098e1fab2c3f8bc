"""The capsules of a comparison: what both sides showed, for other machines.

Layer: torch_bridge. Needs no torch.
"""

import pathlib

from moejax.protocols import capsule
from moejax.protocols import taps
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
      taps.join(layer, tap): limit
      for (layer, tap), limit in result.envelope.items()
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
        result.identities,
    )
  report["capsules"] = digests
  return digests
