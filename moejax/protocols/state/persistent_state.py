"""The full persistent state of one sequence as one object.

A state is an ordered mapping of float32 arrays and the record of what they
belong to. Both digests and files cover the two: canonical JSON headers and
little-endian payloads, component by component, layer by layer, row by row
(`layout.py` has the order).

Layer: protocols.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from moejax.contracts import document
from moejax.contracts import refusal
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.numerics import fingerprint
from moejax.protocols.state import layout as layout_lib

SCHEMA = "deepseek_v4_state/1"
_RECORD = "record"


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
  """What a state belongs to; part of every digest.

  Two states are compared, and one is put into the other, only where all of it
  is equal. The contract is left out on purpose: states under two contracts are
  what one wants to compare.

  Attributes:
    config: Digest of the decoder's configuration.
    prompt: Digest of the prompt's token ids (`prompt_digest`).
    length: Tokens seen, T; the last position is T - 1.
    layout: One of `layout.LAYOUTS`.
    checkpoint: Digest of the weights, or empty.
    tokenizer: SHA-256 of tokenizer.json, or empty.
    decoding: How tokens are chosen, as canonical JSON, or empty.
  """

  config: str
  prompt: str
  length: int
  layout: str
  checkpoint: str = ""
  tokenizer: str = ""
  decoding: str = ""


def prompt_digest(tokens: Sequence[int]) -> str:
  """SHA-256 of the canonical JSON list of token ids."""
  return document.sha256(document.canonical_json([int(t) for t in tokens]))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PersistentState:
  """One sequence at one decode boundary.

  Attributes:
    config: The decoder's configuration.
    identity: What the arrays belong to.
    arrays: {array name: float32 [row, channel]}, in the order of the layout.

  Raises:
    HarnessError: a name, a shape or a dtype is not that of the layout, or the
      identity is of another configuration.
  """

  config: config_lib.DeepseekV4Config
  identity: Identity
  arrays: Mapping[str, np.ndarray]

  def __post_init__(self):
    digest = document.digest(self.config)
    if self.identity.config != digest:
      raise refusal.HarnessError(
          f"identity of configuration {self.identity.config[:16]} on one of"
          f" {digest[:16]}."
      )
    want = {part.name: (part.shape, "float32") for part in self.parts()}
    have = {k: (v.shape, v.dtype.name) for k, v in self.arrays.items()}
    wrong = sorted(n for n in {*want, *have} if want.get(n) != have.get(n))
    if wrong:
      first = wrong[0]
      raise refusal.HarnessError(
          f"{len(wrong)} arrays are not those of {self.identity.layout!r} at"
          f" T={self.identity.length}: {first} is {have.get(first)}, not"
          f" {want.get(first)}."
      )
    ordered = {name: self.arrays[name] for name in want}
    object.__setattr__(self, "arrays", ordered)

  def parts(self) -> tuple[layout_lib.Part, ...]:
    """The arrays' places, in their order."""
    identity = self.identity
    return layout_lib.parts(self.config, identity.length, identity.layout)


def check_same_subject(a: PersistentState, b: PersistentState) -> None:
  """Raises HarnessError unless both states belong to the same thing."""
  check_same_identity(
      dataclasses.asdict(a.identity), dataclasses.asdict(b.identity)
  )


def check_same_identity(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
  """Raises HarnessError with the fields in which two identities differ."""
  wrong = [
      f"{field} {a.get(field)!r} against {b.get(field)!r}"
      for field in (f.name for f in dataclasses.fields(Identity))
      if a.get(field) != b.get(field)
  ]
  if wrong:
    raise refusal.HarnessError(
        f"the states belong to different things: {'; '.join(wrong)}."
    )


def differing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """True where two float32 arrays of one shape have different bits."""
  a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
  return a.view("u4") != b.view("u4")


def same_bits(a: PersistentState, b: PersistentState) -> bool:
  """Whether all bits of two states of the same subject are equal.

  Raises:
    HarnessError: they belong to different things.
  """
  check_same_subject(a, b)
  return not any(differing(a.arrays[n], b.arrays[n]).any() for n in a.arrays)


def narrow(state: PersistentState, layout: str) -> PersistentState:
  """Returns the state in a layout that holds less: raw, live, carried.

  Raises:
    HarnessError: the layout holds more than the state does.
  """
  order = layout_lib.LAYOUTS
  have = state.identity.layout
  if layout not in order or order.index(layout) < order.index(have):
    raise refusal.HarnessError(f"{have!r} cannot be narrowed to {layout!r}.")
  places = {part.name: part for part in state.parts()}
  arrays = {}
  for part in layout_lib.parts(state.config, state.identity.length, layout):
    given = places[part.source if have == layout_lib.RAW else part.name]
    index = {row: i for i, row in enumerate(given.rows)}
    rows = np.array([index[row] for row in part.rows], int)
    # A copy in C order, so that it has bits of its own to view.
    arrays[part.name] = state.arrays[given.name][rows, : part.width].copy("C")
  identity = dataclasses.replace(state.identity, layout=layout)
  return PersistentState(state.config, identity, arrays)


def part_digest(state: PersistentState, part: layout_lib.Part) -> str:
  """Fingerprint of one array: header with place and identity, then payload.

  The header's position is the first that the rows belong to.
  """
  written = [p for p in part.positions if p >= 0]
  return fingerprint.fingerprint(
      state.arrays[part.name],
      part.name.split(".", 2)[2],
      axes="row,channel",
      layer=part.layer,
      position=min(written, default=None),
      identity=state.identity,
  )


def payload_digest(state: PersistentState) -> str:
  """SHA-256 of the bare float32 bytes of all arrays, in canonical order."""
  digest = hashlib.sha256()
  for array in state.arrays.values():
    digest.update(fingerprint.payload(array))
  return digest.hexdigest()


def write(path: str | pathlib.Path, state: PersistentState) -> None:
  """Writes a state as one safetensors file whose metadata is its record."""
  record = document.canonical_json({
      "schema": SCHEMA,
      "config": document.to_dict(state.config),
      "identity": dataclasses.asdict(state.identity),
      "arrays": {p.name: part_digest(state, p) for p in state.parts()},
  })
  data = safetensors.numpy.save(dict(state.arrays), {_RECORD: record})
  pathlib.Path(path).write_bytes(data)


def read(path: str | pathlib.Path) -> PersistentState:
  """Reads a state; every array is checked against its digest.

  Raises:
    HarnessError: the file is damaged, of another schema, or an array does not
      have its digest.
  """
  try:
    with safetensors.safe_open(path, framework="numpy") as file:
      record = json.loads((file.metadata() or {}).get(_RECORD, "{}"))
      arrays = {name: file.get_tensor(name) for name in file.keys()}
    if record.get("schema") != SCHEMA:
      raise refusal.HarnessError(
          f"{path}: schema {record.get('schema')!r} is not {SCHEMA!r}."
      )
    state = PersistentState(
        document.from_dict(config_lib.DeepseekV4Config, record["config"]),
        document.from_dict(Identity, record["identity"]),
        arrays,
    )
    digests = record["arrays"]
  except (
      OSError, safetensors.SafetensorError, ValueError, KeyError,
      AttributeError, TypeError,
  ) as error:
    raise refusal.HarnessError(f"{path}: {error!r}") from error
  for part in state.parts():
    if part_digest(state, part) != digests.get(part.name):
      raise refusal.HarnessError(
          f"{path}: {part.name} does not have its digest."
      )
  return state
