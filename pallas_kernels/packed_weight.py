"""A packed weight as the kernels read it.

AWQ packs eight columns in a word, which a tensor core's k16 step cannot use.
Here a uint16 word holds four codes of one column, one for each of four
consecutive k16 steps, so that the same shift of sixteen words makes the sixteen
rows of one step:

  word [tile64, j, column], bits 4 i to 4 i + 3: row 64 * tile64 + 16 * i + j

The layout has no part in the numerics.

Layer: pallas_kernels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import refusal
from moejax.numerics import formats
from moejax.numerics.packed import awq_format
from pallas_kernels import launch

TILE_ROWS = 64
STEP_ROWS = 16
STEPS = TILE_ROWS // STEP_ROWS  # k16 steps of one word.


class PackedWeight(NamedTuple):
  """The weights of all experts of one projection.

  Attributes:
    words: [expert, k / 64, 16, n] uint16, four codes each.
    zeros: [expert, group, n] uint8.
    scales: [expert, group, n] uint16, the bits of R_16(scale).
  """

  words: jax.Array
  zeros: jax.Array
  scales: jax.Array

  @property
  def k(self) -> int:
    """Rows."""
    return self.words.shape[1] * TILE_ROWS

  @property
  def n(self) -> int:
    """Columns."""
    return self.words.shape[-1]

  @property
  def group_size(self) -> int:
    """Rows that share a scale and a zero point."""
    return self.k // self.scales.shape[1]


def pack(
    operand: awq_format.PackedOperand, dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns (words, zeros, scales) of one expert.

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
  steps = operand.codes.reshape(-1, STEPS, STEP_ROWS, n).astype(np.uint16)
  shifts = np.arange(0, 16, 4, dtype=np.uint16)[:, None, None]
  words = np.bitwise_or.reduce(steps << shifts, axis=1)
  with np.errstate(over="ignore"):
    scales = operand.scales.astype(np.float32).astype(formats.of(dtype).numpy)
  return words, operand.zeros, scales.view(np.uint16)


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
