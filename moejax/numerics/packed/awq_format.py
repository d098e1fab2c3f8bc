"""AWQ checkpoint tensors, read and written; dequantization with one rounding.

A linear layer of K inputs and N outputs is stored input-major:

  qweight  int32 [K, N / 8]   eight 4-bit codes a word, along the outputs
  qzeros   int32 [G, N / 8]   zero points of G groups of K / G inputs, likewise
  scales   16-bit [G, N]

Nibble i of a word (bits 4 i to 4 i + 3) holds column ORDER[i] of the word's
eight. Codes and zero points are unsigned, 0 to 15; int32 is signed, so a shift
is followed by a mask. The value is (code - zero point) * scale, rounded once.

Layer: numerics.
"""

import dataclasses

import numpy as np

from moejax.numerics import formats

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_NATURAL = tuple(range(8))
_SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)
READINGS = (
    "awq",
    "natural_order",
    "natural_order_of_zeros",
    "signed_nibbles",
    "zero_plus_one",
    "zero_0_as_15",
    "zero_0_as_16",
)


@dataclasses.dataclass(frozen=True, eq=False)
class PackedOperand:
  """A 4-bit weight, unpacked to one code an entry.

  Attributes:
    codes: [k, n] uint8, 0..15.
    zeros: [group, n] uint8, 0..15; group = k // group_size.
    scales: [group, n] float16 or bfloat16.
  """

  codes: np.ndarray
  zeros: np.ndarray
  scales: np.ndarray

  def __post_init__(self):
    (k, n), groups = self.codes.shape, len(self.scales)
    if self.zeros.shape != (groups, n) or self.scales.shape != (groups, n):
      raise ValueError(
          f"zeros {self.zeros.shape} and scales {self.scales.shape} do not"
          f" belong to codes {self.codes.shape}."
      )
    if not groups or k % groups:
      raise ValueError(f"k={k} is not divided by {groups} groups.")
    for name in ("codes", "zeros"):
      found = getattr(self, name)
      if found.dtype != np.uint8 or found.max(initial=0) > 15:
        raise ValueError(
            f"{name} must be uint8 of 0..15, got {found.dtype} up to"
            f" {found.max(initial=0)}."
        )
    if formats.of(self.scales.dtype).bits != 16:
      raise ValueError(f"scales are {self.scales.dtype}, no 16-bit float.")

  @property
  def group_size(self) -> int:
    """Inputs that share a scale and a zero point."""
    return len(self.codes) // len(self.scales)


def unpack(words: np.ndarray, order: tuple[int, ...] = ORDER) -> np.ndarray:
  """Returns the eight nibbles of each word by column: [..., 8 * words] uint8.

  Raises:
    ValueError: the words are not int32.
  """
  if words.dtype != np.int32:
    raise ValueError(f"packed words are {words.dtype}, not int32.")
  nibbles = (words.view(np.uint32)[..., None] >> _SHIFTS) & np.uint32(15)
  columns = nibbles[..., np.argsort(order)].astype(np.uint8)
  return columns.reshape(*words.shape[:-1], -1)


def pack(columns: np.ndarray, order: tuple[int, ...] = ORDER) -> np.ndarray:
  """Returns columns of 0..15 as words, eight along the last axis: int32.

  Raises:
    ValueError: a value is not in 0..15, or the last axis is no multiple of 8.
  """
  if columns.shape[-1] % 8 or columns.max(initial=0) > 15 or (
      columns.min(initial=0) < 0
  ):
    raise ValueError(
        f"columns {columns.shape} of {columns.min(initial=0)}.."
        f"{columns.max(initial=0)} are not 0..15 by eights."
    )
  eights = columns.reshape(*columns.shape[:-1], -1, 8)[..., list(order)]
  words = np.bitwise_or.reduce(eights.astype(np.uint32) << _SHIFTS, axis=-1)
  return words.astype(np.uint32).view(np.int32)


