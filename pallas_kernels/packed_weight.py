"""A packed weight as the kernels read it.

AWQ packs eight columns in a word, which a tensor core cannot use: its operand
is sixteen rows of one column. Here a byte holds two codes of one column, of the
same place in two neighbouring K-streams, so that one mask or one shift of 32
rows of bytes makes the 32 rows that a stream owns in a K-tile:

  byte [tile64, j, column]   low nibble:  row 64 * tile64 + j
                             high nibble: row 64 * tile64 + 32 + j

The layout has no part in the numerics.

Layer: pallas_kernels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import packed_gemm
from moejax.contracts import refusal
from moejax.numerics import formats
from moejax.numerics.packed import awq_format
from pallas_kernels import launch

TILE_ROWS = 64


class PackedWeight(NamedTuple):
  """The weights of all experts of one projection.

  Attributes:
    codes: [expert, k / 64, 32, n] uint8, two codes each.
    zeros: [expert, group, n] uint8.
    scales: [expert, group, n] uint16, the bits of R_16(scale).
  """

  codes: jax.Array
  zeros: jax.Array
  scales: jax.Array

  @property
  def k(self) -> int:
    """Rows."""
    return self.codes.shape[1] * TILE_ROWS

  @property
  def n(self) -> int:
    """Columns."""
    return self.codes.shape[-1]

  @property
  def group_size(self) -> int:
    """Rows that share a scale and a zero point."""
    return self.k // self.scales.shape[1]


def pack(
    operand: awq_format.PackedOperand, dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns (codes, zeros, scales) of one expert.

  Args:
    operand: [k, n].
    dtype: "float16" or "bfloat16", to which the scales are rounded once.

  Raises:
    UnsupportedError: k is no multiple of 64.
  """
  k, n = operand.codes.shape
  if k % TILE_ROWS:
    raise refusal.UnsupportedError(
        f"a weight of k={k}, n={n} is not made of {TILE_ROWS} rows by"
        f" {TILE_ROWS}."
    )
  rows = packed_gemm.STREAM_ROWS
  low, high = operand.codes.reshape(-1, 2, rows, n).swapaxes(0, 1)
  with np.errstate(over="ignore"):
    scales = operand.scales.astype(np.float32).astype(formats.of(dtype).numpy)
  return low | high << 4, operand.zeros, scales.view(np.uint16)


def stack(parts: Sequence[tuple]) -> PackedWeight:
  """Returns the weights of all experts, from `pack`, on the default device.

  Raises:
    ValueError: the experts differ in shape, or there is none.
    UnsupportedError: an array is too large for 32-bit offsets.
  """
  shapes = {tuple(x.shape for x in part) for part in parts}
  if len(shapes) != 1:
    raise ValueError(f"experts have shapes {sorted(shapes)}, not one.")
  for name, shape in zip(PackedWeight._fields, shapes.pop(), strict=True):
    launch.check_size(name, (len(parts), *shape))
  return PackedWeight(*(
      jnp.asarray(np.stack(arrays)) for arrays in zip(*parts, strict=True)
  ))


def from_operands(
    operands: Sequence[awq_format.PackedOperand], dtype: str
) -> PackedWeight:
  """Returns the weights of all experts of AWQ operands."""
  return stack([pack(operand, dtype) for operand in operands])
