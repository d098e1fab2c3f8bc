"""The activation of a packed expert layer: silu(gate) * up in 16 bits.

Layer: numerics. Contract: contracts/packed_moe.py.
"""

from collections.abc import Callable
import functools
import hashlib

import numpy as np

from moejax.contracts import packed_moe
from moejax.numerics import formats
from moejax.numerics.packed import gemm


def all_values(dtype: str) -> np.ndarray:
  """Returns the 65,536 values of a 16-bit dtype, in the order of their bits."""
  words = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
  return words.view(formats.of(dtype).numpy)


def table_of(
    silu: Callable[[np.ndarray], np.ndarray], dtype: str
) -> np.ndarray:
  """Returns another silu's table: all of what it does to a 16-bit dtype.

  Args:
    silu: [65536] to [65536], of that dtype.
    dtype: "float16" or "bfloat16".

  Raises:
    ValueError: the result has another dtype or shape.
  """
  table = np.asarray(silu(all_values(dtype)))
  if table.dtype.name != dtype or table.shape != (1 << 16,):
    raise ValueError(
        f"silu of 65,536 {dtype} gives {table.dtype}{table.shape}."
    )
  return table


@functools.cache
def silu_table(dtype: str) -> np.ndarray:
  """Returns R_16(silu(g)) for all 65,536 values g of a 16-bit dtype.

    e = R_FP32(exp(-g))
    s = R_FP32(g / R_FP32(1 + e))

  The exponential is the correctly rounded one: float64 is rounded once. NumPy's
  float32 exponential is not, and gives other bits in places. NaN is 0x7fff.

  Args:
    dtype: "float16" or "bfloat16".

  Returns:
    [65536] of that dtype, read-only, indexed by the bits of g.

  Source: vLLM's silu_and_mul on an H200 has these bits, all 65,536 of each.
  """
  g = all_values(dtype).astype(np.float32)
  with np.errstate(over="ignore", invalid="ignore", under="ignore"):
    e = np.exp(-g.astype(np.float64)).astype(np.float32)
    table = gemm.round_half(g / (np.float32(1) + e), dtype)
  table.flags.writeable = False
  return table


def table_digest(table: np.ndarray) -> str:
  """Returns the SHA-256 of a table's 16-bit words, little-endian."""
  words = table.view(np.uint16).astype("<u2")
  return hashlib.sha256(words.tobytes()).hexdigest()


def silu_and_mul(
    s1: np.ndarray, contract: packed_moe.PackedMoeContract
) -> np.ndarray:
  """Returns S2 = R_16(R_16(silu(gate)) * (up + 0.0)).

  Args:
    s1: [route, 2 I] in the contract's dtype: gate half, then up half.
    contract: dtype, silu_table, up_zero.

  Returns:
    [route, I], two roundings; the product is exact in float32.

  Raises:
    ValueError: s1 has another dtype or an odd width.
    NotImplementedError: the contract's table is not the one defined here.
  """
  if s1.dtype.name != contract.dtype or s1.shape[-1] % 2:
    raise ValueError(
        f"S1 must be [route, 2 I] {contract.dtype}, got {s1.dtype}{s1.shape}."
    )
  table = silu_table(contract.dtype)
  if table_digest(table) != contract.silu_table:
    raise NotImplementedError(
        f"silu_table={contract.silu_table} is not the table"
        f" {table_digest(table)} of this project."
    )
  gate, up = np.split(s1, 2, axis=-1)
  up = up.astype(np.float32)
  with np.errstate(invalid="ignore"):
    if contract.up_zero == "added":
      up = up + np.float32(0)
    silu = table[np.ascontiguousarray(gate).view(np.uint16)]
    product = silu.astype(np.float32) * up
  return gemm.round_half(product, contract.dtype)
