"""A DeepSeek-V4 checkpoint as the parameters of our decoder.

Loading uses up both sides: every parameter is found, and every tensor is
consumed but for those of blocks that predict further tokens ("mtp."). What a
tensor becomes is decided by its own dtype:

  on disk                     in memory
  the config's dtype          the same bits
  float32, 16 bits            float32, exactly (norms, hyper-connections, ...)
  E4M3 with E8M0 scales       `block_scaled.fp8_weight` in the config's dtype
  int8 with E8M0 scales       `block_scaled.fp4_weight` in the config's dtype
  int64 (hash tables)         int32, the same numbers

A scale may be stored as E8M0 or as the same byte in a uint8. Results are
allocated once and filled tensor by tensor, so beside the result and the tensor
at hand nothing is kept.

Layer: torch_bridge. Needs no torch.
"""

import dataclasses
import pathlib

import numpy as np

from moejax.contracts import document
from moejax.contracts import refusal
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.numerics import block_scaled
from moejax.numerics import formats
from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf.deepseek_v4 import config as hf_config
from torch_bridge.hf.deepseek_v4 import inventory
from torch_bridge.hf.deepseek_v4 import names as names_lib
from torch_bridge.hf import tensor_checks

DUPLICATES = ("refuse", "keep")

_STORED = {inventory.E4M3: names_lib.FP8, "int8": names_lib.FP4}
_UNPACK = {
    names_lib.FP8: block_scaled.fp8_weight,
    names_lib.FP4: block_scaled.fp4_weight,
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
  """One tensor of a row.

  Attributes:
    name: Its name.
    row: The row.
    packed: The block-scaled format in which it is stored, or None.
  """

  name: str
  row: names_lib.Row
  packed: str | None


def load(
    folder: str | pathlib.Path, *, duplicate_experts: str = "refuse"
) -> tuple[config_lib.DeepseekV4Config, dict[str, np.ndarray]]:
  """Returns (config, {our path: array}) of a folder.

  Args:
    folder: config.json and safetensors, in any dialect.
    duplicate_experts: See `load_parameters`.

  Raises:
    refusal.HarnessError: the folder lacks something, holds something that this
      decoder does not compute, or is damaged; see `load_parameters`.
  """
  checkpoint = checkpoint_lib.Checkpoint(folder)
  config = hf_config.read(folder)
  return config, load_parameters(
      checkpoint, config, duplicate_experts=duplicate_experts
  )


def load_parameters(
    checkpoint: checkpoint_lib.Checkpoint,
    config: config_lib.DeepseekV4Config,
    *,
    duplicate_experts: str = "refuse",
) -> dict[str, np.ndarray]:
  """Returns {our path: array} of a whole checkpoint, as `parameters.leaves`.

  Args:
    checkpoint: The open folder.
    config: The decoder; its dtype is that of unpacked matrices.
    duplicate_experts: "refuse" hash tables in which a row names an expert
      twice, or "keep" them for a combine that says what that means.

  Raises:
    ValueError: duplicate_experts is neither.
    refusal.HarnessError: names of several dialects; a parameter is missing, a
      tensor is left over, a shape, dtype or block of scales is wrong, a scale
      is NaN, a weight is not finite, or a hash table names an expert twice or
      one that is not there.
  """
  document.check_choice(
      "parameter map", "duplicate_experts", duplicate_experts, DUPLICATES
  )
  held = {
      n for n in checkpoint.names() if not n.startswith(names_lib.IGNORED)
  }
  dialect = names_lib.find_dialect(held, config, str(checkpoint.folder))
  rows = names_lib.table(config, dialect)
  sources = [
      _source(checkpoint, row, name)
      for row in rows
      for name in row.names
      if name in held
  ]
  needed = [name for row in rows for name in row.names]
  needed += [names_lib.scale_of(s.name) for s in sources if s.packed]
  tensor_checks.check_names(checkpoint.folder, needed, held)
  _check_headers(checkpoint, sources, config.dtype)
  out = {row.path: np.empty(row.shape, _numpy(row.dtype)) for row in rows}
  filled = dict.fromkeys(out, 0)
  for source in sources:
    path = source.row.path
    # Tensors lie one after another, whatever they form together.
    pieces = out[path].reshape(len(source.row.names), *source.row.source_shape)
    pieces[filled[path]] = _read(checkpoint, source, config, duplicate_experts)
    filled[path] += 1
  return out


def _source(checkpoint, row: names_lib.Row, name: str) -> _Source:
  packed = _STORED.get(checkpoint.dtype(name))
  return _Source(name, row, packed if packed in row.packed else None)


def _check_headers(checkpoint, sources, dtype: str) -> None:
  """Refuses wrong shapes and dtypes before any weight is read."""
  shapes, dtypes, blocks = [], [], []
  for source in sources:
    name, row = source.name, source.row
    shape, found = checkpoint.shape(name), checkpoint.dtype(name)
    expected = row.source_shape
    if source.packed:
      (_, expected), (_, scales) = inventory.packed_shapes(
          source.packed, row.source_shape
      )
      scale = names_lib.scale_of(name)
      if checkpoint.shape(scale) != scales:
        blocks.append(f"{scale} is {checkpoint.shape(scale)}, not {scales}")
      if checkpoint.dtype(scale) not in (inventory.E8M0, "uint8"):
        dtypes.append(f"{scale} is {checkpoint.dtype(scale)}")
    elif found not in _legal_dtypes(row, dtype):
      dtypes.append(f"{name} is {found}")
    if shape != expected:
      shapes.append(f"{name} is {shape}, not {expected}")
  tensor_checks.refuse(
      checkpoint.folder,
      {
          "wrong shapes": shapes,
          "scales of another block": blocks,
          f"tensors of a dtype that is not read for a {dtype} model": dtypes,
      },
      shown=5,
  )


def _legal_dtypes(row: names_lib.Row, dtype: str) -> tuple[str, ...]:
  """The dtypes in which a tensor of a row may be stored unpacked."""
  if row.dtype == "int32":
    return "int64", "int32"
  if row.dtype == "float32":
    return "float32", "bfloat16", dtype
  return (dtype,)


def _read(checkpoint, source: _Source, config, duplicate_experts: str):
  """Returns one tensor's values, unpacked; fit for the row's dtype."""
  name, folder = source.name, checkpoint.folder
  array = checkpoint.array(name)
  if source.row.dtype == "int32":
    _check_table(folder, name, array, config.num_experts, duplicate_experts)
    return array
  if source.packed:
    scales = checkpoint.array(names_lib.scale_of(name))
    try:
      array = _UNPACK[source.packed](array, scales, source.row.dtype)
    except ValueError as error:
      raise refusal.HarnessError(f"{folder}: {name}: {error}") from error
  tensor_checks.check_finite(folder, name, array)
  return array


def _check_table(folder, name: str, table, num_experts: int, duplicates: str):
  """Refuses a hash table with experts that are not there, or named twice."""
  outside = (table < 0) | (table >= num_experts)
  if outside.any():
    row, slot = np.unravel_index(int(outside.argmax()), table.shape)
    raise refusal.HarnessError(
        f"{folder}: tensor {name} names {int(outside.sum())} experts outside"
        f" the {num_experts}; first in row {row}, slot {slot}:"
        f" {table[row, slot]}."
    )
  ordered = np.sort(table, axis=1)
  twice = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
  if duplicates == "refuse" and twice.any():
    row = int(twice.argmax())
    raise refusal.HarnessError(
        f"{folder}: tensor {name} names an expert twice in"
        f" {int(twice.sum())} of {len(table)} rows; first in row {row}:"
        f" {table[row].tolist()}."
    )


def _numpy(dtype: str) -> np.dtype:
  return formats.of(dtype).numpy if dtype != "int32" else np.dtype(np.int32)
