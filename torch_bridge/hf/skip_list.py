"""Which modules of a packed checkpoint are left unpacked.

A quantization config lists them by name. An entry stands for whole dotted
segments: "mlp.gate" is the router and not "mlp.gate_proj", "model.layers.1" is
not layer 10. The list is a statement, the tensors are the fact, so `conflicts`
reports where the two part, and a loader need not find out by a KeyError.

Layer: torch_bridge.
"""

from collections.abc import Iterable
import dataclasses
import re

from moejax.contracts import document

PACKED = "packed_but_skipped"
UNPACKED = "unpacked_but_not_skipped"

_ENTRY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
# The linear projections of a decoder layer: what a packer packs unless told
# otherwise. Norms, embeddings and the output projection never are.
_LINEAR = re.compile(r"(.*\.)?layers\.\d+\..*(_proj|\.gate|_gate)")


@dataclasses.dataclass(frozen=True, slots=True)
class Conflict:
  """One module on which list and tensors disagree.

  Attributes:
    module: Its dotted name.
    kind: PACKED (it has qweight and is in the list) or UNPACKED (a projection
      that has a plain weight and is not).
    entry: The entry that skips it; None for UNPACKED.
  """

  module: str
  kind: str
  entry: str | None

  def __post_init__(self):
    document.check_choice("Conflict", "kind", self.kind, (PACKED, UNPACKED))


def is_skipped(module_name: str, entries: Iterable[str]) -> bool:
  """Whether an entry's segments are a run of the module's segments.

  Raises:
    ValueError: an entry is empty or not made of dotted segments.
  """
  return _entry_for(module_name, _checked(entries)) is not None


def is_projection(module_name: str) -> bool:
  """Whether a packer packs a module unless it is told not to."""
  return _LINEAR.fullmatch(module_name) is not None


def conflicts(
    tensor_names: Iterable[str], entries: Iterable[str]
) -> tuple[Conflict, ...]:
  """Returns where the tensors and the list disagree, sorted by module.

  Args:
    tensor_names: All names of the checkpoint, for example
      "model.layers.0.mlp.experts.0.up_proj.qweight".
    entries: The list of modules not to convert.

  Raises:
    ValueError: an entry is empty or not made of dotted segments.
  """
  entries = _checked(entries)
  parts = [name.rpartition(".") for name in tensor_names]
  packed = {module for module, _, leaf in parts if leaf == "qweight"}
  plain = {module for module, _, leaf in parts if leaf == "weight"} - packed
  found = []
  for module in sorted(packed | plain):
    entry = _entry_for(module, entries)
    if module in packed and entry is not None:
      found.append(Conflict(module, PACKED, entry))
    if module in plain and entry is None and is_projection(module):
      found.append(Conflict(module, UNPACKED, None))
  return tuple(found)


def _checked(entries: Iterable[str]) -> tuple[str, ...]:
  """Returns the entries without the dot that some lists end them with."""
  entries = tuple(entries)
  for entry in entries:
    if not _ENTRY.fullmatch(entry):
      raise ValueError(
          f"skip list entry {entry!r} is not made of dotted segments."
      )
  return tuple(entry.removesuffix(".") for entry in entries)


def _entry_for(module_name: str, entries: tuple[str, ...]) -> str | None:
  """Returns the first entry that skips a module, or None."""
  # Dots at both ends turn "whole segments" into a plain substring.
  dotted = f".{module_name}."
  return next((e for e in entries if f".{e}." in dotted), None)
