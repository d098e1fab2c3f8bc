"""Does the oracle predict vLLM's packed expert layer, bit for bit?

The library behind `experiments/awq_bits.py`. Random fixtures run through the
real kernels on a device and through the NumPy oracle on the CPU's cores; every
element of the four surfaces is compared by its bits. Both run the whole chain,
so a difference in S1 is inherited by the rest.

Layer: torch_bridge.
"""

from collections.abc import Callable
from collections.abc import Iterator
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import pathlib

import numpy as np
import torch

from moejax.contracts import document
from moejax.contracts import packed_moe
from moejax.contracts import refusal
from moejax.numerics.packed import alignment
from moejax.numerics.packed import oracle
from moejax.protocols import packed_fixture
from torch_bridge import tensor_bits
from torch_bridge import vllm_marlin

ALIGNMENTS = ("stable", "native")


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
  """What is compared; a function of these values alone.

  Attributes:
    moe_extension: Path of `_moe_C_stable_libtorch.abi3.so`.
    ops_extension: Path of `_C_stable_libtorch.abi3.so`.
    fixtures: Number of fixtures of each dtype.
    min_tokens: Fixture sizes run from this
    max_tokens: to this.
    top_k: Experts of a token.
    shape: Sizes of the layer.
    configurations: (thread_k, thread_n, blocks a multiprocessor), in turn.
    dtypes: One layer and its fixtures for each.
    seed: Of everything.
    workers: Processes that run the oracle.
  """

  moe_extension: str
  ops_extension: str
  fixtures: int = 50
  min_tokens: int = 1
  max_tokens: int = 64
  top_k: int = 8
  shape: packed_fixture.LayerShape = packed_fixture.LayerShape()
  configurations: tuple[tuple[int, int, int], ...] = (
      (128, 64, 4), (64, 128, 3),
  )
  dtypes: tuple[str, ...] = ("float16", "bfloat16")
  seed: int = 20260722
  workers: int = 2

  def __post_init__(self):
    document.check_types(self)
    if min(self.fixtures, self.min_tokens, self.workers) < 1 or (
        self.min_tokens > self.max_tokens
    ):
      raise refusal.HarnessError(
          f"no fixtures of fixtures={self.fixtures}, min_tokens="
          f"{self.min_tokens}, max_tokens={self.max_tokens}, workers="
          f"{self.workers}."
      )

  def document(self) -> dict:
    """Returns the request as JSON values; of the files, their names."""
    values = document.to_dict(self) | {
        name: pathlib.Path(getattr(self, name)).name
        for name in ("moe_extension", "ops_extension")
    }
    del values["workers"]
    return values


@dataclasses.dataclass(frozen=True, eq=False)
class Fixture:
  """One case: how many tokens, which contract, which plan.

  Attributes:
    seed: Of its activations and routes.
    tokens: M.
    contract: The layer's.
    alignment: "stable", or "native": the plan that vLLM's kernel made.
    blocks: The plan; None until it is made.
  """

  seed: int
  tokens: int
  contract: packed_moe.PackedMoeContract
  alignment: str
  blocks: alignment.RouteBlocks | None = None


