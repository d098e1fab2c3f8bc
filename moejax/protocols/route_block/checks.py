"""Is each cell what it was declared to be? Nothing in the folder is trusted.

The declared treatments, plans, memberships and schedules are derived anew from
the request; digests are taken anew from the raw tensors. The first thing that
does not hold rejects the study, with a reason that names the kind.

Layer: protocols.
"""

from collections.abc import Mapping
import json
import pathlib
from typing import Any

import numpy as np

from moejax.contracts import document
from moejax.numerics.packed import alignment
from moejax.numerics.packed import oracle
from moejax.protocols.route_block import arms
from moejax.protocols.route_block import fixture as fixture_lib
from moejax.protocols.route_block import identity
from moejax.protocols.route_block import record as record_lib
from moejax.protocols.route_block import request as request_lib
from moejax.protocols.route_block import store

REASONS = (
    "fixture",
    "contract",
    "source_identity",
    "binary_identity",
    "foreign_files",
    "cells",
    "treatment",
    "grid",
    "expert_block",
    "route",
    "schedule",
    "raw_tensor",
    "stage_hash",
    "replicates",
    "consequences",
    "relation",
    "oracle",
    "agreement",
)


class Rejected(Exception):
  """A study does not hold.

  Attributes:
    reason: One of REASONS.
    detail: What was found, and where.
  """

  def __init__(self, reason: str, detail: str):
    if reason not in REASONS:
      raise ValueError(f"{reason!r} is no reason.")
    super().__init__(f"{reason}: {detail}")
    self.reason = reason
    self.detail = detail


def cells(
    request: request_lib.StudyRequest,
    place: pathlib.Path,
    records: list[record_lib.CellRecord],
) -> None:
  """Checks that the folder holds the cells of the request and nothing else."""
  wanted = [cell.name for cell in request.cells()]
  found = [record.cell for record in records]
  if found != wanted:
    absent = [name for name in wanted if name not in found]
    raise Rejected(
        "cells",
        f"{len(found)} cells of {len(wanted)}, missing {absent[:3]}, first out"
        " of order "
        f"{next((f for f, w in zip(found, wanted) if f != w), None)}.",
    )
  foreign = store.foreign_files(place, set(wanted))
  if foreign:
    raise Rejected("foreign_files", f"{', '.join(foreign[:3])}.")


def cell(
    request: request_lib.StudyRequest,
    made: fixture_lib.Fixture,
    manifest: Mapping[str, Any],
    record: record_lib.CellRecord,
    wanted: request_lib.Cell,
) -> alignment.RouteBlocks:
  """Checks a record against its declaration; returns the plan that it ran."""
  declared = arms.treatment(request, made, wanted)
  grid = declared["grid"]
  if record.treatment | {"grid": grid} != declared:
    raise Rejected(
        "treatment",
        f"{wanted.name} is marked {_json(record.treatment)}, declared"
        f" {_json(declared)}.",
    )
  marks = record.treatment.get("grid"), record.grid
  if marks != (grid, grid):
    raise Rejected(
        "grid",
        f"{wanted.name} is marked for grid {marks[0]} and ran {marks[1]},"
        f" declared {grid}.",
    )
  blocks = arms.plan(request, made, declared)
  _plan(wanted.name, record, record_lib.of_plan(request, blocks, grid))
  for reason, mark, whole in (
      ("source_identity", record.source, manifest["source"]),
      ("binary_identity", record.binary, manifest["binary"]["digest"]),
  ):
    if mark != whole:
      raise Rejected(reason, f"{wanted.name} has {mark}, the study {whole}.")
  return blocks


def _plan(name, record, wanted) -> None:
  """Checks the plan that was run, piece by piece."""
  if record.block_experts != wanted["block_experts"]:
    raise Rejected(
        "expert_block",
        f"{name}: {_first(record.block_experts, wanted['block_experts'])}",
    )
  for field in ("sorted_routes", "membership"):
    if getattr(record, field) != wanted[field]:
      raise Rejected(
          "route",
          f"{name}: {field},"
          f" {_first(getattr(record, field), wanted[field])}",
      )
  if record.membership_digest != wanted["membership_digest"]:
    raise Rejected("route", f"{name}: digest of the membership.")
  if record.schedule != wanted["schedule"]:
    raise Rejected(
        "schedule",
        f"{name}: {_json(record.schedule)}, planned"
        f" {_json(wanted['schedule'])}.",
    )
  if record.contract != wanted["contract"]:
    raise Rejected("contract", f"{name}: {record.contract}.")


def surfaces(
    request: request_lib.StudyRequest,
    place: pathlib.Path,
    record: record_lib.CellRecord,
) -> oracle.Surfaces:
  """Loads a cell's raw tensors and takes their digests anew."""
  path = place / store.RAW / f"{record.cell}.safetensors"
  try:
    if identity.file_digest(path) != record.file_sha256:
      raise ValueError(f"{path.name} lost its digest.")
    tensors = store.read_tensors(path)
  except (OSError, ValueError) as error:
    raise Rejected("raw_tensor", f"{record.cell}: {error}") from error
  wanted = {
      name: (shape, request.dtype)
      for name, shape in record_lib.shapes(request).items()
  }
  found = {n: (t.shape, t.dtype.name) for n, t in tensors.items()}
  if found != wanted:
    raise Rejected(
        "raw_tensor", f"{record.cell} holds {found}, not {wanted}."
    )
  digests = record_lib.stages(tensors)
  wrong = [n for n, d in digests.items() if record.stages.get(n) != d]
  if wrong or set(record.stages) != set(digests):
    raise Rejected(
        "stage_hash",
        f"{record.cell}: {', '.join(wrong)} of the raw tensors is not the hash"
        " that was noted.",
    )
  return oracle.Surfaces(**tensors)


def fixture(
    place: pathlib.Path,
    manifest: Mapping[str, Any],
    drawn: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
) -> None:
  """Checks the fixture against the one drawn anew from the request.

  Args:
    place: The study.
    manifest: "fixture" is compared.
    drawn: `study.fixture_document`.
    tensors: `study.fixture_tensors`.
  """
  if manifest["fixture"] != drawn:
    keys = [
        key for key in drawn if manifest["fixture"].get(key) != drawn[key]
    ]
    raise Rejected("fixture", f"{', '.join(keys)} do not follow from the seed.")
  try:
    found = store.read_tensors(place / store.FIXTURE)
  except ValueError as error:
    raise Rejected("fixture", str(error)) from error
  for name, array in tensors.items():
    if name not in found or _bytes(found[name]) != _bytes(array):
      raise Rejected("fixture", f"{store.FIXTURE}: {name}.")


def contracts(
    request: request_lib.StudyRequest, manifest: Mapping[str, Any]
) -> None:
  """Checks the contracts that the manifest spells out."""
  wanted = {
      str(grid): document.to_dict(request.contract(grid))
      for grid in (request.grid, request.other_grid)
  }
  if manifest["contracts"] != wanted:
    raise Rejected("contract", "the contracts are not those of the request.")


def _bytes(array: np.ndarray):
  return array.dtype.name, array.shape, array.tobytes()


def _first(found, wanted) -> str:
  if len(found) != len(wanted):
    return f"{len(found)} blocks, {len(wanted)} by declaration."
  place = next(
      i for i, (f, w) in enumerate(zip(found, wanted)) if f != w
  )
  return (
      f"block {place} is {_json(found[place])}, {_json(wanted[place])} by"
      " declaration."
  )


def _json(value: Any) -> str:
  return json.dumps(value, sort_keys=True, default=str)
