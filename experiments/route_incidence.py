"""How often does vLLM's alignment kernel change a packed layer's output?

  python -m experiments.route_incidence --moe_extension=PATH \\
    --ops_extension=PATH

Runs the same requests many times through vLLM's alignment and GEMM kernels on a
CUDA device and counts distinct orders, memberships and output bit patterns,
with and without allocations in front of every call; then the same under our
stable plan. The last line is one JSON record; --out also writes it to a file.
Exit codes: 0 counted, 2 usage or harness error, 4 no device that can run it.
The library call behind it is `torch_bridge.route_incidence.run`.
"""

import concurrent.futures
import json
import pathlib

from absl import flags

from experiments.support import binary
from experiments.support import environment
from experiments.support import progress
from moejax.contracts import document
from moejax.protocols import packed_fixture
from torch_bridge import allocation_prelude
from torch_bridge import route_incidence
from torch_bridge import vllm_marlin

_MOE = flags.DEFINE_string(
    "moe_extension", None, "vLLM's _moe_C_stable_libtorch.abi3.so.",
    required=True,
)
_OPS = flags.DEFINE_string(
    "ops_extension", None, "vLLM's _C_stable_libtorch.abi3.so.", required=True
)
_CALLS = flags.DEFINE_integer(
    "calls", 1000, "Runs of each request.", lower_bound=1
)
_TOKENS = flags.DEFINE_multi_integer(
    "tokens", [8, 21, 64, 256], "M of a request; repeat it for several."
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float16", ("float16", "bfloat16"), "Of the layer."
)
_SEED = flags.DEFINE_integer("seed", 20260722, "Seed of layer and requests.")
_OUT = flags.DEFINE_string("out", None, "File for the record.")


def main() -> int:
  """Counts, prints a table, writes the record."""
  request = route_incidence.Request(
      tokens=tuple(_TOKENS.value), calls=_CALLS.value, dtype=_DTYPE.value,
      seed=_SEED.value,
  )
  backend = vllm_marlin.Vllm(_MOE.value, _OPS.value)
  layer = packed_fixture.layer(request.seed, request.shape, request.dtype)
  with concurrent.futures.ThreadPoolExecutor() as pool:
    prepared = [
        list(pool.map(lambda o: backend.prepare(o, request.dtype), operands))
        for operands in layer
    ]
  backend.load(*prepared, request.dtype)
  with progress.stages() as report:
    entries = route_incidence.run(
        request, backend, allocation_prelude.PRELUDES, report
    )
  for entry in entries:
    kernel, stable = entry["kernel"], entry["stable"]
    print(
        f"M {entry['tokens']:3}  prelude {entry['prelude']:12}"
        f" orders {kernel['orders']:4}  memberships {kernel['memberships']:4}"
        f"  outputs {kernel['final']:4}  stable plan: outputs"
        f" {stable['final']}"
    )
  record = {
      "schema": "route_incidence/1",
      "request": document.to_dict(request),
      "preludes": allocation_prelude.describe(),
      "entries": entries,
      "summary": route_incidence.removed(entries),
      "environment": environment.describe(),
  }
  if _OUT.value:
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    pathlib.Path(_OUT.value).write_text(text, "utf-8")
  binary.last_line(record)
  return 0


if __name__ == "__main__":
  binary.run(main)
