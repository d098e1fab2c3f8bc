"""Contracts as data: canonical JSON, strict loading, digests.

A contract is a frozen dataclass whose fields decide bits. Two people who hold
equal contracts must be able to prove it by comparing one short string, so the
JSON form is canonical (UTF-8, sorted keys, no spaces, no floats that JSON
cannot carry) and the digest is SHA-256 over it. The field `name` is a label
for people and takes no part in the digest.

Layer: contracts. Imports nothing from this project.
"""

import dataclasses
import hashlib
import json
import math
import types
from typing import Any, get_args, TypeVar

T = TypeVar("T")


def canonical_json(value: Any) -> str:
  """Returns the one JSON text of a value.

  Raises:
    ValueError: the value holds a NaN or an infinity, which JSON cannot carry.
  """
  return json.dumps(
      value,
      sort_keys=True,
      separators=(",", ":"),
      ensure_ascii=False,
      allow_nan=False,
  )


def sha256(text: str) -> str:
  """Returns the SHA-256 of a text's UTF-8 bytes, in lower-case hex."""
  return hashlib.sha256(text.encode("utf-8")).hexdigest()


def to_dict(contract: Any) -> dict[str, Any]:
  """Returns a contract's fields as JSON values; nested contracts as objects."""
  return json.loads(canonical_json(dataclasses.asdict(contract)))


def digest(contract: Any) -> str:
  """Returns the SHA-256 of a contract's canonical JSON, without its names."""
  return sha256(canonical_json(_without_names(to_dict(contract))))


def from_dict(cls: type[T], values: Any) -> T:
  """Builds a contract from JSON values, refusing what it does not know.

  Every field must be present: a default that changes between versions would
  change bits without a word. Nested contracts are built from their own
  dataclass (where one of several may stand, the one with these fields), lists
  become tuples.

  Raises:
    ValueError: a field is unknown or missing, or a value breaks the contract's
      own rules.
  """
  if not isinstance(values, dict):
    raise ValueError(
        f"{cls.__name__} is read from an object, not from"
        f" {type(values).__name__}."
    )
  fields = {field.name: field for field in dataclasses.fields(cls)}
  unknown = sorted(set(values) - set(fields))
  missing = sorted(set(fields) - set(values))
  if unknown or missing:
    raise ValueError(
        f"{cls.__name__}: unknown fields {unknown}, missing fields {missing}."
    )
  return cls(**{
      name: _value(fields[name].type, value) for name, value in values.items()
  })


def check_types(contract: Any) -> None:
  """Checks a contract's plain fields against their annotations.

  Called by a contract when it is built. A whole number where a float belongs
  becomes that float, so that equal contracts have equal digests.

  Raises:
    ValueError: a value is of another type (a truth value is no number), or a
      float is not finite.
  """
  for field in dataclasses.fields(contract):
    value = getattr(contract, field.name)
    if field.type is float and type(value) is int:
      value = float(value)
      object.__setattr__(contract, field.name, value)
    if field.type in (bool, int, float, str) and type(value) is not field.type:
      raise ValueError(
          f"{type(contract).__name__}: {field.name}={value!r} is no"
          f" {field.type.__name__}."
      )
    if field.type is float and not math.isfinite(value):
      raise ValueError(
          f"{type(contract).__name__}: {field.name}={value!r} is not finite."
      )


def check_choice(owner: str, field: str, value: Any, choices: tuple) -> None:
  """Raises ValueError unless the value is one of the choices."""
  if value not in choices:
    raise ValueError(
        f"{owner}: {field}={value!r} is not one of"
        f" {', '.join(map(str, choices))}."
    )


def _value(kind: Any, value: Any) -> Any:
  if isinstance(kind, types.UnionType):
    contracts = tuple(filter(dataclasses.is_dataclass, get_args(kind)))
    if contracts and value is not None:
      kind = _member(contracts, value)
  if dataclasses.is_dataclass(kind):
    return from_dict(kind, value)
  return _tuples(value)


def _member(kinds: tuple, value: Any) -> Any:
  """Returns the one contract of several whose fields an object has."""
  for kind in kinds:
    fields = {field.name for field in dataclasses.fields(kind)}
    if isinstance(value, dict) and set(value) == fields:
      return kind
  found = sorted(value) if isinstance(value, dict) else value
  names = ", ".join(kind.__name__ for kind in kinds)
  raise ValueError(f"{found} are not the fields of one of {names}.")


def _tuples(value: Any) -> Any:
  if isinstance(value, list):
    return tuple(_tuples(item) for item in value)
  return value


def _without_names(value: Any) -> Any:
  if isinstance(value, dict):
    return {k: _without_names(v) for k, v in value.items() if k != "name"}
  if isinstance(value, list):
    return [_without_names(item) for item in value]
  return value
