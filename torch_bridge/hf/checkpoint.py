"""A Hugging Face folder as lazy named arrays.

A checkpoint is one model.safetensors, or several shards and an index that says
which tensor lies in which shard. Opening one proves that the files hold what
the index promises, each tensor once: a shard that is not there must never end
as weights that nobody set. Only headers are read until an array is asked for,
and an array has the bits of the file, bfloat16 NaN payloads included.

Pickled checkpoints run code when they are read; they are refused unread.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Iterator
import json
import pathlib
import re
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from moejax.contracts import refusal
from moejax.numerics import fingerprint
from torch_bridge.hf import json_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
# Read here from the file: safetensors looks for their dtypes in NumPy itself.
_BYTES = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
}
# A file with a thousand faults has one cause; a few of them show it.
_SHOWN = 20


class Checkpoint:
  """The tensors of a folder by name; nothing is read before it is asked for.

  Attributes:
    folder: Where it lies.
    files: The safetensors files that hold its tensors, sorted.
  """

  def __init__(self, folder: str | pathlib.Path):
    """Opens a folder and checks that index and shards agree.

    Args:
      folder: A folder as `save_pretrained` writes it.

    Raises:
      refusal.HarnessError: the folder is absent or holds no safetensors, a
        shard is absent or damaged, or index and shards contradict each other.
    """
    self.folder = pathlib.Path(folder)
    if not self.folder.is_dir():
      raise refusal.HarnessError(f"{self.folder} is not a folder.")
    index = _read_index(self.folder)
    promised = index["weight_map"]
    present = {
        name: _open(self.folder / name)
        for name in sorted({*promised.values()} or {SINGLE})
        if (self.folder / name).exists()
    }
    if promised:
      _check_absent(self.folder, index, present)
      _check_agreement(self.folder, promised, present)
    self._handles = {
        tensor: handle
        for handle in present.values()
        for tensor in handle.keys()
    }
    self._paths = {
        tensor: self.folder / name
        for name, handle in present.items()
        for tensor in handle.keys()
    }
    self._starts = {}
    if not self._handles:
      raise refusal.HarnessError(f"{self.folder} holds no tensor.")
    self.files = tuple(self.folder / name for name in present)
    self._digest = None

  def names(self) -> tuple[str, ...]:
    """The names of all tensors, sorted."""
    return tuple(sorted(self._handles))

  def shape(self, name: str) -> tuple[int, ...]:
    """The shape of a tensor, from the header of its file.

    Raises:
      ValueError: there is no tensor of that name.
    """
    return tuple(self._handle(name).get_slice(name).get_shape())

  def dtype(self, name: str) -> str:
    """The dtype of a tensor in full words ("bfloat16"), from the header.

    Raises:
      ValueError: there is no tensor of that name.
    """
    code = self._handle(name).get_slice(name).get_dtype()
    return _DTYPES.get(code, code)

  def array(self, name: str) -> np.ndarray:
    """Reads a tensor; its bytes are those of the file.

    Raises:
      ValueError: there is no tensor of that name.
      refusal.HarnessError: NumPy has no dtype for it.
    """
    handle, dtype = self._handle(name), self.dtype(name)
    if dtype in _BYTES:
      return self._read_bytes(name).view(_BYTES[dtype])
    try:
      return handle.get_tensor(name)
    except (AttributeError, TypeError, safetensors.SafetensorError) as error:
      raise refusal.HarnessError(
          f"{self.folder}: tensor {name} of dtype {dtype} cannot be read as a"
          f" NumPy array: {error}"
      ) from error

  def items(self) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) in the order of `names`, one array at a time."""
    for name in self.names():
      yield name, self.array(name)

  def digest(self) -> str:
    """`fingerprint.checkpoint_digest` of all tensors; computed once."""
    if self._digest is None:
      self._digest = fingerprint.checkpoint_digest(self.items())
    return self._digest

  def _read_bytes(self, name: str) -> np.ndarray:
    """Reads a tensor of one-byte elements where the file's header says."""
    path, shape = self._paths[name], self.shape(name)
    if path not in self._starts:
      self._starts[path] = _payload_starts(path)
    size = int(np.prod(shape, dtype=np.int64))
    start = self._starts[path][name]
    return np.fromfile(path, np.uint8, size, offset=start).reshape(shape)

  def _handle(self, name: str) -> Any:
    if name not in self._handles:
      raise ValueError(f"{self.folder} holds no tensor {name!r}.")
    return self._handles[name]


