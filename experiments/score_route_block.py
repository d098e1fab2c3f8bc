"""Does a route-block study hold? Reloads everything, trusts nothing.

  python -m experiments.score_route_block --study=DIR [--out=DIR]

Takes digests of the raw tensors anew, derives fixture, plans, memberships and
schedules from the request, checks treatments, grids and identities, asks for
equal outcomes of all replicates, and checks the relations of the seven arms.
--replay also computes each plan and grid on the oracle and compares all bits;
--against names a study of the same request on another backend, whose raw
tensors must have the same bits, and may be given several times.
Ends with one JSON document. --out names a folder for the route_block_*.tsv
tables of an accepted study.

Exit codes: 0 accepted, 1 rejected (the document says why), 2 usage or harness
error. The library call behind it is `route_block.score.score`.
"""

import os

from absl import flags

from experiments.support import binary
from experiments.support import environment
from experiments.support import progress
from experiments.support import study_backends
from moejax.contracts import refusal
from moejax.protocols.route_block import score
from moejax.protocols.route_block import tables

_STUDY = flags.DEFINE_string("study", None, "Folder of the study.")
_OUT = flags.DEFINE_string("out", None, "Folder for the tables.")
_SOURCE = flags.DEFINE_string(
    "source",
    "",
    "Digest of the source that made the study; by default the scorer's own.",
)
_BINARY = flags.DEFINE_string(
    "binary", "", "Digest of the binary that made the study; by default any."
)
_REPLAY = flags.DEFINE_bool(
    "replay", False, "Computes each outcome anew on the oracle."
)
_AGAINST = flags.DEFINE_multi_string(
    "against", [], "Folder of a study of the same request to compare with."
)
_WORKERS = flags.DEFINE_integer(
    "workers", os.cpu_count(), "Processes that run the oracle.", lower_bound=1
)


def main() -> int:
  """Scores the study, returns the exit code."""
  if not _STUDY.value:
    raise refusal.HarnessError("--study names the folder of a study.")
  replay = None
  if _REPLAY.value:
    replay = study_backends.oracle_cells(_WORKERS.value)
  with progress.stages() as report:
    found = score.score(
        _STUDY.value, _SOURCE.value or environment.source(), _BINARY.value,
        replay, report, _AGAINST.value,
    )
  if found["accepted"] and _OUT.value:
    tables.write(found, _OUT.value)
  binary.last_line(found)
  return 0 if found["accepted"] else 1


if __name__ == "__main__":
  binary.run(main)