def from_checkpoint(
    qweight: np.ndarray,
    qzeros: np.ndarray,
    scales: np.ndarray,
    group_size: int,
    name: str = "weight",
) -> PackedOperand:
  """Unpacks the three tensors of an AWQ linear layer.

  Args:
    qweight: [k, n / 8] int32.
    qzeros: [group, n / 8] int32.
    scales: [group, n] float16 or bfloat16.
    group_size: Inputs of a group; -1 says one group over all inputs.
    name: The layer, for errors.

  Raises:
    ValueError: the group size is not -1 or a divisor of k, or a tensor does
      not have the shape that follows from qweight and the group size.
  """
  k, words = qweight.shape
  rows = k if group_size == -1 else group_size
  if rows < 1 or k % rows:
    raise ValueError(
        f"{name}: group_size={group_size} does not divide the k={k} inputs of"
        f" qweight {qweight.shape}; -1 means one group."
    )
  for part, array, shape in (
      ("qzeros", qzeros, (k // rows, words)),
      ("scales", scales, (k // rows, 8 * words)),
  ):
    if array.shape != shape:
      raise ValueError(
          f"{name}.{part} has shape {array.shape}, not {shape}: qweight is"
          f" {qweight.shape} and group_size={group_size}."
      )
  return PackedOperand(unpack(qweight), unpack(qzeros), scales)


def to_checkpoint(
    operand: PackedOperand,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns (qweight, qzeros, scales), the inverse of `from_checkpoint`."""
  return pack(operand.codes), pack(operand.zeros), operand.scales


def dequantize(operand: PackedOperand, dtype: str) -> np.ndarray:
  """Returns R_dtype((code - zero) * R_dtype(scale)).

  The difference is an exact integer, the product of it and a 16-bit scale is
  exact in float32, so there is one rounding (and one of the scale, if the
  checkpoint's dtype is not the computation's). It is not the fused
  code * scale - R(zero * scale), which rounds twice.

  Args:
    operand: [k, n].
    dtype: "float16" or "bfloat16".

  Returns:
    [k, n] in dtype.
  """
  half = formats.of(dtype).numpy
  with np.errstate(over="ignore", invalid="ignore"):
    scales = operand.scales.astype(np.float32).astype(half).astype(np.float32)
    return _values(operand.codes, operand.zeros, scales).astype(half)


def quantize(
    weight: np.ndarray, group_size: int, dtype: str = "float16"
) -> PackedOperand:
  """Rounds a weight to 4 bits with zero points (`pack_awq`).

  For each group and column, in float32, with lo = min(w, 0), hi = max(w, 0):
    scale = R_dtype((hi - lo) / 15), the least normal number if that is smaller
    zero  = clip(round(-lo / scale), 0, 15)
    code  = clip(round(w / scale) + zero, 0, 15)
  round is to nearest, ties to even.

  Args:
    weight: [k, n], input-major.
    group_size: Inputs of a group, or -1.
    dtype: Of the scales.

  Raises:
    ValueError: the group size does not divide k, or a weight is not finite or
      its group's scale overflows dtype (with its place).
  """
  k, n = weight.shape
  rows = k if group_size == -1 else group_size
  if rows < 1 or k % rows:
    raise ValueError(f"group_size={group_size} does not divide k={k}.")
  fmt = formats.of(dtype)
  groups = weight.astype(np.float32).reshape(k // rows, rows, n)
  lo, hi = (np.float32(0) + f(groups, axis=1) for f in (np.min, np.max))
  lo, hi = np.minimum(lo, 0), np.maximum(hi, 0)
  with np.errstate(over="ignore", invalid="ignore"):
    scales = ((hi - lo) / np.float32(15)).astype(fmt.numpy)
  bad = np.argwhere(~np.isfinite(scales.astype(np.float32)))
  if bad.size:
    g, column = map(int, bad[0])
    raise ValueError(
        f"group {g}, column {column}: {lo[g, column]}..{hi[g, column]} has no"
        f" finite {dtype} scale."
    )
  least = np.float32(2.0**fmt.min_exponent)
  scales = np.maximum(scales.astype(np.float32), least)
  zeros = np.clip(np.rint(-lo / scales), 0, 15)
  codes = np.rint(groups / scales[:, None]) + zeros[:, None]
  codes = np.clip(codes, 0, 15).reshape(k, n)
  return PackedOperand(
      codes.astype(np.uint8), zeros.astype(np.uint8), scales.astype(fmt.numpy)
  )


def read_as(
    qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, reading: str
) -> np.ndarray:
  """Returns the exact float32 values under a right or a wrong reading.

  Wrong readings are known faults of loaders; `explain` uses them to tell which
  fault made given values.

  Raises:
    ValueError: the reading is none of READINGS.
  """
  if reading not in READINGS:
    raise ValueError(f"{reading=} is none of {', '.join(READINGS)}.")
  natural = reading == "natural_order"
  codes = unpack(qweight, _NATURAL if natural else ORDER).astype(np.int32)
  natural |= reading == "natural_order_of_zeros"
  zeros = unpack(qzeros, _NATURAL if natural else ORDER).astype(np.int32)
  if reading == "signed_nibbles":
    codes, zeros = ((x ^ 8) - 8 for x in (codes, zeros))
  if reading == "zero_plus_one":
    zeros = zeros + 1
  if reading.startswith("zero_0_as_"):
    zeros = np.where(zeros == 0, int(reading.rsplit("_", 1)[1]), zeros)
  return _values(codes, zeros, scales.astype(np.float32))


def explain(
    qweight: np.ndarray,
    qzeros: np.ndarray,
    scales: np.ndarray,
    values: np.ndarray,
) -> tuple[str, ...]:
  """Returns the readings under which the tensors give these values, bit by bit.

  Args:
    qweight: [k, n / 8] int32.
    qzeros: [group, n / 8] int32.
    scales: [group, n].
    values: [k, n] dequantized values in float32 or a 16-bit dtype.
  """
  return tuple(
      reading
      for reading in READINGS
      if np.array_equal(
          read_as(qweight, qzeros, scales, reading).astype(values.dtype), values
      )
  )


def _values(codes, zeros, scales) -> np.ndarray:
  """(codes - zeros) * scales in float32, groups along the first axis."""
  groups, n = scales.shape
  shape = (groups, len(codes) // groups, n)
  difference = codes.reshape(shape).astype(np.int32) - zeros.astype(np.int32)[
      :, None
  ]
  return (difference.astype(np.float32) * scales[:, None]).reshape(-1, n)
