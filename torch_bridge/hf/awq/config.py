"""The quantization_config of an AWQ checkpoint, read and written.

Four fields say what the words of the file mean, and each has one value that
this project computes: quant_method "awq", bits 4, zero_point true, version
"gemm" (other versions lay the words out differently). Two are free: group_size
and modules_to_not_convert. Every other field is refused by name, unless it is
known to choose a kernel and not a meaning.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Any

from moejax.contracts import refusal
from moejax.modules import config as config_lib
from torch_bridge.hf import hf_config
from torch_bridge.hf import json_file

FIELD = "quantization_config"

# {field: the values that mean what is computed here}.
_MEANING = {
    "quant_method": ("awq",),
    "bits": (4,),
    "zero_point": (True,),
    "version": ("gemm", "GEMM"),
    "format": ("gemm",),
}
_REQUIRED = ("quant_method", "bits", "zero_point")
# Which kernel runs, or what it may fuse.
_HARMLESS = {
    "backend": (None, "auto", "autoawq"),
    "do_fuse": (None, False),
    "exllama_config": (None,),
    "fuse_max_seq_len": (None,),
    "modules_to_fuse": (None,),
}


@dataclasses.dataclass(frozen=True, slots=True)
class AwqConfig:
  """What is free in an AWQ checkpoint.

  Attributes:
    group_size: Inputs that share a scale and a zero point; -1 means all.
    modules_to_not_convert: The skip list, see `skip_list`. Empty says nothing:
      the tensors alone decide.
  """

  group_size: int
  modules_to_not_convert: tuple[str, ...] = ()


def is_packed(folder: str | pathlib.Path) -> bool:
  """Whether a folder is a Qwen3-MoE whose config speaks of quantisation.

  Raises:
    refusal.HarnessError: config.json is absent or damaged.
  """
  fields = json_file.read_object(pathlib.Path(folder) / hf_config.FILE)
  model_type = fields.get("model_type")
  return model_type == hf_config.MODEL_TYPE and fields.get(FIELD) is not None


def read(
    folder: str | pathlib.Path,
) -> tuple[config_lib.DecoderConfig, AwqConfig]:
  """Returns the decoder's config and the packing of a folder.

  Raises:
    refusal.HarnessError: config.json is absent or damaged, says nothing about
      packing, or is refused by `hf_config`.
    refusal.UnsupportedError: the packing is another.
  """
  path = pathlib.Path(folder) / hf_config.FILE
  fields = json_file.read_object(path)
  packing = fields.pop(FIELD, None)
  if not isinstance(packing, dict):
    raise refusal.HarnessError(
        f"{path}: {FIELD}={packing!r}; a packed checkpoint describes its"
        " packing there."
    )
  return hf_config.from_hf(fields, str(path)), from_hf(packing, str(path))


def from_hf(packing: Mapping[str, Any], origin: str = FIELD) -> AwqConfig:
  """Translates a quantization_config.

  Args:
    packing: The object.
    origin: Names the file in messages.

  Raises:
    refusal.UnsupportedError: a field says that the words mean something else,
      or is not known here; the message has the field, what it is, and what is
      wanted.
    refusal.HarnessError: a field is missing or of another type, or the group
      size is neither positive nor -1.
  """
  # The method first: it explains the fields that other methods have.
  for name, legal in (_MEANING | _HARMLESS).items():
    if name in _REQUIRED and name not in packing:
      raise refusal.HarnessError(f"{origin}: {FIELD} has no {name}.")
    value = packing.get(name, legal[0])
    # Not `in`: True == 1.
    if not any(value == x and type(value) is type(x) for x in legal):
      raise refusal.UnsupportedError(
          f"{origin}: {FIELD}.{name} is {value!r}, want {legal[0]!r}."
      )
  known = {*_MEANING, *_HARMLESS, "group_size", "modules_to_not_convert"}
  unknown = sorted(set(packing) - known)
  if unknown:
    raise refusal.UnsupportedError(
        f"{origin}: {FIELD} has fields that are not known here:"
        f" {', '.join(f'{name}={packing[name]!r}' for name in unknown)}."
    )
  try:
    group_size = json_file.integer(packing, "group_size")
  except ValueError as error:
    raise refusal.HarnessError(f"{origin}: {FIELD}: {error}") from error
  if group_size < 1 and group_size != -1:
    raise refusal.HarnessError(
        f"{origin}: {FIELD}.group_size is {group_size}, want a positive number,"
        " or -1 for one group over all inputs."
    )
  entries = packing.get("modules_to_not_convert")
  if not isinstance(entries, list | None) or not all(
      isinstance(entry, str) for entry in entries or []
  ):
    raise refusal.HarnessError(
        f"{origin}: {FIELD}.modules_to_not_convert is {entries!r}, want a list"
        " of names."
    )
  return AwqConfig(group_size, tuple(entries or ()))


def to_hf(awq: AwqConfig) -> dict[str, Any]:
  """Returns the quantization_config, the inverse of `from_hf`."""
  return {
      "quant_method": "awq",
      "bits": 4,
      "group_size": awq.group_size,
      "zero_point": True,
      "version": "gemm",
      "modules_to_not_convert": list(awq.modules_to_not_convert) or None,
  }
