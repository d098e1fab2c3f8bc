"""Do backends compute a packed expert layer as the oracle does, bit for bit?

The library behind `experiments/awq_bits.py`. Random fixtures run through the
backends on a device and through the NumPy oracle on the CPU's cores; every
element of the four surfaces is compared by its bits, each pair of backends by
itself. All run the whole chain, so a difference in S1 is inherited by the rest.

Layer: torch_bridge.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import pathlib
from typing import Protocol

import numpy as np

from moejax.contracts import document
from moejax.contracts import packed_moe
from moejax.contracts import refusal
from moejax.numerics.packed import alignment
from moejax.numerics.packed import awq_format
from moejax.numerics.packed import oracle
from moejax.protocols import packed_fixture

BACKENDS = ("oracle", "pallas", "vllm")
PAIRS = tuple(itertools.combinations(BACKENDS, 2))
UNSUPPORTED = "unsupported"


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
  """What is compared; a function of these values alone.

  Attributes:
    moe_extension: Path of `_moe_C_stable_libtorch.abi3.so`, or "".
    ops_extension: Path of `_C_stable_libtorch.abi3.so`, or "".
    fixtures: Number of fixtures of each dtype.
    min_tokens: Fixture sizes run from this
    max_tokens: to this.
    top_k: Experts of a token.
    shape: Sizes of the layer.
    configurations: (thread_k, thread_n, blocks a multiprocessor), in turn.
    num_sms: Multiprocessors of the device whose schedule is compared. vLLM's
      kernels run on no other; the oracle and ours do.
    dtypes: One layer and its fixtures for each.
    seed: Of everything.
    workers: Processes that run the oracle.
  """

  moe_extension: str = ""
  ops_extension: str = ""
  fixtures: int = 50
  min_tokens: int = 1
  max_tokens: int = 64
  top_k: int = 8
  shape: packed_fixture.LayerShape = packed_fixture.LayerShape()
  configurations: tuple[tuple[int, int, int], ...] = (
      (128, 64, 4), (64, 128, 3),
  )
  num_sms: int = 132
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
    alignment: "stable"; "native", the plan that vLLM's kernel made; or
      "shuffled", any legal plan, where that kernel is not at hand.
    blocks: The plan; None until it is made.
  """

  seed: int
  tokens: int
  contract: packed_moe.PackedMoeContract
  alignment: str
  blocks: alignment.RouteBlocks | None = None


class Backend(Protocol):
  """An implementation of the layer on a device.

  Attributes:
    name: One of BACKENDS, not "oracle".
    align: (expert_ids, experts, block_rows) to a plan, or None.
  """

  name: str
  align: Callable | None

  @staticmethod
  def prepare(operand: awq_format.PackedOperand, dtype: str):
    """Packs one expert's weight; called in another process."""

  def load(self, w13: Sequence, w2: Sequence, dtype: str) -> None:
    """Takes the prepared experts of a layer to the device."""

  def surfaces(
      self,
      inputs: packed_fixture.Request,
      blocks: alignment.RouteBlocks,
      contract: packed_moe.PackedMoeContract,
  ) -> oracle.Surfaces:
    """Runs the loaded layer."""


def run(
    request: Request,
    backends: Sequence[Backend],
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> dict:
  """Returns the record's counts as JSON values.

  Raises:
    UnsupportedError: a backend cannot run a fixture on this device.
  """
  counts = Counts()
  native = next((b.align for b in backends if b.align), None)
  for dtype in request.dtypes:
    with _oracle_workers(request, dtype) as pool:
      for backend in backends:
        backend.load(*_prepared(backend, request, dtype, pool), dtype)
      made = (
          planned(request, fixture, native)
          for fixture in fixtures(request, dtype, native is not None)
      )
      waiting = {pool.submit(_predict, f): f for f in made}
      done = concurrent.futures.as_completed(waiting)
      for number, future in enumerate(done, 1):
        fixture = waiting[future]
        inputs = _inputs(request, fixture)
        found = {"oracle": future.result()} | {
            b.name: b.surfaces(inputs, fixture.blocks, fixture.contract)
            for b in backends
        }
        counts.add(fixture, found)
        progress(f"fixtures, {dtype}", number, len(waiting))
  return counts.document()


def fixtures(
    request: Request, dtype: str, native: bool
) -> Iterator[Fixture]:
  """Yields the fixtures of a dtype: configurations and alignments in turn."""
  rng = np.random.default_rng([request.seed, len(dtype)])
  alignments = ("stable", "native" if native else "shuffled")
  kinds = itertools.cycle(
      itertools.product(request.configurations, alignments)
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
            grid=per_sm * request.num_sms,
            group_size=request.shape.group_size,
        ),
        alignment=alignment_kind,
    )


