"""Canonical bytes and their digests: identity without tolerance.

A fingerprint covers a canonical JSON header and then the payload: the value's
bytes, little-endian, in C order. So equal bytes of another shape, dtype, layer
or checkpoint have another fingerprint, a transposed view has that of its
contiguous copy, and -0 is not +0. A composite covers the digests of its parts
in a declared order, so that a mismatch is bisected without the bytes.

Schema 1. Layer: numerics.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import hashlib
from typing import Any

import numpy as np

from moejax.contracts import document
from moejax.numerics import formats

SCHEMA = 1
NAN_RULES = ("bits", "canonical")


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
  """What a captured value belongs to. Equal values of two models differ.

  Attributes:
    model: The architecture, for example "qwen3_moe".
    checkpoint: Digest of the weights (`checkpoint_digest`).
    tokenizer: SHA-256 of tokenizer.json.
    prompt: The prompt's token ids.
    decoding: How tokens are chosen, for example {"strategy": "greedy"}.
    contract: Digest of the decoder contract.
  """

  model: str
  checkpoint: str
  tokenizer: str
  prompt: tuple[int, ...]
  decoding: Mapping[str, Any]
  contract: str


def header(
    array: np.ndarray,
    surface: str,
    *,
    axes: str = "",
    layer: int | None = None,
    position: int | None = None,
    nan: str = "bits",
    identity: Identity | None = None,
) -> dict[str, Any]:
  """Returns the header of an array's fingerprint as JSON values.

  Args:
    array: Its shape and dtype enter.
    surface: Name of the tap or component.
    axes: Names of the axes, comma-separated, in order.
    layer: Index of the layer, or None.
    position: First token position that the array covers, or None.
    nan: "bits" keeps every NaN as it is; "canonical" makes them one.
    identity: What the array belongs to, or None for a bare array.
  """
  document.check_choice("fingerprint", "nan", nan, NAN_RULES)
  return {
      "schema": SCHEMA,
      "surface": surface,
      "shape": list(array.shape),
      "dtype": array.dtype.name,
      "axes": axes,
      "byte_order": "little",
      "element_order": "C",
      "signed_zero": "kept",
      "nan": nan,
      "padding": "excluded",
      "layer": layer,
      "position": position,
      "identity": None if identity is None else dataclasses.asdict(identity),
  }


def payload(array: np.ndarray, nan: str = "bits") -> bytes:
  """Returns the canonical bytes of an array."""
  if nan == "canonical" and formats.is_float(array.dtype):
    array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
  array = np.ascontiguousarray(array)
  if array.dtype.byteorder == ">":
    array = array.astype(array.dtype.newbyteorder("<"))
  return array.tobytes()


def payload_digest(array: np.ndarray) -> str:
  """SHA-256 of the bare bytes, for comparison with published digests."""
  return hashlib.sha256(payload(array)).hexdigest()


def fingerprint(array: np.ndarray, surface: str, **fields) -> str:
  """SHA-256 of header and payload; the fields are those of `header`."""
  array = np.asarray(array)
  native = array.astype(array.dtype.newbyteorder("="))
  text = document.canonical_json(header(native, surface, **fields))
  digest = hashlib.sha256(text.encode("utf-8"))
  digest.update(b"\n")
  digest.update(payload(native, fields.get("nan", "bits")))
  return digest.hexdigest()


def composite(name: str, parts: Iterable[tuple[str, str]]) -> str:
  """SHA-256 over (part name, digest) pairs, in the order given."""
  return document.sha256(
      document.canonical_json(
          {"schema": SCHEMA, "composite": name, "parts": list(parts)}
      )
  )


def tree(leaves: Mapping[str, np.ndarray]) -> str:
  """The composite of named arrays; insertion order does not matter."""
  return composite(
      "tree", [(k, fingerprint(leaves[k], k)) for k in sorted(leaves)]
  )


def checkpoint_digest(tensors: Iterable[tuple[str, np.ndarray]]) -> str:
  """Digest of a checkpoint: sorted (name, dtype, shape, SHA-256 of bytes).

  Args:
    tensors: (name, array) pairs in any order, read one at a time.
  """
  rows = sorted(
      (name, array.dtype.name, list(array.shape), payload_digest(array))
      for name, array in tensors
  )
  return document.sha256(
      document.canonical_json({"schema": SCHEMA, "checkpoint": rows})
  )
