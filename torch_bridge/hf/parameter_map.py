"""Which tensor of a Hugging Face checkpoint is which parameter of ours.

The table has one row per parameter, with the keys of
`decoder.parameter_shapes`. Loading uses up both sides: every parameter is
found, and every tensor of the checkpoint is consumed. So a renamed tensor, a
forgotten bias or a fifth norm is an error with a name, and never a weight that
somebody initialised.

Every row has the same transform: its tensors are laid one after another and
the result is viewed in our shape. For experts that gives

  gate_up [expert, 2 * expert_hidden, embed]   from gate 0, up 0, gate 1, ...
  down    [expert, embed, expert_hidden]       from down 0, down 1, ...

Files that already stack the experts have one tensor a row; their layout is
found by `expert_layout`, and the order of their gate and up rows is declared.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
from typing import Any

import numpy as np

from moejax.contracts import document
from moejax.contracts import refusal
from moejax.modules import config as config_lib
from moejax.modules import decoder
from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf import expert_layout
from torch_bridge.hf import tensor_checks

FORMS = ("per_expert", "stacked", "stacked_weight")
LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

_WHOLE = {
    "embedding": EMBEDDING,
    "final_norm": "model.norm.weight",
    "lm_head": LM_HEAD,
}
_IN_LAYER = {
    "input_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "moe.router": "mlp.gate.weight",
    **{f"mlp.{p}": f"mlp.{p}.weight"
       for p in ("gate_proj", "up_proj", "down_proj")},
    **{f"attention.{p}": f"self_attn.{p}.weight"
       for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{f"attention.{p}_bias": f"self_attn.{p}.bias"
       for p in ("q_proj", "k_proj", "v_proj", "o_proj")},
}
# Parameter -> (projections of one expert, name of the stacked tensor).
_EXPERTS = {
    "moe.gate_up": (("gate_proj", "up_proj"), "gate_up_proj"),
    "moe.down": (("down_proj",), "down_proj"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
  """One parameter and where it comes from.

  Attributes:
    path: Our dotted path.
    shape: Our shape.
    names: The tensors that make it, in order.
    source_shape: The shape of each of them.
  """

  path: str
  shape: tuple[int, ...]
  names: tuple[str, ...]
  source_shape: tuple[int, ...]


def table(
    config: config_lib.DecoderConfig, form: str = "per_expert"
) -> tuple[Row, ...]:
  """Returns the rows of a decoder, in the order of `parameter_shapes`.

  Args:
    config: The decoder.
    form: "per_expert" (one matrix a projection of an expert), "stacked" (one
      tensor for all experts) or "stacked_weight" (so, named with ".weight").

  Raises:
    ValueError: the form is none of these.
  """
  document.check_choice("parameter map", "form", form, FORMS)
  shapes = decoder.parameter_shapes(config)
  return tuple(_row(path, shape, form) for path, shape in shapes.items())


def form_of(names: Collection[str]) -> str:
  """Returns the form in which a checkpoint's experts are named."""
  for form, suffix in (("stacked", ""), ("stacked_weight", ".weight")):
    for _, stacked in _EXPERTS.values():
      if any(n.endswith(f".mlp.experts.{stacked}{suffix}") for n in names):
        return form
  return "per_expert"


def load_parameters(
    checkpoint: checkpoint_lib.Checkpoint,
    config: config_lib.DecoderConfig,
    *,
    gate_up_rows: str = "halves",
) -> dict[str, np.ndarray]:
  """Returns {our path: array} of a whole checkpoint, bits unchanged.

  NumPy arrays, because they hold the file's bytes; `decoder.nest` takes them.

  Args:
    checkpoint: The open folder.
    config: The decoder; its dtype is that of every tensor.
    gate_up_rows: Order of the gate and up rows in stacked experts; "halves" is
      that of this architecture.

  Raises:
    ValueError: gate_up_rows is unknown, or says something about experts that
      are not stacked.
    refusal.HarnessError: a parameter is missing, a tensor is left over, a
      shape or dtype is wrong, a weight is not finite, or the output projection
      of a tied model is not its embedding.
  """
  document.check_choice(
      "parameter map", "gate_up_rows", gate_up_rows, expert_layout.ROWS
  )
  form = form_of(checkpoint.names())
  if form == "per_expert" and gate_up_rows != "halves":
    raise ValueError(
        f"gate_up_rows={gate_up_rows!r}, but {checkpoint.folder} holds one"
        " matrix for each projection of an expert."
    )
  rows = table(config, form)
  if config.tied_embeddings and LM_HEAD in checkpoint.names():
    # A second copy of the embedding: read like a parameter, then dropped.
    rows += (dataclasses.replace(rows[0], path="lm_head", names=(LM_HEAD,)),)
  needed = [name for row in rows for name in row.names]
  tensor_checks.check_names(checkpoint.folder, needed, checkpoint.names())
  layout = "v5"
  if form != "per_expert":
    layout = _find_layout(checkpoint, config, rows)
    rows = tuple(_in_layout(row, layout) for row in rows)
  check_headers(checkpoint, rows, config.dtype)
  params = {row.path: read(checkpoint, row) for row in rows}
  if form != "per_expert":
    for layer in config.sparse_layers:
      pair = f"layers.{layer}.moe.gate_up", f"layers.{layer}.moe.down"
      params[pair[0]], params[pair[1]] = expert_layout.to_v5(
          params[pair[0]], params[pair[1]], layout, gate_up_rows
      )
  if config.tied_embeddings and "lm_head" in params:
    _check_tied(checkpoint, params["embedding"], params.pop("lm_head"))
  return params


