"""An AWQ checkpoint of Qwen3-MoE as the parameters of our decoder.

Experts stay packed. The words of a layer's experts are stacked in the layout
that they have in the file, gate columns before up columns:

  layers.N.moe.gate_up.qweight  [expert, embed, 2 * hidden / 8]   and so on
  layers.N.moe.down.qweight     [expert, hidden, embed / 8]

A projection of attention or of a dense MLP that is packed is made wide when it
is read, with one rounding a weight, because the decoder has no packed form of
it; the report lists these. Routers, embeddings and the output projection must
not be packed. As with any checkpoint, both sides are used up.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Iterator
import dataclasses

import numpy as np

from moejax.contracts import refusal
from moejax.modules import config as config_lib
from moejax.numerics import formats
from moejax.numerics.packed import awq_format
from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf import parameter_map
from torch_bridge.hf import skip_list
from torch_bridge.hf import tensor_checks
from torch_bridge.hf.awq import config as awq_config
from torch_bridge.hf.awq import layout
from torch_bridge.hf.awq import original as original_lib

_EXPERTS = (".moe.gate_up", ".moe.down")
_WIDENED = (".attention.", ".mlp.")


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Loaded:
  """A packed checkpoint.

  Attributes:
    config: The decoder's shape.
    awq: Group size and skip list.
    params: {dotted path: array}; `decoder.nest` takes them.
    packed: The modules whose words the parameters hold.
    widened: The modules that were made wide when they were read.
  """

  config: config_lib.DecoderConfig
  awq: awq_config.AwqConfig
  params: dict[str, np.ndarray]
  packed: tuple[str, ...]
  widened: tuple[str, ...]


def load(
    checkpoint: checkpoint_lib.Checkpoint,
    original: checkpoint_lib.Checkpoint | None = None,
) -> Loaded:
  """Reads a packed folder.

  Args:
    checkpoint: The open folder.
    original: The folder that it was packed from by rounding to nearest; if
      given, every packed weight is held against it (`original.check`).

  Raises:
    refusal.HarnessError: the folder is damaged, is GPTQ's, contradicts its
      skip list or its group size, has tensors missing or left over, a wrong
      shape or dtype, or means other weights than the original. The message
      names tensors, what they are and what is wanted.
    refusal.UnsupportedError: the folder is packed in another way, or packs what
      the decoder cannot take packed.
  """
  config, awq = awq_config.read(checkpoint.folder)
  names = set(checkpoint.names())
  _check_foreign(checkpoint, names)
  _check_skip_list(checkpoint, names, awq)
  rows = [
      _Row(row, _modules(row, names)) for row in parameter_map.table(config)
  ]
  if config.dtype not in layout.HALVES:
    raise refusal.UnsupportedError(
        f"{checkpoint.folder}: dtype is {config.dtype}, want"
        f" {' or '.join(layout.HALVES)}."
    )
  _check_places(checkpoint, rows)
  needed = [name for row in rows for name in row.needed()]
  tensor_checks.check_names(checkpoint.folder, needed, names)
  _check_headers(checkpoint, rows, config.dtype, awq.group_size)
  params = {}
  for row in rows:
    if original is not None:
      _check_original(checkpoint, row, original, config.dtype)
    params.update(row.read(checkpoint, config.dtype, awq.group_size))
  experts = [row for row in rows if row.is_expert]
  return Loaded(
      config,
      awq,
      params,
      tuple(m for row in experts for m in row.packed),
      tuple(m for row in rows if not row.is_expert for m in row.packed),
  )


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
  """A parameter and which of its modules are packed."""

  row: parameter_map.Row
  packed: tuple[str, ...]

  @property
  def is_expert(self) -> bool:
    return self.row.path.endswith(_EXPERTS)

  def needed(self) -> Iterator[str]:
    for name in self.row.names:
      module = name.removesuffix(".weight")
      if module in self.packed:
        yield from (f"{module}.{leaf}" for leaf in layout.LEAVES)
      else:
        yield name

  def read(self, checkpoint, dtype: str, group_size: int) -> dict:
    if not self.packed:
      return {self.row.path: parameter_map.read(checkpoint, self.row)}
    if not self.is_expert:
      (module,) = self.packed
      triple = _triple(checkpoint, module, dtype)
      operand = awq_format.from_checkpoint(*triple, group_size, module)
      wide = awq_format.dequantize(operand, dtype)
      return {self.row.path: np.ascontiguousarray(wide.T)}
    return {
        f"{self.row.path}.{leaf}": array
        for leaf, array in _stacked(
            checkpoint, self.row, self.packed, dtype
        ).items()
    }


def _modules(row: parameter_map.Row, names: set[str]) -> tuple[str, ...]:
  modules = (name.removesuffix(".weight") for name in row.names)
  return tuple(m for m in modules if f"{m}.qweight" in names)


def _triple(checkpoint, module: str, dtype: str) -> tuple[np.ndarray, ...]:
  """Reads the tensors of a module; its scales must be finite in dtype."""
  qweight, qzeros, scales = (
      checkpoint.array(f"{module}.{leaf}") for leaf in layout.LEAVES
  )
  half = formats.of(dtype).numpy
  with np.errstate(over="ignore"):
    used = scales.astype(np.float32).astype(half)
  tensor_checks.check_finite(checkpoint.folder, f"{module}.scales", used)
  return qweight, qzeros, scales


def _stacked(checkpoint, row, modules, dtype) -> dict[str, np.ndarray]:
  """Experts along the first axis, their projections along the columns."""
  experts = row.shape[0]
  per_expert = len(modules) // experts
  out = {}
  for number, module in enumerate(modules):
    expert, part = divmod(number, per_expert)
    triple = _triple(checkpoint, module, dtype)
    for leaf, array in zip(layout.LEAVES, triple, strict=True):
      rows, columns = array.shape
      if leaf not in out:
        shape = (experts, rows, per_expert * columns)
        out[leaf] = np.empty(shape, array.dtype)
      out[leaf][expert, :, part * columns : (part + 1) * columns] = array
  return out


def _check_foreign(checkpoint, names) -> None:
  found = layout.foreign(names)
  if found:
    raise refusal.HarnessError(
        f"{checkpoint.folder}: {tensor_checks.listing(found, 3)} hold GPTQ's"
        " order of inputs; quant_method is 'awq', want qweight, qzeros and"
        " scales alone."
    )


def _check_skip_list(checkpoint, names, awq) -> None:
  """Refuses a list and tensors that part; an empty list says nothing."""
  if not awq.modules_to_not_convert:
    return
  try:
    found = skip_list.conflicts(names, awq.modules_to_not_convert)
  except ValueError as error:
    raise refusal.HarnessError(f"{checkpoint.folder}: {error}") from error
  said = {
      skip_list.PACKED: "has qweight, want weight: the entry {!r} skips it",
      skip_list.UNPACKED: "has weight, want qweight: no entry skips it",
  }
  tensor_checks.refuse(
      checkpoint.folder,
      {
          "modules_to_not_convert contradicts the tensors": [
              f"{c.module} {said[c.kind].format(c.entry)}" for c in found
          ]
      },
      shown=5,
  )


def _check_places(checkpoint, rows) -> None:
  """Refuses what the decoder has no place for, and layers packed in part."""
  for row in rows:
    path = row.row.path
    if row.is_expert and row.packed:
      missing = len(row.row.names) - len(row.packed)
      if missing:
        raise refusal.UnsupportedError(
            f"{checkpoint.folder}: {path}: {len(row.packed)} of"
            f" {len(row.row.names)} projections are packed, want all or none."
        )
    elif row.packed and not any(part in path for part in _WIDENED):
      raise refusal.UnsupportedError(
          f"{checkpoint.folder}: {row.packed[0]}.qweight is packed, want"
          f" {row.packed[0]}.weight; routers, embeddings and the output"
          " projection are not read packed."
      )
  pairs = {}
  for row in rows:
    if row.is_expert:
      layer = row.row.path.rpartition(".")[0]
      pairs.setdefault(layer, set()).add(bool(row.packed))
  for layer, kinds in pairs.items():
    if len(kinds) > 1:
      raise refusal.UnsupportedError(
          f"{checkpoint.folder}: {layer}: one of gate_up and down is packed,"
          " want both or none."
      )
  if {True} not in pairs.values():
    raise refusal.HarnessError(
        f"{checkpoint.folder}: no layer has packed experts; want"
        " mlp.experts.E.*.qweight in one layer at least."
    )


def _check_headers(checkpoint, rows, dtype, group_size) -> None:
  """Refuses wrong shapes and dtypes before any weight is read."""
  shapes, dtypes, packed, scales = [], [], [], set()
  for row in rows:
    n, k = (*row.row.source_shape, 0)[:2]
    for name in row.needed():
      module, _, leaf = name.rpartition(".")
      if module in row.packed:
        if leaf == layout.LEAVES[0]:
          held = {
              x: (
                  checkpoint.shape(f"{module}.{x}"),
                  checkpoint.dtype(f"{module}.{x}"),
              )
              for x in layout.LEAVES
          }
          packed += layout.faults(module, held, k, n, group_size)
          scales.add(held["scales"][1])
        continue
      shape, found = checkpoint.shape(name), checkpoint.dtype(name)
      if shape != row.row.source_shape:
        shapes.append(f"{name} is {shape}, not {row.row.source_shape}")
      if found != dtype:
        dtypes.append(f"{name} is {found}")
  if len(scales) > 1 and not packed:
    packed.append(f"scales have dtypes {sorted(scales)}, want one")
  tensor_checks.refuse(
      checkpoint.folder,
      {
          "packed tensors that do not fit": packed,
          "wrong shapes": shapes,
          f"tensors that are not {dtype}": dtypes,
      },
      shown=5,
  )


def _check_original(checkpoint, row, original, dtype) -> None:
  for module in row.packed:
    name = f"{module}.weight"
    if name not in original.names():
      raise refusal.HarnessError(
          f"{original.folder} has no {name}, want the weight that"
          f" {checkpoint.folder} has packed."
      )
    weight = original.array(name)
    if weight.shape != row.row.source_shape:
      raise refusal.HarnessError(
          f"{original.folder}: {name} has shape {weight.shape}, want"
          f" {row.row.source_shape}."
      )
    triple = _triple(checkpoint, module, dtype)
    original_lib.check(f"{checkpoint.folder}: {module}", *triple, weight.T)