class Counts:
  """Elements compared and elements that differ, by pair, surface and kind."""

  def __init__(self):
    names = oracle.Surfaces._fields
    self._elements = dict.fromkeys(names, 0)
    self._non_finite = dict.fromkeys(names, 0)
    self._mismatches = {name: {} for name in names}
    self._kinds: dict[str, dict] = {}
    self._first: dict | None = None
    self._fixtures = 0
    self._routes = 0

  def add(
      self, fixture: Fixture, found: Mapping[str, oracle.Surfaces]
  ) -> None:
    """Compares the surfaces of a fixture.

    Args:
      fixture: Where they come from.
      found: By backend; "oracle" is among them.

    Raises:
      ValueError: two surfaces have different shapes or dtypes.
    """
    kind = self._kinds.setdefault(_kind(fixture), {"fixtures": 0})
    kind["fixtures"] += 1
    self._fixtures += 1
    self._routes += fixture.blocks.num_routes
    for name, surface in found["oracle"]._asdict().items():
      self._elements[name] += surface.size
      finite = np.isfinite(surface.astype(np.float32))
      self._non_finite[name] += int((~finite).sum())
      kind["elements"] = kind.get("elements", 0) + surface.size
      for pair in PAIRS:
        if pair[0] in found and pair[1] in found:
          count = self._compare(fixture, name, pair, found)
          label = "_".join(pair)
          for entry in (self._mismatches[name], kind):
            entry[label] = entry.get(label, 0) + count

  def _compare(self, fixture, name, pair, found) -> int:
    a, b = (getattr(found[backend], name) for backend in pair)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
      raise ValueError(
          f"{name}: {pair[0]} {a.dtype}{a.shape} against {pair[1]}"
          f" {b.dtype}{b.shape}."
      )
    differs = a.view(np.uint16) != b.view(np.uint16)
    if differs.any() and self._first is None:
      row, column = map(int, np.argwhere(differs)[0])
      self._first = {
          "surface": name, "row": row, "column": column,
          "seed": fixture.seed, "tokens": fixture.tokens,
          "contract": document.to_dict(fixture.contract),
      } | {
          backend: f"{int(x.view(np.uint16)[row, column]):#06x}"
          for backend, x in zip(pair, (a, b), strict=True)
      }
    return int(differs.sum())

  def document(self) -> dict:
    """Returns the counts as JSON values; absent pairs are "unsupported"."""
    labels = ["_".join(pair) for pair in PAIRS]

    def filled(entry):
      return {label: entry.get(label, UNSUPPORTED) for label in labels}

    totals = {}
    for entry in self._mismatches.values():
      for label, count in entry.items():
        totals[label] = totals.get(label, 0) + count
    return {
        "fixtures": self._fixtures,
        "routes": self._routes,
        "elements": sum(self._elements.values()),
        "mismatches": filled(totals),
        "surfaces": {
            name: {
                "elements": self._elements[name],
                "mismatches": filled(self._mismatches[name]),
                "non_finite": self._non_finite[name],
            }
            for name in self._elements
        },
        "kinds": {
            kind: {key: entry[key] for key in ("fixtures", "elements")}
            | filled(entry)
            for kind, entry in sorted(self._kinds.items())
        },
        "first_difference": self._first,
    }


def any_differ(counts: dict) -> bool:
  """Whether a compared pair of the document has a difference."""
  return any(
      count != UNSUPPORTED and count > 0
      for count in counts["mismatches"].values()
  )


def _kind(fixture: Fixture) -> str:
  gemm = fixture.contract.w13
  return (
      f"{gemm.dtype} ({gemm.thread_k},{gemm.thread_n}) grid {gemm.grid}"
      f" group {gemm.group_size} {fixture.alignment}"
  )


def planned(
    request: Request, fixture: Fixture, native: Callable | None
) -> Fixture:
  """Returns the fixture with its plan; `native` makes the native ones."""
  ids, experts = _inputs(request, fixture).expert_ids, request.shape.experts
  rows = alignment.block_rows_for(ids.size, experts)
  if fixture.alignment == "native":
    return dataclasses.replace(fixture, blocks=native(ids, experts, rows))
  orders = {}
  if fixture.alignment == "shuffled":
    rng = np.random.default_rng(fixture.seed)
    flat = ids.reshape(-1)
    orders = {
        int(e): rng.permutation(np.flatnonzero(flat == e))
        for e in np.unique(flat)
    }
  blocks = alignment.route_blocks(ids, experts, rows, orders=orders)
  return dataclasses.replace(fixture, blocks=blocks)


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


def _prepared(backend: Backend, request: Request, dtype: str, pool):
  """Both projections of all experts, packed by the worker processes."""
  experts = range(request.shape.experts)
  return [
      list(pool.map(
          _prepare, itertools.repeat(backend.prepare), itertools.repeat(gemm),
          experts, itertools.repeat(dtype),
      ))
      for gemm in (0, 1)
  ]


def _prepare(prepare, gemm: int, expert: int, dtype: str):
  return prepare(_held["layer"][gemm][expert], dtype)


def _predict(fixture: Fixture) -> oracle.Surfaces:
  inputs = _inputs(_held["request"], fixture)
  return oracle.packed_moe_oracle(
      inputs.x, inputs.gates, *_held["layer"], fixture.blocks, fixture.contract
  )