def to_hf(
    params: Mapping[str, Any], config: config_lib.DecoderConfig
) -> Iterator[tuple[str, np.ndarray]]:
  """Returns an iterator of (Hugging Face name, array), one matrix an expert.

  Every array is C-contiguous: safetensors writes the memory of a NumPy array
  in the order in which it lies, whatever its strides say.

  Args:
    params: {our path: array}, as `load_parameters` returns them.
    config: The decoder.

  Raises:
    ValueError: the paths, shapes or dtypes are not those of the decoder.
  """
  rows = table(config)
  expected = {row.path: (row.shape, config.dtype) for row in rows}
  given = {p: (tuple(a.shape), a.dtype.name) for p, a in params.items()}
  wrong = [
      f"{path} is {given.get(path)}, not {expected.get(path)}"
      for path in sorted({*given, *expected})
      if given.get(path) != expected.get(path)
  ]
  if wrong:
    listing = tensor_checks.listing(wrong)
    raise ValueError(f"parameters do not fit the config: {listing}.")
  return (
      piece for row in rows for piece in pieces(row, params[row.path])
  )


def pieces(row: Row, array: Any) -> Iterator[tuple[str, np.ndarray]]:
  """Yields (name, tensor) of one parameter, the inverse of `read`."""
  array = np.ascontiguousarray(array)
  parts = array.reshape(len(row.names), *row.source_shape)
  yield from zip(row.names, parts, strict=True)


def _row(path: str, shape: tuple[int, ...], form: str) -> Row:
  """Returns the row of one parameter."""
  if path in _WHOLE:
    return Row(path, shape, (_WHOLE[path],), shape)
  _, layer, part = path.split(".", 2)
  at = f"model.layers.{layer}"
  if part in _IN_LAYER:
    return Row(path, shape, (f"{at}.{_IN_LAYER[part]}",), shape)
  projections, stacked = _EXPERTS[part]
  if form != "per_expert":
    suffix = ".weight" if form == "stacked_weight" else ""
    return Row(path, shape, (f"{at}.mlp.experts.{stacked}{suffix}",), shape)
  names = tuple(
      f"{at}.mlp.experts.{expert}.{projection}.weight"
      for expert in range(shape[0])
      for projection in projections
  )
  return Row(path, shape, names, (shape[1] // len(projections), shape[2]))


def _in_layout(row: Row, layout: str) -> Row:
  """Returns a row of stacked experts with the shape that its file has."""
  if layout == "v5" or not row.path.endswith((".moe.gate_up", ".moe.down")):
    return row
  experts, rows, columns = row.source_shape
  return dataclasses.replace(row, source_shape=(experts, columns, rows))


def _find_layout(checkpoint, config, rows) -> str:
  """Decides once for the whole checkpoint; names the folder if it cannot."""
  shapes = {
      row.path: checkpoint.shape(row.names[0])
      for row in rows
      if ".moe." in row.path
  }
  pairs = {
      f"layers.{i}": (
          shapes[f"layers.{i}.moe.gate_up"],
          shapes[f"layers.{i}.moe.down"],
      )
      for i in config.sparse_layers
  }
  try:
    return expert_layout.find_layout(
        pairs, config.num_experts, config.embed, config.expert_hidden
    )
  except refusal.HarnessError as error:
    raise refusal.HarnessError(f"{checkpoint.folder}: {error}") from error


def check_headers(
    checkpoint: checkpoint_lib.Checkpoint, rows: Iterable[Row], dtype: str
) -> None:
  """Refuses wrong shapes and dtypes before any weight is read.

  Raises:
    refusal.HarnessError: there are some; the message lists them.
  """
  shapes, dtypes = [], []
  for row in rows:
    for name in row.names:
      shape, found = checkpoint.shape(name), checkpoint.dtype(name)
      if shape != row.source_shape:
        shapes.append(f"{name} is {shape}, not {row.source_shape}")
      if found != dtype:
        dtypes.append(f"{name} is {found}")
  tensor_checks.refuse(
      checkpoint.folder,
      {"wrong shapes": shapes, f"tensors that are not {dtype}": dtypes},
      shown=5,
  )


def read(checkpoint: checkpoint_lib.Checkpoint, row: Row) -> np.ndarray:
  """Reads the tensors of a row as one array of our shape, bits unchanged.

  Raises:
    refusal.HarnessError: a weight is not finite.
  """
  arrays = []
  for name in row.names:
    array = checkpoint.array(name)
    tensor_checks.check_finite(checkpoint.folder, name, array)
    arrays.append(array)
  if len(row.source_shape) == len(row.shape):
    return arrays[0]
  return np.stack(arrays).reshape(row.shape)


def _check_tied(checkpoint, embedding: np.ndarray, head: np.ndarray) -> None:
  """Refuses a tied model that brings another output projection along."""
  word = f"u{embedding.dtype.itemsize}"
  differs = embedding.view(word) != head.view(word)
  if differs.any():
    first = np.unravel_index(int(differs.argmax()), differs.shape)
    raise refusal.HarnessError(
        f"{checkpoint.folder}: the config ties the embeddings, but"
        f" {int(differs.sum())} of {differs.size} weights of {LM_HEAD} and"
        f" {EMBEDDING} differ; first at {tuple(map(int, first))}:"
        f" {head[first]} and {embedding[first]}."
    )
