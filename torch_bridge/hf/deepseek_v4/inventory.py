"""Every tensor of a released checkpoint: its name, dtype and shape.

A pure function of the config; nothing is allocated. The names are those by
which the loader looks tensors up, so counting one checks the other.

Layer: torch_bridge. Needs no torch.
"""

import dataclasses

from moejax.modules.deepseek_v4 import config as config_lib
from moejax.numerics import block_scaled
from torch_bridge.hf.deepseek_v4 import names as names_lib

E4M3, E8M0 = "float8_e4m3fn", "float8_e8m0fnu"

Tensor = tuple[str, tuple[int, ...]]


def decoder(
    config: config_lib.DeepseekV4Config, experts: str = names_lib.FP4
) -> dict[str, Tensor]:
  """Returns {name: (dtype, shape)} of the decoder in the release's format.

  Norm weights and unpacked matrices have the config's dtype; hash tables are
  int64; hyper-connections, sinks, position and selection biases float32.
  Matrices of attention and of shared experts are E4M3 with one E8M0 scale for
  128 x 128, routed experts two E2M1 codes in an int8 with one E8M0 scale for
  each row and 32 columns.

  Args:
    config: The decoder.
    experts: "fp4", or "fp8" for experts stored like the other matrices.

  Raises:
    ValueError: experts is neither.
  """
  out = {}
  for row in names_lib.table(config, names_lib.UPSTREAM):
    packed = row.packed[0] if row.packed else None
    if names_lib.FP4 in row.packed:
      if experts not in row.packed:
        raise ValueError(f"experts={experts!r} is not one of {row.packed}.")
      packed = experts
    for name in row.names:
      if packed is None:
        out[name] = (_plain_dtype(row, config.dtype), row.source_shape)
      else:
        stored = packed_shapes(packed, row.source_shape)
        out[name], out[names_lib.scale_of(name)] = stored
  return out


def further_block(
    config: config_lib.DeepseekV4Config, index: int = 0
) -> dict[str, Tensor]:
  """Returns the tensors of one block that predicts a further token.

  It is a sliding-window layer with a routed top k, two projections, three norms
  and a head reduction of its own; the decoder does not use it.
  """
  alone = dataclasses.replace(
      config, attentions=(config_lib.SWA,), hash_layers=()
  )
  at = f"{names_lib.IGNORED}{index}."
  block = {}
  for name, tensor in decoder(alone).items():
    if name.startswith("layers.0."):
      block[at + name.removeprefix("layers.0.")] = tensor
    elif name.startswith(("hc_head_", "norm.")):
      block[at + name] = tensor
  square = packed_shapes(names_lib.FP8, (config.embed, config.embed))
  for name in ("e_proj.weight", "h_proj.weight"):
    block[at + name], block[at + names_lib.scale_of(name)] = square
  for name in ("enorm.weight", "hnorm.weight"):
    block[at + name] = (config.dtype, (config.embed,))
  return block


def packed_shapes(
    packed: str, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
  """Returns ((dtype, shape) of the codes, the same of their scales)."""
  rows, columns = shape
  if packed == names_lib.FP4:
    scales = (rows, columns // block_scaled.FP4_BLOCK)
    return ("int8", (rows, columns // 2)), (E8M0, scales)
  block = block_scaled.FP8_BLOCK
  return (E4M3, shape), (E8M0, (-(-rows // block), -(-columns // block)))


def _plain_dtype(row: names_lib.Row, dtype: str) -> str:
  if row.dtype == "int32":
    return "int64"
  return dtype if row.path.endswith("norm") else row.dtype
