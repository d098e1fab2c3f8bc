"""How long does a packed expert layer take, and is the stable plan slower?

  python -m experiments.packed_performance --protocol=default --out=DIR \\
    [--moe_extension=FILE --ops_extension=FILE]

Measures what a protocol declares, in the order it declares: vLLM's layer with
the plan of its own alignment kernel against the same with the stable plan, and
our Pallas kernels beside vLLM's. The protocol (operating points, arms, clocks,
order and number of samples, statistic, margin) is written with its digest
before anything runs; raw nanoseconds are appended sample by sample; a seal over
all files comes last. An arm without a backend here is unsupported, with its
reason. Ends with one JSON document, the result and the seal. Judging is the
work of `experiments.validate_performance`.

--protocol names a JSON file with the fields of
`moejax/protocols/performance/protocol.py` (or a protocol.json of another run),
or "default", which is meant for an H200. A protocol with "interpret": true runs
the Pallas kernels anywhere, and its times are no performance.

Exit codes: 0 measured and sealed, whatever the verdict; 2 usage or harness
error; 4 no arm can run here. The library call behind it is
`performance.run.run`.
"""

import pathlib

from absl import flags

from experiments.support import binary
from experiments.support import performance_arms
from experiments.support import progress
from moejax.contracts import refusal
from moejax.protocols.performance import protocol as protocol_lib
from moejax.protocols.performance import run
from moejax.protocols.performance import store

_PROTOCOL = flags.DEFINE_string(
    "protocol", "default", 'A JSON file, or "default".'
)
_OUT = flags.DEFINE_string("out", None, "An absent or empty folder.")
_MOE = flags.DEFINE_string(
    "moe_extension", "", "vLLM's _moe_C_stable_libtorch.abi3.so."
)
_OPS = flags.DEFINE_string(
    "ops_extension", "", "vLLM's _C_stable_libtorch.abi3.so."
)


def main() -> int:
  """Measures, returns the exit code."""
  if not _OUT.value:
    raise refusal.HarnessError("--out names the folder of the run.")
  protocol = _protocol()
  maker = performance_arms.maker(protocol, _MOE.value, _OPS.value)
  with progress.stages() as report:
    result = run.run(protocol, maker, _OUT.value, report)
  binary.last_line(result)
  return 0


def _protocol() -> protocol_lib.Protocol:
  if _PROTOCOL.value == "default":
    return protocol_lib.default()
  try:
    values = store.read(pathlib.Path(_PROTOCOL.value))
  except ValueError as error:
    raise refusal.HarnessError(f"--protocol: {error}") from error
  # A protocol.json of a run has the fields below "protocol".
  return protocol_lib.from_fields(values.get("protocol", values))


if __name__ == "__main__":
  binary.run(main)
