"""A state as a tree of digests: where two states part, without their bytes.

  root
    window_kv, compressed_kv, compressor_state, indexer_state
      layers, ascending
        arrays: kv before score
    sequence

Every node is the composite of its children in this order. So a file of a few
kilobytes from another machine is enough to find the component and the layer
of the first difference.

Layer: protocols.
"""

from collections.abc import Mapping
import dataclasses
import json
import pathlib
from typing import Any

from moejax.contracts import document
from moejax.contracts import refusal
from moejax.numerics import fingerprint
from moejax.protocols.state import layout as layout_lib
from moejax.protocols.state import persistent_state

SCHEMA = "deepseek_v4_state_digests/1"
SEQUENCE = "sequence"
_ARRAY = "array"  # The name of an array that is alone in its layer.


def tree(state: persistent_state.PersistentState) -> dict[str, Any]:
  """Returns the digest tree of a state as JSON values.

  {"schema", "identity", "payload", "root", "components": [{"name", "digest",
  "layers": [{"layer", "digest", "arrays": [[name, digest], ...]}]}]}, with
  `payload` the SHA-256 of the bare float32 bytes.
  """
  components = []
  for component in layout_lib.COMPONENTS:
    by_layer: dict[int, list] = {}
    for part in state.parts():
      if part.component == component:
        by_layer.setdefault(part.layer, []).append(
            [part.array or _ARRAY, persistent_state.part_digest(state, part)]
        )
    layers = [
        {"layer": layer, "digest": _layer_digest(arrays), "arrays": arrays}
        for layer, arrays in by_layer.items()
    ]
    components.append({
        "name": component,
        "digest": _component_digest(component, layers),
        "layers": layers,
    })
  identity = dataclasses.asdict(state.identity)
  return {
      "schema": SCHEMA,
      "identity": identity,
      "payload": persistent_state.payload_digest(state),
      "root": _root_digest(identity, components),
      "components": components,
  }


def _layer_digest(arrays) -> str:
  return fingerprint.composite("layer", [tuple(row) for row in arrays])


def _component_digest(name, layers) -> str:
  return fingerprint.composite(
      name, [(str(node["layer"]), node["digest"]) for node in layers]
  )


def _root_digest(identity, components) -> str:
  sequence = document.sha256(document.canonical_json(identity))
  parts = [(node["name"], node["digest"]) for node in components]
  return fingerprint.composite("state", [*parts, (SEQUENCE, sequence)])


def root(state: persistent_state.PersistentState) -> str:
  """The one digest of a whole state."""
  return tree(state)["root"]


def write(
    path: str | pathlib.Path, state: persistent_state.PersistentState
) -> dict[str, Any]:
  """Writes the digest tree of a state as JSON; returns it."""
  found = tree(state)
  text = json.dumps(found, indent=1, sort_keys=True)
  pathlib.Path(path).write_text(text + "\n", "utf-8")
  return found


def read(path: str | pathlib.Path) -> dict[str, Any]:
  """Reads a digest tree; every composite is checked against its children.

  Raises:
    HarnessError: the file is no digest tree, or a digest is not that of its
      children.
  """
  try:
    found = json.loads(pathlib.Path(path).read_text("utf-8"))
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
      raise refusal.HarnessError(
          f"{path}: schema {schema!r} is not {SCHEMA!r}."
      )
    wrong = _broken(found)
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    raise refusal.HarnessError(f"{path}: {error!r}") from error
  if wrong:
    raise refusal.HarnessError(f"{path}: {wrong} has not the digest of its"
                               " children.")
  return found


def _broken(found: Mapping[str, Any]) -> str:
  """Names the first node whose digest is not that of its children."""
  for node in found["components"]:
    for layer in node["layers"]:
      if layer["digest"] != _layer_digest(layer["arrays"]):
        return f"{node['name']}, layer {layer['layer']}"
    if node["digest"] != _component_digest(node["name"], node["layers"]):
      return node["name"]
  expected = _root_digest(found["identity"], found["components"])
  return "" if found["root"] == expected else "root"


@dataclasses.dataclass(frozen=True, slots=True)
class Bisection:
  """Where two digest trees part first.

  Attributes:
    component: The first differing component, or None where all is equal.
    layer: The first differing layer of it.
    array: The first differing array there.
    digests_read: Digests read of each tree.
    digests: Digests that a tree holds.
  """

  component: str | None
  layer: int | None
  array: str | None
  digests_read: int
  digests: int


def bisect(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Bisection:
  """Descends from the root into the first child that differs.

  Args:
    ours: A digest tree.
    theirs: The other's, of the same subject.

  Raises:
    HarnessError: the trees belong to different things, or name different
      nodes.
  """
  persistent_state.check_same_identity(ours["identity"], theirs["identity"])
  if _names(ours) != _names(theirs):
    raise refusal.HarnessError("the digest trees name different arrays.")
  total, reads = 1, 1
  for node in ours["components"]:
    total += 1 + sum(1 + len(layer["arrays"]) for layer in node["layers"])
  if ours["root"] == theirs["root"]:
    return Bisection(None, None, None, reads, total)

  def first(left, right):
    nonlocal reads
    for a, b in zip(left, right, strict=True):
      reads += 1
      if a["digest"] != b["digest"]:
        return a, b
    raise refusal.HarnessError(
        "a digest differs and those of its children do not: a damaged tree."
    )

  a, b = first(ours["components"], theirs["components"])
  component = a["name"]
  a, b = first(a["layers"], b["layers"])
  arrays = [
      [{"name": name, "digest": digest} for name, digest in node["arrays"]]
      for node in (a, b)
  ]
  leaf, _ = first(*arrays)
  return Bisection(component, a["layer"], leaf["name"], reads, total)


def _names(found: Mapping[str, Any]) -> list:
  return [
      (node["name"], layer["layer"], [name for name, _ in layer["arrays"]])
      for node in found["components"]
      for layer in node["layers"]
  ]
