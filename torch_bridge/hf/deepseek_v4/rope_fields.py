"""The rotary part of DeepSeek-V4's config.json, in both of its dialects.

Frequencies stretch in compressed layers only, and cos and sin keep amplitude
1.0. transformers sets attention_factor 1.0 for the flat fields; in nested ones
it would derive 0.1 ln(factor) + 1 if the field were absent, so there an absent
one is refused.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Mapping
import math
from typing import Any

from moejax.modules import config as base_config
from moejax.modules.deepseek_v4 import config as config_lib
from torch_bridge.hf import field_list
from torch_bridge.hf import json_file
from torch_bridge.hf import rope_config

FIELDS = (*rope_config.FIELDS, "compress_rope_theta", "qk_rope_head_dim")


def from_hf(
    fields: Mapping[str, Any], max_positions: int, head_dim: int
) -> dict[str, Any]:
  """Returns the rotary fields of `DeepseekV4Config`.

  Args:
    fields: The whole config; `FIELDS` are read.
    max_positions: The trained context where a yarn config names none.
    head_dim: Width of a head.

  Raises:
    ValueError: the fields are missing, contradict each other, are of the wrong
      type, or name what our rotary embedding does not compute.
  """
  theta, scaling = _one(fields, "main", "rope_theta", max_positions, head_dim)
  if scaling.kind != "default":
    raise ValueError(
        f"rope_parameters: main has rope_type={scaling.kind!r}; layers without"
        " compression do not scale."
    )
  compress = _one(
      fields, "compress", "compress_rope_theta", max_positions, head_dim
  )
  return {
      "rotary_dim": _rotary_dim(fields, head_dim),
      "rope_theta": theta,
      "compress_theta": compress[0],
      "compress_scaling": compress[1],
  }


def to_hf(config: config_lib.DeepseekV4Config) -> dict[str, Any]:
  """Returns the rotary fields of a config, as transformers saves them."""
  # transformers multiplies by head_dim and cuts; the quotient may fall short.
  part = config.rotary_dim / config.head_dim
  if int(part * config.head_dim) < config.rotary_dim:
    part = math.nextafter(part, 1.0)
  plain = base_config.RopeScaling()
  return {
      "qk_rope_head_dim": config.rotary_dim,
      "partial_rotary_factor": part,
      "rope_theta": config.rope_theta,
      "compress_rope_theta": config.compress_theta,
      "rope_parameters": {
          "main": _nested(config.rope_theta, plain, part),
          "compress": _nested(
              config.compress_theta, config.compress_scaling, part
          ),
      },
  }


def _one(fields, label: str, field: str, max_positions: int, head_dim: int):
  """Returns (base, scaling) of one kind of layer, from both dialects."""
  nested = _object(fields, "rope_parameters")
  if nested and {*nested} != {"main", "compress"}:
    raise ValueError(
        f"rope_parameters={nested!r} does not hold main and compress."
    )
  flat = {} if label == "main" else _object(fields, "rope_scaling")
  if "rope_theta" in flat:
    raise ValueError(f"rope_scaling={flat!r} has a base beside {field}.")
  said = {field: None, f"rope_parameters.{label}": None}
  if fields.get(field) is not None:
    said[field] = _rope(
        {**flat, "rope_theta": json_file.number(fields, field)},
        max_positions,
        attention_factor=1.0,
    )
  if nested:
    inner = _without_part(nested[label], fields, head_dim)
    said[f"rope_parameters.{label}"] = _rope(inner, max_positions)
    if not flat and said[field] is not None:
      # The field gives the base only; what scales it stands inside.
      said[field] = (said[field][0], said[f"rope_parameters.{label}"][1])
  return field_list.agreed(f"the rotary embedding {label!r}", said)


def _object(fields, name: str) -> dict[str, Any]:
  """Returns an object; null and an empty one are the same to transformers."""
  value = fields.get(name) or {}
  if not isinstance(value, dict):
    raise ValueError(f"{name}={value!r} is not an object.")
  return value


def _nested(
    theta: float, scaling: base_config.RopeScaling, part: float
) -> dict[str, Any]:
  """Returns one entry of rope_parameters."""
  rope = rope_config.scaling_to_hf(scaling) or {"rope_type": "default"}
  return {**rope, "rope_theta": theta, "partial_rotary_factor": part}


def _rotary_dim(fields, head_dim: int) -> int:
  said = {"qk_rope_head_dim": None, "partial_rotary_factor": None}
  if fields.get("qk_rope_head_dim") is not None:
    said["qk_rope_head_dim"] = json_file.integer(fields, "qk_rope_head_dim")
  if fields.get("partial_rotary_factor") is not None:
    part = json_file.number(fields, "partial_rotary_factor")
    said["partial_rotary_factor"] = int(head_dim * part)
  return field_list.agreed("the rotary width", said)


def _without_part(rope: Any, fields, head_dim: int) -> dict[str, Any]:
  """Returns rope parameters less the rotary share, which must be the one."""
  if not isinstance(rope, dict):
    raise ValueError(f"rope_parameters hold {rope!r}, not an object.")
  rope = dict(rope)
  part = rope.pop("partial_rotary_factor", None)
  if part is not None:
    field_list.agreed(
        "the rotary width",
        {
            "the config": _rotary_dim(fields, head_dim),
            "rope_parameters": int(head_dim * json_file.number(
                {"partial_rotary_factor": part}, "partial_rotary_factor"
            )),
        },
    )
  if "rope_theta" not in rope:
    raise ValueError(f"rope_parameters hold {rope!r} without rope_theta.")
  return rope


def _rope(rope: dict[str, Any], max_positions: int, **default: float):
  """Returns (base, scaling) of flat rope parameters, amplitude 1.0."""
  kind = rope.get("rope_type", rope.get("type"))
  if kind == "yarn":
    rope = {**default, **rope}
  theta, scaling = rope_config.from_hf(
      {"rope_parameters": rope}, max_positions
  )
  if scaling.kind == "yarn" and scaling.attention_factor != 1.0:
    raise ValueError(
        f"attention_factor={scaling.attention_factor!r} of yarn; supported:"
        " 1.0, which nested rope parameters must state."
    )
  return theta, scaling
