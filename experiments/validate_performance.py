"""Does a measurement of packed layers hold? Trusts nothing.

  python -m experiments.validate_performance --run=DIR [--seal=DIGEST]

Takes the protocol's digest and those of all files anew, checks that exactly the
declared samples are there in the declared order, and derives medians, ratios,
intervals and verdicts from the raw nanoseconds. Ends with one JSON document.
--seal pins the digest that the run printed when it ended; without it, a folder
that was rewritten as a whole cannot be told from another run.

Exit codes: 0 valid (its verdicts are in the document), 1 invalid (the document
has the reason; a run that was stopped is "incomplete"), 2 usage or harness
error. The library call behind it is `performance.validate.validate`.
"""

from absl import flags

from experiments.support import binary
from moejax.contracts import refusal
from moejax.protocols.performance import validate

_RUN = flags.DEFINE_string("run", None, "Folder of the run.")
_SEAL = flags.DEFINE_string("seal", "", "Its seal; by default any.")
_SOURCE = flags.DEFINE_string(
    "source", "", "Digest of the source that made it; by default any."
)


def main() -> int:
  """Validates the run, returns the exit code."""
  if not _RUN.value:
    raise refusal.HarnessError("--run names the folder of a run.")
  found = validate.validate(_RUN.value, _SEAL.value, _SOURCE.value)
  binary.last_line(found)
  return 0 if found["valid"] else 1


if __name__ == "__main__":
  binary.run(main)
