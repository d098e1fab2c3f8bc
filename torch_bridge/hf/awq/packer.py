"""Packs a Hugging Face folder of Qwen3-MoE to 4 bits, as AWQ stores it.

Every projection of a decoder layer that the skip list does not name is rounded
to nearest with zero points (`awq_format.quantize`), group by group, with no
calibration: the layout is AWQ's, the search for better scales is not done. All
other tensors keep their bits. A model is packed tensor by tensor, so memory
holds one shard of the result and not the model.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Iterator
import dataclasses
import pathlib
import shutil
import tempfile

import numpy as np

from moejax.contracts import refusal
from moejax.numerics.packed import awq_format
from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf import hf_config
from torch_bridge.hf import json_file
from torch_bridge.hf import parameter_map
from torch_bridge.hf import shards
from torch_bridge.hf import skip_list
from torch_bridge.hf import tensor_checks
from torch_bridge.hf.awq import config as awq_config
from torch_bridge.hf.awq import layout

# Attention stays as it is unless asked for: the decoder runs experts packed.
SKIPPED = ("self_attn", "mlp.gate", "lm_head")
_ROUTER = "mlp.gate"
_COPIED = (
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "prompts.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
  """How a folder is packed.

  Attributes:
    group_size: Inputs that share a scale and a zero point; -1 means all.
    modules_to_not_convert: The skip list; it must name the router.
    scales: Dtype of the scales; "" is the checkpoint's own. With another than
      the computation's, each scale is rounded once more when it is used.
    shard_bytes: A file of the result ends when it has as many.
  """

  group_size: int = 128
  modules_to_not_convert: tuple[str, ...] = SKIPPED
  scales: str = ""
  shard_bytes: int = shards.MAX_BYTES


def pack(
    source: str | pathlib.Path, out: str | pathlib.Path, request: Request
) -> dict:
  """Writes the packed folder, whole or not at all.

  Args:
    source: A folder that `parameter_map` loads, in a 16-bit dtype.
    out: The folder to make; absent or empty.
    request: How.

  Returns:
    The summary, schema "pack_awq/1": the digests of both checkpoints
    (`fingerprint.checkpoint_digest`), what was packed, how many weights, and
    the largest distance of one from its original in steps of its scale.

  Raises:
    refusal.HarnessError: the source is damaged or no 16-bit Qwen3-MoE, the
      request contradicts it (the message names tensor, k or n, and group
      size), or `out` holds something.
    refusal.UnsupportedError: the router would be packed.
  """
  source, out = pathlib.Path(source), pathlib.Path(out).absolute()
  checkpoint = checkpoint_lib.Checkpoint(source)
  config = hf_config.read(source)
  awq = awq_config.AwqConfig(
      request.group_size, request.modules_to_not_convert
  )
  # What cannot be read back is not written.
  packing = awq_config.to_hf(awq)
  awq_config.from_hf(packing, "request")
  _check_dtypes(source, config.dtype, request.scales or config.dtype)
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise refusal.HarnessError(f"{out} holds something already.")
  plan = _plan(source, config, request)
  out.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(
      prefix=f".{out.name}.", dir=out.parent
  ) as scratch:
    made = pathlib.Path(scratch) / "made"  # The scratch folder is private.
    made.mkdir()
    counts = _Counts()
    tensors = _tensors(checkpoint, config, plan, request, counts)
    shards.write(made, tensors, request.shard_bytes)
    fields = json_file.read_object(source / hf_config.FILE)
    fields[awq_config.FIELD] = packing
    json_file.write(made / hf_config.FILE, fields)
    for name in _COPIED:
      if (source / name).is_file():
        shutil.copyfile(source / name, made / name)
    digest = checkpoint_lib.Checkpoint(made).digest()
    if out.exists():
      out.rmdir()
    made.rename(out)
  return {
      "schema": "pack_awq/1",
      "source": checkpoint.digest(),
      "result": digest,
      awq_config.FIELD: packing,
      "scales": request.scales or config.dtype,
      "packed_modules": counts.modules,
      "packed_weights": counts.weights,
      "worst_steps": counts.worst_steps,
  }


@dataclasses.dataclass(slots=True)
class _Counts:
  """What was packed."""

  modules: int = 0
  weights: int = 0
  worst_steps: float = 0.0

  def add(self, weight: np.ndarray, operand: awq_format.PackedOperand) -> None:
    scale = operand.scales.astype(np.float32)
    rows = operand.group_size
    values = awq_format.dequantize(operand, operand.scales.dtype.name)
    distance = np.abs(values.astype(np.float32) - weight.astype(np.float32))
    steps = distance / np.repeat(scale, rows, axis=0)
    self.modules += 1
    self.weights += weight.size
    self.worst_steps = max(self.worst_steps, float(steps.max()))


def _plan(source, config, request) -> set[str]:
  """Returns the modules to pack; refuses before anything is computed."""
  found, faults = set(), []
  for row in parameter_map.table(config):
    for name in row.names:
      module = name.removesuffix(".weight")
      if not skip_list.is_projection(module) or name == module:
        continue
      try:
        skipped = skip_list.is_skipped(module, request.modules_to_not_convert)
      except ValueError as error:
        raise refusal.HarnessError(f"request: {error}") from error
      if skipped:
        continue
      if module.endswith(f".{_ROUTER}"):
        raise refusal.UnsupportedError(
            f"{name} is a router; it is not packed, want {_ROUTER!r} in"
            f" modules_to_not_convert {list(request.modules_to_not_convert)}."
        )
      n, k = row.source_shape
      faults += _unfit(name, k, n, request.group_size)
      found.add(module)
  tensor_checks.refuse(source, {"cannot be packed": faults}, shown=5)
  if not found:
    raise refusal.HarnessError(
        f"{source}: modules_to_not_convert"
        f" {list(request.modules_to_not_convert)} skips every projection, want"
        " one at least."
    )
  return found


def _unfit(name: str, k: int, n: int, group_size: int) -> list[str]:
  out = []
  try:
    layout.num_groups(k, group_size)
  except ValueError:
    out.append(
        f"{name} has k={k} inputs, want a multiple of group_size={group_size}"
    )
  if n % 8:
    out.append(f"{name} has n={n} outputs, want a multiple of 8")
  return out


def _check_dtypes(source, dtype: str, scales: str) -> None:
  for what, found in (("dtype", dtype), ("scales", scales)):
    if found not in layout.HALVES:
      raise refusal.HarnessError(
          f"{source}: {what} {found!r}, want {' or '.join(layout.HALVES)}."
      )


def _tensors(checkpoint, config, plan, request, counts) -> Iterator:
  """Yields the (name, array) of the result."""
  for name, array in _plain(checkpoint, config):
    module = name.removesuffix(".weight")
    if module not in plan:
      yield name, array
      continue
    weight = np.ascontiguousarray(array.T)
    try:
      operand = awq_format.quantize(
          weight, request.group_size, request.scales or config.dtype
      )
    except ValueError as error:
      raise refusal.HarnessError(
          f"{checkpoint.folder}: {name}: {error}"
      ) from error
    counts.add(weight, operand)
    for leaf, part in zip(
        layout.LEAVES, awq_format.to_checkpoint(operand), strict=True
    ):
      yield f"{module}.{leaf}", part


def _plain(checkpoint, config) -> Iterator:
  """Yields the source, one matrix an expert, with `parameter_map`'s checks."""
  names = checkpoint.names()
  second_copy = config.tied_embeddings and parameter_map.LM_HEAD in names
  if parameter_map.form_of(names) != "per_expert" or second_copy:
    params = parameter_map.load_parameters(checkpoint, config)
    yield from parameter_map.to_hf(params, config)
    return
  rows = parameter_map.table(config)
  needed = [name for row in rows for name in row.names]
  tensor_checks.check_names(checkpoint.folder, needed, names)
  parameter_map.check_headers(checkpoint, rows, config.dtype)
  for row in rows:
    yield from parameter_map.pieces(row, parameter_map.read(checkpoint, row))
