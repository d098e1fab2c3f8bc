"""Runs a route-block study and writes it down.

The library behind `experiments/route_block_study.py`. Every cell is computed
anew, also where its plan and grid are those of another cell: five equal
outcomes show nothing if four of them are copies.

Layer: protocols.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any, NamedTuple

from moejax.contracts import document
from moejax.contracts import refusal
from moejax.numerics import fingerprint
from moejax.numerics.packed import alignment
from moejax.numerics.packed import oracle
from moejax.protocols import packed_fixture
from moejax.protocols.route_block import arms
from moejax.protocols.route_block import fixture as fixture_lib
from moejax.protocols.route_block import identity
from moejax.protocols.route_block import record as record_lib
from moejax.protocols.route_block import request as request_lib
from moejax.protocols.route_block import store


class Job(NamedTuple):
  """What a backend computes for a cell."""

  blocks: alignment.RouteBlocks
  grid: int


# (request, inputs, jobs) to their surfaces, in order, each computed anew.
Compute = Callable[
    [
        request_lib.StudyRequest,
        packed_fixture.Request,
        Sequence[Job],
    ],
    Iterator[oracle.Surfaces],
]


@dataclasses.dataclass(frozen=True, eq=False)
class Maker:
  """Who runs a study.

  Attributes:
    backend: One of request.BACKENDS.
    compute: Runs the cells.
    binary: `identity.binary` of what computes.
    source: Returns `identity.source` now.
    environment: JSON values; recorded, not judged.
  """

  backend: str
  compute: Compute
  binary: Mapping[str, Any]
  source: Callable[[], str]
  environment: Mapping[str, Any]

  def __post_init__(self):
    if self.backend not in request_lib.BACKENDS:
      raise refusal.HarnessError(
          f"backend {self.backend!r} is not one of"
          f" {', '.join(request_lib.BACKENDS)}."
      )


def run(
    request: request_lib.StudyRequest,
    maker: Maker,
    out: str | pathlib.Path,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[str, Any]:
  """Runs all cells, writes the folder whole or not at all.

  Returns:
    The manifest.

  Raises:
    HarnessError: the folder cannot be written, the request has no fixture, or
      a source file changed while the study ran.
    UnsupportedError: the backend cannot run a cell.
  """
  made, cells = fixture_lib.make(request), request.cells()
  with store.folder(out) as place:
    source = maker.source()
    manifest = _manifest(request, made, maker, source)
    store.write_manifest(place, manifest)
    store.write_tensors(place / store.FIXTURE, fixture_tensors(made))
    treatments = [arms.treatment(request, made, cell) for cell in cells]
    jobs = [
        Job(arms.plan(request, made, declared), declared["grid"])
        for declared in treatments
    ]
    found = maker.compute(request, made.inputs, jobs)
    for cell, declared, job, surfaces in zip(
        cells, treatments, jobs, found, strict=True
    ):
      file = place / store.RAW / f"{cell.name}.safetensors"
      store.write_tensors(file, surfaces._asdict())
      store.append_record(place, record_lib.CellRecord(
          cell=cell.name,
          treatment=declared,
          stages=record_lib.stages(surfaces._asdict()),
          file_sha256=identity.file_digest(file),
          source=source,
          binary=maker.binary["digest"],
          **record_lib.of_plan(request, *job),
      ))
      progress("cells", cell.ordinal + 1, len(cells))
    if maker.source() != source:
      raise refusal.HarnessError(
          "a source file changed while the study ran; nothing is kept."
      )
  return manifest


def fixture_tensors(made: fixture_lib.Fixture) -> dict[str, Any]:
  """Returns the inputs as named arrays."""
  return {
      "x": made.inputs.x,
      "expert_ids": made.inputs.expert_ids,
      "gates": made.inputs.gates,
  }


def fixture_document(
    request: request_lib.StudyRequest, made: fixture_lib.Fixture
) -> dict[str, Any]:
  """Returns what identifies a fixture, as JSON values. Draws the weights."""
  weights = packed_fixture.layer(request.seed, request.shape, request.dtype)
  return {
      "weights": fixture_lib.weights_digest(*weights),
      "inputs": {
          name: fingerprint.fingerprint(array, name)
          for name, array in fixture_tensors(made).items()
      },
      "exchanged": list(made.exchanged),
      "swapped": list(made.swapped),
      "histories": {
          name: plan.identity() for name, plan in made.histories.items()
      },
  }


def _manifest(request, made, maker, source) -> dict[str, Any]:
  grids = (request.grid, request.other_grid)
  return {
      "schema": store.SCHEMA,
      "backend": maker.backend,
      "request": document.to_dict(request),
      "fixture": fixture_document(request, made),
      "contracts": {
          str(grid): document.to_dict(request.contract(grid)) for grid in grids
      },
      # Said so that nobody reads more into a cell than it is.
      "histories_are": "two declared legal alignments of the same routes",
      "cells_are": "each computed anew; no process of its own",
      "source": source,
      "binary": dict(maker.binary),
      "environment": dict(maker.environment),
  }
