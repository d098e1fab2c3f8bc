"""Is a measurement what its protocol declared? Trusts nothing.

The library behind `experiments/validate_performance.py`. It reads the protocol
and the raw samples, checks that they are all there, once, in the declared
order, and derives medians, ratios and verdicts itself.

Layer: protocols.
"""

import collections
import pathlib
import re
from typing import Any

from moejax.contracts import document
from moejax.contracts import refusal
from moejax.protocols.performance import judge
from moejax.protocols.performance import protocol as protocol_lib
from moejax.protocols.performance import store
from moejax.protocols.route_block import identity

SCHEMA = "packed_performance_validation/1"
_RUN = {
    "schema": str, "protocol": str, "arms": dict, "outputs": dict,
    "source": str, "binary": dict, "environment": dict,
}
_LINE = {"round", "arm", "start_ns", "ns"}


class Invalid(Exception):
  """A run is not valid; `reason` is one word, `detail` says what was found."""

  def __init__(self, reason: str, detail: str):
    """Takes the two."""
    super().__init__(f"{reason}: {detail}")
    self.reason, self.detail = reason, detail


def validate(
    folder: str | pathlib.Path, seal: str = "", source: str = ""
) -> dict[str, Any]:
  """Returns the verdict on a run as JSON values.

  Args:
    folder: The run.
    seal: The digest that the run printed when it ended; "" pins none. Without
      it, a run that was rewritten as a whole cannot be told from another run.
    source: The digest of the source that must have made it; "" pins none.

  Returns:
    "valid"; "reason" and "detail" of what is wrong, else null; and, of a valid
    run, its identities and its result, derived anew.

  Raises:
    HarnessError: the folder holds no protocol.
  """
  place = pathlib.Path(folder)
  if not (place / store.PROTOCOL).is_file():
    raise refusal.HarnessError(
        f"{place} is no run: it has no {store.PROTOCOL}."
    )
  found = {
      "schema": SCHEMA,
      "valid": False,
      "reason": None,
      "detail": None,
      "seal_pinned": bool(seal),
      "source_pinned": bool(source),
  }
  try:
    protocol, digest = _protocol(place)
    found |= {"seal": _seal(place, protocol, seal)}
    run = _run(place, protocol, digest, source)
    result = judge.judge(
        protocol, run["arms"], run["outputs"], _samples(place, protocol, run)
    )
    texts = map(
        document.canonical_json, (_read(place / store.RESULT, "result"), result)
    )
    if len(set(texts)) > 1:  # As texts, since 1 == 1.0 == True in Python.
      raise Invalid(
          "result", f"{store.RESULT} does not follow from the samples."
      )
  except Invalid as error:
    return found | {"reason": error.reason, "detail": error.detail}
  return found | {
      "valid": True,
      "protocol": digest,
      "samples": sum(1 for _ in protocol.slots(_supported(run))),
      "source": run["source"],
      "binary": run["binary"],
      "environment": run["environment"],
      "result": result,
  }


def _protocol(place) -> tuple[protocol_lib.Protocol, str]:
  values = _read(place / store.PROTOCOL, "protocol")
  if values.get("digest") != protocol_lib.digest(values):
    raise Invalid(
        "protocol",
        f"its digest is {protocol_lib.digest(values)}, it says"
        f" {values.get('digest')!r}.",
    )
  try:
    protocol = protocol_lib.from_fields(values.get("protocol"))
  except refusal.HarnessError as error:
    raise Invalid("protocol", str(error)) from error
  wanted = protocol_lib.to_document(protocol)
  if values != wanted:
    names = sorted(k for k in wanted | values if values.get(k) != wanted.get(k))
    raise Invalid(
        "protocol", f"{', '.join(names)} is not what this validator judges by."
    )
  return protocol, wanted["digest"]


def _seal(place, protocol, seal: str) -> str:
  """Checks that exactly the sealed files are there, with their digests."""
  path = place / store.MANIFEST
  if not path.is_file():
    raise Invalid("incomplete", "the run was not sealed.")
  manifest, digest = _read(path, "seal"), store.file_digest(path)
  if seal and digest != seal:
    raise Invalid("seal", f"the seal is {digest}, expected {seal}.")
  files, wanted = manifest.get("files"), store.names(protocol)
  if manifest.get("schema") != store.SEAL_SCHEMA or not isinstance(files, dict):
    raise Invalid("seal", f"{store.MANIFEST} is no {store.SEAL_SCHEMA}.")
  there = store.found(place)
  for names, what in ((there, "in the folder"), (sorted(files), "sealed")):
    if names != wanted:
      odd = sorted(set(names) ^ set(wanted))
      raise Invalid(
          "files", f"the files {what} are not the protocol's: {odd}."
      )
  for name in wanted:
    if store.file_digest(place / name) != files[name]:
      raise Invalid("file_digest", f"{name} was changed after the seal.")
  return digest


