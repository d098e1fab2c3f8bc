"""Reading a JSON object that someone else wrote, or refusing it; writing one.

Python's reader keeps the last of two equal keys and accepts NaN; in a file
that decides which weights are loaded, both hide damage. So both are refused,
and so is a field of another type than the one that is read: `true` is not 1.

Layer: torch_bridge.
"""

from collections.abc import Mapping
import json
import math
import pathlib
from typing import Any

from moejax.contracts import refusal


def read_object(path: pathlib.Path) -> dict[str, Any]:
  """Returns the JSON object in a file.

  Raises:
    refusal.HarnessError: the file is absent, not UTF-8, not JSON, not an
      object, or holds a key twice or a number that JSON does not have.
  """
  if not path.is_file():
    raise refusal.HarnessError(f"{path} is absent.")
  try:
    value = json.loads(
        path.read_text(encoding="utf-8-sig"),
        object_pairs_hook=_unique,
        parse_constant=_no_constant,
    )
  except (OSError, ValueError, RecursionError) as error:
    raise refusal.HarnessError(f"{path} is damaged JSON: {error}") from error
  if not isinstance(value, dict):
    raise refusal.HarnessError(
        f"{path} holds a JSON {type(value).__name__}, not an object."
    )
  return value


def write(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  """Writes an object as UTF-8, indented, its keys in their order."""
  text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
  path.write_text(text, encoding="utf-8")


def integer(fields: Mapping[str, Any], name: str, *default: int) -> int:
  """Returns a whole number; without a default the field must be there.

  Raises:
    ValueError: the field is missing or of another type; so do the others.
  """
  return _field(fields, name, default, (int,), "a whole number")


def number(fields: Mapping[str, Any], name: str, *default: float) -> float:
  """Returns a number as a finite float."""
  value = _field(fields, name, default, (int, float), "a number")
  if not math.isfinite(value):
    raise ValueError(f"{name}={value} is not finite.")
  return float(value)


def boolean(fields: Mapping[str, Any], name: str, *default: bool) -> bool:
  """Returns true or false."""
  return _field(fields, name, default, (bool,), "true or false")


def text(fields: Mapping[str, Any], name: str, *default: str) -> str:
  """Returns a string."""
  return _field(fields, name, default, (str,), "a string")


def _field(fields, name, default, kinds, described):
  if name not in fields:
    if default:
      return default[0]
    raise ValueError(f"{name} is missing.")
  value = fields[name]
  if type(value) not in kinds:
    raise ValueError(f"{name}={value!r} is not {described}.")
  return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  out = {}
  for key, value in pairs:
    if key in out:
      raise ValueError(f"key {key!r} occurs twice.")
    out[key] = value
  return out


def _no_constant(literal: str) -> None:
  raise ValueError(f"{literal} is not a JSON number.")
