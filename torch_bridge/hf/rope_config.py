"""The rotary part of a Hugging Face config, in both of its spellings.

Classic: rope_theta beside rope_scaling ({"rope_type" or "type": ..., ...} or
null). New: both in rope_parameters. Defaults are those of transformers'
modeling_rope_utils, some of which are easy to get wrong: a beta of 0 counts as
unset, a null `truncate` counts as false, a null yarn factor is the ratio of
the two context lengths.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Mapping
from typing import Any

from moejax.modules import config as config_lib
from torch_bridge.hf import json_file

FIELDS = (
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)

_COMMON = ("partial_rotary_factor", "rope_theta", "rope_type", "type")
_OF_KIND = {
    "default": (),
    "linear": ("factor",),
    "yarn": (
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "truncate",
    ),
}


def from_hf(
    fields: Mapping[str, Any], max_positions: int
) -> tuple[float, config_lib.RopeScaling]:
  """Returns (theta, scaling) of a config.

  Args:
    fields: The whole config; `FIELDS` are read.
    max_positions: The trained context where a yarn config names none.

  Raises:
    ValueError: the fields contradict each other, are of the wrong type, or
      name a kind, a key or a value that our rotary embedding does not compute.
  """
  rope = _parameters(fields)
  kind = _agreed("rope_type", rope, "type", rope)
  kind = "default" if kind is None else kind
  if kind not in _OF_KIND:
    raise ValueError(
        f"rope_type={kind!r} is not supported; supported:"
        f" {', '.join(_OF_KIND)}."
    )
  for key, value in rope.items():
    if value is not None and key not in (*_COMMON, *_OF_KIND[kind]):
      raise ValueError(
          f"{key}={value!r} has no meaning here for rope_type {kind!r}."
      )
  for place in (fields, rope):
    part = place.get("partial_rotary_factor")
    if part not in (None, 1):
      raise ValueError(f"partial_rotary_factor={part!r}; supported: 1.0.")
  theta = _agreed("rope_theta", rope, "rope_theta", fields)
  named = {} if theta is None else {"rope_theta": theta}
  theta = json_file.number(named, "rope_theta", 10000.0)
  if theta <= 1:
    raise ValueError(f"rope_theta={theta} is not above 1.")
  if kind == "default":
    return theta, config_lib.RopeScaling()
  if kind == "linear":
    return theta, config_lib.RopeScaling(
        kind, factor=json_file.number(rope, "factor")
    )
  return theta, _yarn(rope, max_positions)


def to_hf(config: config_lib.DecoderConfig) -> dict[str, Any]:
  """Returns the rotary fields of a config in the classic spelling.

  It is the one that every version of transformers reads; an older one would
  take rope_parameters for an unknown field and use its default theta.
  """
  return {
      "rope_theta": config.rope_theta,
      "rope_scaling": scaling_to_hf(config.rope_scaling),
  }


def scaling_to_hf(scaling: config_lib.RopeScaling) -> dict[str, Any] | None:
  """Returns the content of rope_scaling; None where nothing stretches."""
  if scaling.kind == "default":
    return None
  out = {"rope_type": scaling.kind, "factor": scaling.factor}
  if scaling.kind == "yarn":
    optional = {
        "original_max_position_embeddings": scaling.original_positions,
        "attention_factor": scaling.attention_factor,
        "mscale": scaling.mscale or None,
        "mscale_all_dim": scaling.mscale_all_dim or None,
    }
    out |= {
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
        **{k: v for k, v in optional.items() if v is not None},
    }
  return out


def _parameters(fields: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns rope_scaling or rope_parameters, whichever is set."""
  # An empty object counts as null, as it does in transformers.
  spellings = {k: fields.get(k) or None for k in FIELDS}
  rope = _agreed("rope_scaling", spellings, "rope_parameters", spellings)
  if not isinstance(rope, dict | None):
    raise ValueError(f"rotary parameters {rope!r} are not an object.")
  return rope or {}


def _yarn(
    rope: Mapping[str, Any], max_positions: int
) -> config_lib.RopeScaling:
  given = {key: value for key, value in rope.items() if value is not None}
  original = json_file.integer(
      given, "original_max_position_embeddings", max_positions
  )
  if original < 1:
    raise ValueError(f"original_max_position_embeddings={original} is below 1.")
  if "factor" not in rope:
    raise ValueError("factor is missing for rope_type 'yarn'.")
  factor = json_file.number(given, "factor", max_positions / original)
  attention_factor = None
  if "attention_factor" in given:
    attention_factor = json_file.number(given, "attention_factor")
  return config_lib.RopeScaling(
      "yarn",
      factor=factor,
      original_positions=original,
      beta_fast=json_file.number(given, "beta_fast", 32) or 32.0,
      beta_slow=json_file.number(given, "beta_slow", 1) or 1.0,
      mscale=json_file.number(given, "mscale", 0),
      mscale_all_dim=json_file.number(given, "mscale_all_dim", 0),
      attention_factor=attention_factor,
      # Not `given`: null is read as false, absent as true.
      truncate=(rope.get("truncate", True) is not None)
      and json_file.boolean(given, "truncate", True),
  )


def _agreed(first: str, place: Mapping, second: str, other: Mapping) -> Any:
  """Returns a value that may stand in two places, or None."""
  a, b = place.get(first), other.get(second)
  if a is not None and b is not None and a != b:
    raise ValueError(f"{first}={a!r} contradicts {second}={b!r}.")
  return b if a is None else a