def _run(place, protocol, digest: str, source: str) -> dict[str, Any]:
  run = _read(place / store.RUN, "run")
  wrong = sorted(
      name for name in run | _RUN
      if name not in _RUN or not isinstance(run.get(name), _RUN[name])
  )
  if wrong or run["schema"] != store.RUN_SCHEMA:
    raise Invalid("run", f"{store.RUN}: {wrong or run['schema']}.")
  if run["protocol"] != digest:
    raise Invalid(
        "protocol", f"the run followed {run['protocol']}, not {digest}."
    )
  if source and run["source"] != source:
    raise Invalid(
        "source", f"made by source {run['source']}, expected {source}."
    )
  if run["binary"].get("digest") != identity.binary_digest(run["binary"]):
    raise Invalid("binary", "the binary's digest is not that of its parts.")
  if tuple(sorted(run["arms"])) != tuple(sorted(protocol.arms)) or not all(
      isinstance(why, str) and why for why in run["arms"].values()
  ):
    raise Invalid("arms", f"the arms are {run['arms']}.")
  wanted = {p.name: set(_supported(run)) for p in protocol.points}
  if not _supported(run) or wanted != {
      name: set(of) for name, of in run["outputs"].items()
  }:
    raise Invalid("arms", "the outputs are not those of the supported arms.")
  for point, of in run["outputs"].items():
    for arm, output in of.items():
      if not re.fullmatch("[0-9a-f]{64}", str(output)):
        raise Invalid("outputs", f"{point}, {arm}: {output!r} is no digest.")
  return run


def _supported(run) -> list[str]:
  return [arm for arm, why in run["arms"].items() if why == judge.SUPPORTED]


def _samples(place, protocol, run) -> dict[protocol_lib.Slot, int]:
  """Checks all samples; returns their nanoseconds."""
  slots = list(protocol.slots(_supported(run)))
  samples, earlier = {}, None
  for point in protocol.points:
    path = place / store.SAMPLES / f"{point.name}.jsonl"
    try:
      head, *lines = store.read_lines(path) or [None]
    except ValueError as error:
      raise Invalid("sample", str(error)) from error
    if head != store.head(place, point.name):
      raise Invalid(
          "protocol", f"{path.name} was begun under another declaration."
      )
    wanted = [slot for slot in slots if slot.point == point.name]
    _order(path.name, point.name, lines, wanted)
    for slot, line in zip(wanted, lines, strict=True):
      _time(path.name, line, earlier)
      samples[slot], earlier = line["ns"], line
  return samples


def _order(file: str, point: str, lines, wanted) -> None:
  """Checks that the samples are the declared ones, once, in their order."""
  for number, line in enumerate(lines, 2):
    if not isinstance(line, dict) or set(line) != _LINE or any(
        type(line[k]) is not (str if k == "arm" else int) for k in _LINE
    ):
      raise Invalid("sample", f"{file}, line {number} is no sample: {line!r}.")
  taken = [
      protocol_lib.Slot(point, line["round"], line["arm"]) for line in lines
  ]
  counts = collections.Counter(taken)
  for slot, count in counts.items():
    if count > 1:
      raise Invalid("doubled_sample", f"{file}: {slot} is there {count} times.")
  for slot in wanted:
    if slot not in counts:
      raise Invalid("missing_sample", f"{file}: {slot} is not there.")
  for slot, other in zip(taken, wanted, strict=False):
    if slot != other:
      raise Invalid("order", f"{file}: {slot} stands where {other} belongs.")
  if len(taken) > len(wanted):
    raise Invalid("order", f"{file}: {taken[len(wanted)]} was not declared.")


def _time(file: str, line, earlier) -> None:
  """Checks that a sample took time, behind the one before it."""
  if line["ns"] < 1 or line["start_ns"] < 0:
    raise Invalid("time", f"{file}: {line} took no time.")
  if earlier and earlier["start_ns"] + earlier["ns"] > line["start_ns"]:
    raise Invalid("time", f"{file}: {line} began before {earlier} had ended.")


def _read(path: pathlib.Path, reason: str) -> dict[str, Any]:
  try:
    return store.read(path)
  except ValueError as error:
    raise Invalid(reason, str(error)) from error
