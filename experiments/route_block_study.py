"""Does the block in which a route lies decide bits? Seven arms, two histories.

  python -m experiments.route_block_study --backend=oracle --out=DIR

Runs the route-block study on one backend: native plans, the own and the other
history's plan injected, two routes swapped inside a block, two exchanged across
blocks, another grid, the stable plan; each on two histories, five times. Writes
the raw tensors of four surfaces for every cell, whole or not at all. Judging is
the work of `experiments.score_route_block`. Other sizes are asked for with
--request, a JSON file of `moejax/protocols/route_block/request.py`.

The published grids of 246 and 200 thread blocks are what the oracle and our
kernels run anywhere. vLLM's kernels run multiples of the device's processors:
on an H200, --thread_k=128 --thread_n=64 --grid=528 --other_grid=132.

Exit codes: 0 the study is written, 2 usage or harness error, 4 no device that
can run it. The library call behind it is `route_block.study.run`.
"""

import dataclasses
import json
import os
import pathlib
import time

from absl import flags

from experiments.support import binary
from experiments.support import progress
from experiments.support import study_backends
from moejax.contracts import document
from moejax.contracts import refusal
from moejax.protocols.route_block import request as request_lib
from moejax.protocols.route_block import study

_BACKEND = flags.DEFINE_string("backend", "oracle", "oracle, pallas or vllm.")
_OUT = flags.DEFINE_string("out", None, "Folder of the study.")
_REQUEST = flags.DEFINE_string(
    "request", None, "JSON file with all fields of the request."
)
_SEED = flags.DEFINE_integer("fixture_seed", None, "Seed of the fixture.")
_THREAD_K = flags.DEFINE_integer("thread_k", None, "K rows of a tile.")
_THREAD_N = flags.DEFINE_integer("thread_n", None, "Columns of a tile.")
_GRID = flags.DEFINE_integer("grid", None, "Thread blocks.")
_OTHER_GRID = flags.DEFINE_integer(
    "other_grid", None, "Thread blocks that cut both blocks alike."
)
_REPLICATES = flags.DEFINE_integer(
    "replicates", None, "Cells of an arm and history."
)
_WORKERS = flags.DEFINE_integer(
    "workers", os.cpu_count(), "Processes that run the oracle.", lower_bound=1
)
_MOE = flags.DEFINE_string(
    "moe_extension", "", "vLLM's _moe_C_stable_libtorch.abi3.so."
)
_OPS = flags.DEFINE_string(
    "ops_extension", "", "vLLM's _C_stable_libtorch.abi3.so."
)


def main() -> int:
  """Runs the study, returns the exit code."""
  if not _OUT.value:
    raise refusal.HarnessError("--out names the folder of the study.")
  request = _request()
  maker = study_backends.maker(
      _BACKEND.value, _WORKERS.value, _MOE.value, _OPS.value
  )
  start = time.monotonic()
  with progress.stages() as report:
    manifest = study.run(request, maker, _OUT.value, report)
  binary.last_line({
      "schema": "route_block_run/1",
      "backend": maker.backend,
      "request": manifest["request"],
      "cells": len(request.cells()),
      "seconds": round(time.monotonic() - start, 1),
      "source": manifest["source"],
      "binary": manifest["binary"],
      "environment": manifest["environment"],
  })
  return 0


def _request() -> request_lib.StudyRequest:
  """The request of the file or the defaults, with the flags on top."""
  request = request_lib.StudyRequest()
  if _REQUEST.value:
    path = pathlib.Path(_REQUEST.value)
    try:
      request = document.from_dict(
          request_lib.StudyRequest, json.loads(path.read_text("utf-8"))
      )
    except (OSError, ValueError) as error:
      raise refusal.HarnessError(f"--request={path}: {error}") from error
  given = {
      "seed": _SEED.value,
      "thread_k": _THREAD_K.value,
      "thread_n": _THREAD_N.value,
      "grid": _GRID.value,
      "other_grid": _OTHER_GRID.value,
      "replicates": _REPLICATES.value,
  }
  return dataclasses.replace(
      request, **{k: v for k, v in given.items() if v is not None}
  )


if __name__ == "__main__":
  binary.run(main)