def run(
    request: Request,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> dict:
  """Returns the record's counts as JSON values.

  Raises:
    HarnessError: an extension file is missing or cannot be loaded.
    UnsupportedError: there is no CUDA device, or it has another grid.
  """
  kernels = vllm_marlin.Kernels(request.moe_extension, request.ops_extension)
  counts = Counts()
  for dtype in request.dtypes:
    with _oracle_workers(request, dtype) as pool:
      device = _Device(kernels, request, dtype, pool)
      made = map(device.align, fixtures(request, dtype, kernels.num_sms))
      waiting = {pool.submit(_predict, f): f for f in made}
      done = concurrent.futures.as_completed(waiting)
      for number, future in enumerate(done, 1):
        fixture = waiting[future]
        counts.add(fixture, future.result(), device.surfaces(fixture))
        progress(f"fixtures, {dtype}", number, len(waiting))
  return counts.document()


def fixtures(request: Request, dtype: str, num_sms: int) -> Iterator[Fixture]:
  """Yields the fixtures of a dtype: configurations and alignments in turn."""
  rng = np.random.default_rng([request.seed, len(dtype)])
  kinds = itertools.cycle(
      itertools.product(request.configurations, ALIGNMENTS)
  )
  for number in range(request.fixtures):
    (thread_k, thread_n, per_sm), alignment_kind = next(kinds)
    yield Fixture(
        seed=request.seed + 1 + number,
        tokens=int(
            rng.integers(request.min_tokens, request.max_tokens + 1)
        ),
        contract=packed_moe.marlin(
            dtype=dtype, thread_k=thread_k, thread_n=thread_n,
            grid=per_sm * num_sms, group_size=request.shape.group_size,
        ),
        alignment=alignment_kind,
    )


class Counts:
  """Elements compared and elements that differ, by surface and by kind."""

  def __init__(self):
    names = oracle.Surfaces._fields
    self._elements = dict.fromkeys(names, 0)
    self._mismatches = dict.fromkeys(names, 0)
    self._non_finite = dict.fromkeys(names, 0)
    self._kinds: dict[str, list[int]] = {}
    self._first: dict | None = None
    self._fixtures = 0
    self._routes = 0

  def add(self, fixture: Fixture, ours: oracle.Surfaces,
          theirs: oracle.Surfaces) -> None:
    """Compares the surfaces of a fixture.

    Raises:
      ValueError: two surfaces have different shapes or dtypes.
    """
    wrong = 0
    for name, a, b in zip(ours._fields, ours, theirs, strict=True):
      if (a.shape, a.dtype) != (b.shape, b.dtype):
        raise ValueError(
            f"{name}: {a.dtype}{a.shape} against {b.dtype}{b.shape}."
        )
      differs = a.view(np.uint16) != b.view(np.uint16)
      self._elements[name] += a.size
      self._mismatches[name] += int(differs.sum())
      self._non_finite[name] += int((~np.isfinite(a.astype(np.float32))).sum())
      wrong += int(differs.sum())
      if differs.any() and self._first is None:
        row, column = map(int, np.argwhere(differs)[0])
        self._first = {
            "surface": name, "row": row, "column": column,
            "seed": fixture.seed, "tokens": fixture.tokens,
            "contract": document.to_dict(fixture.contract),
            "oracle": f"{int(a.view(np.uint16)[row, column]):#06x}",
            "vllm": f"{int(b.view(np.uint16)[row, column]):#06x}",
        }
    gemm = fixture.contract.w13
    kind = (
        f"{gemm.dtype} ({gemm.thread_k},{gemm.thread_n}) grid {gemm.grid}"
        f" group {gemm.group_size} {fixture.alignment}"
    )
    self._fixtures += 1
    self._routes += fixture.blocks.num_routes
    entry = self._kinds.setdefault(kind, [0, 0, 0])
    entry[:] = [
        entry[0] + 1, entry[1] + sum(a.size for a in ours), entry[2] + wrong
    ]

  def document(self) -> dict:
    """Returns the counts as JSON values."""
    return {
        "fixtures": self._fixtures,
        "routes": self._routes,
        "elements": sum(self._elements.values()),
        "mismatches": {"oracle_vllm": sum(self._mismatches.values())},
        "surfaces": {
            name: {
                "elements": self._elements[name],
                "mismatches": {"oracle_vllm": self._mismatches[name]},
                "non_finite": self._non_finite[name],
            }
            for name in self._elements
        },
        "kinds": {
            kind: dict(zip(("fixtures", "elements", "oracle_vllm"), entry,
                           strict=True))
            for kind, entry in sorted(self._kinds.items())
        },
        "first_difference": self._first,
    }


class _Device:
  """The real kernels with one layer's weights."""

  def __init__(self, kernels, request: Request, dtype: str, pool):
    self._kernels, self._request, self._dtype = kernels, request, dtype
    self._w13, self._w2 = (
        kernels.weights(list(pool.map(
            _repack, itertools.repeat(gemm), range(request.shape.experts)
        )))
        for gemm in (0, 1)
    )

  def align(self, fixture: Fixture) -> Fixture:
    experts = self._request.shape.experts
    ids = self._inputs(fixture).expert_ids
    rows = alignment.block_rows_for(ids.size, experts)
    make = (
        alignment.route_blocks if fixture.alignment == "stable"
        else self._kernels.align
    )
    return dataclasses.replace(fixture, blocks=make(ids, experts, rows))

  def surfaces(self, fixture: Fixture) -> oracle.Surfaces:
    inputs, blocks = self._inputs(fixture), fixture.blocks
    contract, kernels = fixture.contract, self._kernels
    x = tensor_bits.to_torch(inputs.x).cuda()
    gates = torch.from_numpy(inputs.gates.reshape(-1)).cuda()
    s1 = kernels.gemm(x, self._w13, blocks, contract.w13, gates)
    s2 = kernels.silu_and_mul(s1)
    s3 = kernels.gemm(s2, self._w2, blocks, contract.w2, gates)
    s4 = kernels.combine(s3, self._request.top_k)
    return oracle.Surfaces(*map(tensor_bits.to_numpy, (s1, s2, s3, s4)))

  def _inputs(self, fixture: Fixture) -> packed_fixture.Request:
    return _inputs(self._request, fixture)


def _inputs(request: Request, fixture: Fixture) -> packed_fixture.Request:
  return packed_fixture.request(
      fixture.seed, fixture.tokens, request.top_k, request.shape,
      fixture.contract.dtype,
  )


def _oracle_workers(request: Request, dtype: str):
  """Processes that hold the layer; spawned, as a CUDA process cannot fork."""
  return concurrent.futures.ProcessPoolExecutor(
      request.workers, multiprocessing.get_context("spawn"), _hold,
      (request, dtype),
  )


_held = {}  # What a worker process holds.


def _hold(request: Request, dtype: str) -> None:
  _held["request"] = request
  _held["layer"] = packed_fixture.layer(request.seed, request.shape, dtype)


def _repack(gemm: int, expert: int):
  return vllm_marlin.repack(_held["layer"][gemm][expert])


def _predict(fixture: Fixture) -> oracle.Surfaces:
  inputs = _inputs(_held["request"], fixture)
  return oracle.packed_moe_oracle(
      inputs.x, inputs.gates, *_held["layer"], fixture.blocks, fixture.contract
  )
