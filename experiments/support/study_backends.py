"""The three backends of a route-block study, and what binary each is.

Layer: experiments.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import concurrent.futures
import multiprocessing
import pathlib
from typing import Any

import jax

from experiments.support import environment
from experiments.support import pallas_backend
from moejax.contracts import refusal
from moejax.numerics.packed import oracle
from moejax.protocols import packed_fixture
from moejax.protocols.route_block import identity
from moejax.protocols.route_block import request as request_lib
from moejax.protocols.route_block import study
from torch_bridge import awq_bits

_OUR_BINARIES = {
    "oracle": ("numpy", "ml_dtypes"),
    "pallas": ("numpy", "ml_dtypes", "jaxlib"),
    "vllm": ("numpy", "ml_dtypes"),
}


def maker(
    backend: str,
    workers: int = 1,
    moe_extension: str = "",
    ops_extension: str = "",
) -> study.Maker:
  """Returns a backend of a study.

  Args:
    backend: "oracle", "pallas" or "vllm".
    workers: Processes that run the oracle.
    moe_extension: vLLM's `_moe_C_stable_libtorch.abi3.so`, for "vllm".
    ops_extension: vLLM's `_C_stable_libtorch.abi3.so`, for "vllm".

  Raises:
    HarnessError: the name is none of these, or the extensions do not fit it.
    UnsupportedError: there is no device that runs the backend.
  """
  extensions = {"moe": moe_extension, "ops": ops_extension}
  if backend not in request_lib.BACKENDS:
    raise refusal.HarnessError(
        f"--backend={backend} is not one of"
        f" {', '.join(request_lib.BACKENDS)}."
    )
  if backend == "vllm" and not all(extensions.values()):
    raise refusal.HarnessError(
        "--backend=vllm needs --moe_extension and --ops_extension."
    )
  if backend != "vllm" and any(extensions.values()):
    raise refusal.HarnessError(
        f"--backend={backend} takes no vLLM extension."
    )
  compute: Callable = {
      "oracle": lambda: oracle_cells(workers),
      "pallas": lambda: device_cells(pallas_backend.Pallas()),
      "vllm": lambda: device_cells(_vllm(moe_extension, ops_extension)),
  }[backend]()
  return study.Maker(
      backend, compute, _binary(backend, extensions), environment.source,
      environment.describe(),
  )


def _vllm(moe_extension: str, ops_extension: str) -> awq_bits.Backend:
  # Here, because the oracle and the scorer run on machines without torch.
  from torch_bridge import vllm_marlin  # pylint: disable=g-import-not-at-top

  return vllm_marlin.Vllm(moe_extension, ops_extension)


def oracle_cells(workers: int) -> study.Compute:
  """Returns the oracle on the cores of the CPU, each cell computed anew."""

  def compute(request, inputs, jobs) -> Iterator[oracle.Surfaces]:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        workers, context, _hold, (request, inputs)
    ) as pool:
      yield from pool.map(_predict, jobs)

  return compute


def device_cells(backend: awq_bits.Backend) -> study.Compute:
  """Returns a backend of `awq_bits` as a backend of studies."""

  def compute(request, inputs, jobs) -> Iterator[oracle.Surfaces]:
    layer = packed_fixture.layer(request.seed, request.shape, request.dtype)
    backend.load(
        *([backend.prepare(o, request.dtype) for o in part] for part in layer),
        request.dtype,
    )
    for job in jobs:
      yield backend.surfaces(inputs, job.blocks, request.contract(job.grid))

  return compute


_held: dict[str, Any] = {}  # What a worker process holds.


def _hold(request, inputs) -> None:
  _held["request"], _held["inputs"] = request, inputs
  _held["layer"] = packed_fixture.layer(
      request.seed, request.shape, request.dtype
  )


def _predict(job: study.Job) -> oracle.Surfaces:
  inputs = _held["inputs"]
  return oracle.packed_moe_oracle(
      inputs.x, inputs.gates, *_held["layer"], job.blocks,
      _held["request"].contract(job.grid),
  )


def _binary(backend: str, extensions: dict[str, str]) -> dict[str, Any]:
  """The identity of the native code that computes."""
  files = {name: identity.native_files(name) for name in _OUR_BINARIES[backend]}
  files |= {
      pathlib.Path(path).name: identity.file_digest(pathlib.Path(path))
      for path in extensions.values()
      if path
  }
  packages = environment.describe()["packages"]
  names: Sequence[str] = _OUR_BINARIES[backend] + (
      ("torch",) if backend == "vllm" else ()
  )
  device = "cpu" if backend == "oracle" else jax.devices()[0].device_kind
  return identity.binary(
      backend, {name: packages[name] for name in names}, files, device
  )