def _read_index(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the index; its weight_map is empty where there is one file."""
  shards = sorted(p.name for p in folder.iterdir() if _SHARD.fullmatch(p.name))
  index = folder / INDEX
  if not index.exists():
    if not shards:
      raise refusal.HarnessError(_nothing_to_load(folder))
    if shards != [SINGLE]:
      raise refusal.HarnessError(
          f"{folder} holds {', '.join(shards)}, and {INDEX}, which says what"
          " lies where, is absent."
      )
    return {"weight_map": {}}
  content = json_file.read_object(index)
  promised = content.get("weight_map")
  if not isinstance(promised, dict) or not promised:
    raise refusal.HarnessError(f"{index} has no weight_map.")
  for tensor, name in promised.items():
    # A name with a folder in it would read files outside the checkpoint.
    if not isinstance(name, str) or pathlib.Path(name).name != name:
      raise refusal.HarnessError(
          f"{index}: tensor {tensor} lies in {name!r}, which is not the name"
          " of a file in this folder."
      )
  extra = sorted(set(shards) - set(promised.values()))
  if extra:
    raise refusal.HarnessError(
        f"{folder} holds {', '.join(extra)}, which {INDEX} does not name."
    )
  return content


def _nothing_to_load(folder: pathlib.Path) -> str:
  """Says what the folder holds in place of safetensors."""
  pickled = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLED)
  if pickled:
    return (
        f"{folder} holds {', '.join(pickled)} and no safetensors. Reading a"
        " pickled checkpoint runs the code in it, so pickled checkpoints are"
        " refused and never loaded. Convert it to safetensors."
    )
  return f"{folder} holds neither {SINGLE} nor {INDEX}."


def _open(path: pathlib.Path) -> Any:
  """Opens a safetensors file; its header must cover the file exactly."""
  try:
    return safetensors.safe_open(str(path), framework="numpy")
  except (safetensors.SafetensorError, OSError) as error:
    size = path.stat().st_size
    raise refusal.HarnessError(
        f"{path} ({size} bytes) is truncated, damaged or no safetensors file:"
        f" {error}"
    ) from error


def _check_absent(folder, index, present):
  """Refuses an index that names shards which are not there."""
  promised = index["weight_map"]
  absent = sorted(set(promised.values()) - set(present))
  if not absent:
    return
  metadata = index.get("metadata")
  total = metadata.get("total_size") if isinstance(metadata, dict) else None
  held = sum(_payload_bytes(folder / name) for name in present)
  listing = "; ".join(
      f"{name}, which should hold"
      f" {', '.join(t for t, shard in promised.items() if shard == name)}"
      for name in absent
  )
  raise refusal.HarnessError(
      f"{folder}: {INDEX} names shards that are absent: {listing}. The index"
      f" states {'no' if total is None else total} bytes in total, the shards"
      f" present hold {held} bytes."
  )


def _payload_starts(path: pathlib.Path) -> dict[str, int]:
  """Returns where each tensor's bytes begin; safetensors checked the header."""
  with path.open("rb") as file:
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
  header.pop("__metadata__", None)
  return {
      tensor: 8 + size + entry["data_offsets"][0]
      for tensor, entry in header.items()
  }


def _payload_bytes(path: pathlib.Path) -> int:
  """The bytes of a safetensors file that are tensors: all but the header."""
  with path.open("rb") as file:
    return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def _check_agreement(folder, promised, present):
  """Refuses shards that hold other tensors than the index says."""
  found = {}
  for shard, handle in present.items():
    for tensor in handle.keys():
      found.setdefault(tensor, []).append(shard)
  faults = []
  for tensor, shards in sorted(found.items()):
    if len(shards) > 1:
      faults.append(f"{tensor} lies in {' and in '.join(shards)}")
    elif tensor not in promised:
      faults.append(f"{tensor} lies in {shards[0]} and is not in the index")
    elif promised[tensor] != shards[0]:
      faults.append(
          f"{tensor} lies in {shards[0]}, the index says {promised[tensor]}"
      )
  faults += [
      f"{tensor} is not in {shard}, where the index says it is"
      for tensor, shard in sorted(promised.items())
      if tensor not in found
  ]
  if faults:
    more = len(faults) - _SHOWN
    raise refusal.HarnessError(
        f"{folder}: {INDEX} and the shards disagree: "
        + "; ".join(faults[:_SHOWN])
        + (f"; and {more} more." if more > 0 else ".")
    )
