"""Scores a study from its folder: accepted, or rejected for one reason.

The library behind `experiments/score_route_block.py`. It reads the request and
the raw tensors, and derives all else itself.

Layer: protocols.
"""

from collections.abc import Callable
from collections.abc import Sequence
import pathlib
from typing import Any

from moejax.contracts import document
from moejax.contracts import refusal
from moejax.protocols.route_block import agreement
from moejax.protocols.route_block import checks
from moejax.protocols.route_block import fixture as fixture_lib
from moejax.protocols.route_block import identity
from moejax.protocols.route_block import record as record_lib
from moejax.protocols.route_block import relations
from moejax.protocols.route_block import request as request_lib
from moejax.protocols.route_block import store
from moejax.protocols.route_block import study as study_lib

SCHEMA = "route_block_score/1"
_MANIFEST = {
    "backend": str, "request": dict, "fixture": dict, "contracts": dict,
    "source": str, "binary": dict, "environment": dict,
}


def score(
    folder: str | pathlib.Path,
    source: str,
    binary: str = "",
    replay: study_lib.Compute | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    against: Sequence[str | pathlib.Path] = (),
) -> dict[str, Any]:
  """Returns the score as JSON values.

  Args:
    folder: The study.
    source: The digest of source files that the study must have, in general
      that of the scorer's own.
    binary: The digest of the binary identity that it must have; "" pins none,
      and the score says so.
    replay: The oracle, to compute each outcome anew and compare it in bits;
      None leaves that out, and the score says so.
    progress: Told (stage, done, of how many).
    against: Studies of the same request on other backends, whose raw tensors
      must have the same bits.

  Returns:
    "accepted"; "reason" and "detail" of a rejection, else null; and, as far as
    the study held, its identities, trajectories, differences and the routes
    that moved between the histories.

  Raises:
    HarnessError: the folder is no study of this schema, or one of `against`
      is none of the same request.
  """
  place = pathlib.Path(folder)
  manifest = _manifest(place)
  request = _request(manifest)
  found = {
      "schema": SCHEMA,
      "accepted": False,
      "reason": None,
      "detail": None,
      "backend": manifest["backend"],
      "request": manifest["request"],
      "source": manifest["source"],
      "binary": manifest["binary"],
      "binary_pinned": bool(binary),
      "replayed": replay is not None,
      "cells": len(request.cells()),
      "agreement": [],
  }
  made = fixture_lib.make(request)
  try:
    _identities(manifest, source, binary)
    checks.contracts(request, manifest)
    checks.fixture(
        place, manifest, study_lib.fixture_document(request, made),
        study_lib.fixture_tensors(made),
    )
    outcomes = _outcomes(request, made, manifest, place, progress)
    relations.relations(outcomes)
    relations.consequences(request, outcomes)
    if replay is not None:
      _replay(request, made, outcomes, replay, progress)
    for number, other in enumerate(against, 1):
      found["agreement"].append(agreement.count(request, place, other))
      progress("agreement", number, len(against))
    _agreed(found["agreement"])
  except checks.Rejected as error:
    return found | {"reason": error.reason, "detail": error.detail}
  return found | {"accepted": True} | _shown(outcomes)


def _manifest(place: pathlib.Path) -> dict[str, Any]:
  manifest = store.read_manifest(place)
  for name, kind in _MANIFEST.items():
    if not isinstance(manifest.get(name), kind):
      raise refusal.HarnessError(
          f"{place / store.MANIFEST}: {name} is no {kind.__name__}."
      )
  if manifest["backend"] not in request_lib.BACKENDS:
    raise refusal.HarnessError(
        f"{place}: backend {manifest['backend']!r} is not one of"
        f" {', '.join(request_lib.BACKENDS)}."
    )
  return manifest


def _request(manifest) -> request_lib.StudyRequest:
  try:
    return document.from_dict(request_lib.StudyRequest, manifest["request"])
  except (ValueError, TypeError) as error:
    raise refusal.HarnessError(f"the study's request: {error}") from error


def _outcomes(
    request, made, manifest, place, progress
) -> dict[tuple[str, str], relations.Outcome]:
  """Checks every cell, and that replicates are equal; returns the outcomes."""
  records = store.read_records(place)
  checks.cells(request, place, records)
  outcomes, cells = {}, request.cells()
  for cell, record in zip(cells, records, strict=True):
    blocks = checks.cell(request, made, manifest, record, cell)
    surfaces = checks.surfaces(request, place, record)
    stages = record_lib.stages(surfaces._asdict())
    first = outcomes.setdefault(
        (cell.arm, cell.history),
        relations.Outcome(blocks, record.grid, surfaces, stages),
    )
    if first.stages != stages:
      names = [n for n in stages if stages[n] != first.stages[n]]
      raise checks.Rejected(
          "replicates",
          f"{cell.name}: {', '.join(names)} is not that of replicate 0.",
      )
    progress("cells", cell.ordinal + 1, len(cells))
  return outcomes


def _replay(request, made, outcomes, compute, progress) -> None:
  """Computes each distinct plan and grid anew, and compares all bits."""
  jobs = {}
  for key, o in outcomes.items():
    jobs.setdefault((o.blocks.sorted_routes.tobytes(), o.grid), []).append(key)
  wanted = [outcomes[keys[0]] for keys in jobs.values()]
  found = compute(
      request, made.inputs, [study_lib.Job(o.blocks, o.grid) for o in wanted]
  )
  for number, (keys, surfaces) in enumerate(
      zip(jobs.values(), found, strict=True), 1
  ):
    stages = record_lib.stages(surfaces._asdict())
    for arm, history in keys:
      noted = outcomes[arm, history].stages
      names = [n for n in stages if stages[n] != noted[n]]
      if names:
        raise checks.Rejected(
            "oracle",
            f"{arm} {history}: {', '.join(names)} is not the oracle's.",
        )
    progress("oracle", number, len(jobs))


def _agreed(counts: Sequence[dict[str, Any]]) -> None:
  for count in counts:
    if count["first"] is not None:
      raise checks.Rejected(
          "agreement",
          f"{sum(count['differing'].values())} elements are not those of"
          f" {count['backend']}; first {count['first']}.",
      )


def _identities(manifest, source: str, binary: str) -> None:
  if manifest["source"] != source:
    raise checks.Rejected(
        "source_identity",
        f"made by source {manifest['source']}, expected {source}.",
    )
  noted = manifest["binary"].get("digest")
  taken = identity.binary_digest(manifest["binary"])
  if noted != taken or manifest["binary"].get("backend") != manifest["backend"]:
    raise checks.Rejected(
        "binary_identity", f"noted {noted}, its parts have {taken}."
    )
  if binary and noted != binary:
    raise checks.Rejected(
        "binary_identity", f"made by {noted}, expected {binary}."
    )


def _shown(outcomes) -> dict[str, Any]:
  """What an accepted study shows."""
  native = [outcomes["native", h] for h in request_lib.HISTORIES]
  exchanged = outcomes["exchange_across", "H0"]
  return {
      "trajectories": [
          {"arm": arm, "history": history, "grid": outcome.grid,
           "membership": outcome.blocks.identity(), **outcome.stages}
          for (arm, history), outcome in outcomes.items()
      ],
      "differences": relations.counts(outcomes),
      "moved_routes": {
          "between_histories": relations.moved_routes(
              native[0].blocks, native[1].blocks
          ),
          "left_after_exchange": relations.moved_routes(
              exchanged.blocks, native[1].blocks
          ),
      },
  }
