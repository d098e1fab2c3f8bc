"""Do three backends compute a packed-AWQ expert layer alike, bit for bit?

  python -m experiments.awq_bits [--moe_extension=PATH --ops_extension=PATH]

Runs random fixtures through our Pallas kernels and, where vLLM's extension
files are given, through vLLM's kernels on a CUDA device, and through the NumPy
oracle on the CPU; compares every element of the four surfaces for each pair.
A pair without its backend is "unsupported" in the record. Ends with one JSON
record; --out also writes it to a file. Exit codes: 0 no bit differs, 1 some do,
2 usage or harness error, 4 no device that can run it. The library call behind
it is `torch_bridge.awq_bits.run`.
"""

import json
import os
import pathlib

from absl import flags

from experiments.support import binary
from experiments.support import environment
from experiments.support import pallas_backend
from experiments.support import progress
from moejax.contracts import refusal
from moejax.protocols import packed_fixture
from torch_bridge import awq_bits
from torch_bridge import vllm_marlin

_MOE = flags.DEFINE_string(
    "moe_extension", "", "vLLM's _moe_C_stable_libtorch.abi3.so."
)
_OPS = flags.DEFINE_string(
    "ops_extension", "", "vLLM's _C_stable_libtorch.abi3.so."
)
_FIXTURES = flags.DEFINE_integer(
    "fixtures", 50, "Fixtures of each dtype.", lower_bound=1
)
_MIN_TOKENS = flags.DEFINE_integer(
    "min_tokens", 1, "Fewest tokens of a fixture.", lower_bound=1
)
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 64, "Most tokens of a fixture.", lower_bound=1
)
_GROUP_SIZE = flags.DEFINE_integer("group_size", 128, "Rows of a scale.")
_SEED = flags.DEFINE_integer("seed", 20260722, "Seed of layer and fixtures.")
_WORKERS = flags.DEFINE_integer(
    "workers", os.cpu_count(), "Processes that run the oracle.", lower_bound=1
)
_OUT = flags.DEFINE_string("out", None, "File for the record.")


def main() -> int:
  """Compares, writes the record, returns the exit code."""
  request = awq_bits.Request(
      moe_extension=_MOE.value,
      ops_extension=_OPS.value,
      fixtures=_FIXTURES.value,
      min_tokens=_MIN_TOKENS.value,
      max_tokens=_MAX_TOKENS.value,
      shape=packed_fixture.LayerShape(group_size=_GROUP_SIZE.value),
      seed=_SEED.value,
      workers=_WORKERS.value,
  )
  extensions = (request.moe_extension, request.ops_extension)
  if any(extensions) and not all(extensions):
    raise refusal.HarnessError(
        "--moe_extension and --ops_extension belong together."
    )
  backends = [pallas_backend.Pallas()]
  if all(extensions):
    backends.append(vllm_marlin.Vllm(*extensions))
  with progress.stages() as report:
    counts = awq_bits.run(request, backends, report)
  record = {
      "schema": "awq_bits/2",
      "request": request.document(),
      **counts,
      "environment": environment.describe(),
  }
  if _OUT.value:
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    pathlib.Path(_OUT.value).write_text(text, "utf-8")
  binary.last_line(record)
  return int(awq_bits.any_differ(record))


if __name__ == "__main__":
  binary.run(main)
