"""One k16 step of a tensor core, bit for bit.

Sixteen products and the accumulator are cut to a common grid and added exactly:

  e(v)   = max(floor(log2 |v|), e_min of v's format), minus infinity for 0
  e_i    = e(a_i) + e(b_i)
  e_max  = max(e(c), all e_i)
  unit   = 2**(e_max - fraction_bits)
  s      = sum over the 17 terms of trunc(term / unit) * unit
  c'     = s cut toward zero to float32

Every intermediate value is a float64 that holds it exactly: a product has at
most 22 significant bits, a cut term at most 2**35, scaling is by powers of two.
So NumPy's vectorized float64 is the integer arithmetic of the definition.

Layer: numerics. Contract: contracts/packed_gemm.py, Mma16Contract.
"""

from typing import NamedTuple

import numpy as np

from moejax.contracts import packed_gemm
from moejax.numerics import formats

# The exponent of zero: below every other, and sums of two stay in an int16.
_NONE = -8192
_LEAST = -400  # Below every sum of two exponents.


class Terms(NamedTuple):
  """16-bit values, ready for products.

  Attributes:
    value: float64.
    exponent: int16, e(v) of the contract.
  """

  value: np.ndarray
  exponent: np.ndarray


def terms(x: np.ndarray, contract: packed_gemm.Mma16Contract) -> Terms:
  """Returns values and exponents of float16 or bfloat16 operands."""
  fmt = formats.of(x.dtype)
  value = x.astype(np.float32).astype(np.float64)
  return Terms(value, _exponent(value, fmt.min_exponent, contract))


def step(
    c: np.ndarray,
    a: Terms,
    b: Terms,
    contract: packed_gemm.Mma16Contract,
) -> np.ndarray:
  """Adds sixteen products to the accumulator.

  Args:
    c: [..., n] float32.
    a: [..., 16, n] or what broadcasts to it.
    b: Likewise.
    contract: Every field matters.

  Returns:
    [..., n] float32. Infinities and NaN as IEEE addition gives them, NaN with
    the contract's bits; a finite sum beyond float32 becomes infinity; a zero
    sum is +0.

  Source: measurements on an H200 (mma.sync and wgmma alike).
  """
  with np.errstate(invalid="ignore", over="ignore"):
    products = a.value * b.value
    exponents = (
        a.exponent + b.exponent
        if contract.exponents == "sum"
        else _exponent(products, _LEAST, contract)
    )
    for start in range(0, 16, contract.group):
      part = slice(start, start + contract.group)
      c = _add(c, products[..., part, :], exponents[..., part, :], contract)
  return c


def mma16(
    c: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    contract: packed_gemm.Mma16Contract,
) -> np.ndarray:
  """Returns c + a @ b along a k axis of any multiple of 16, step by step.

  Args:
    c: [m, n] float32.
    a: [m, k] float16 or bfloat16.
    b: [k, n], the same dtype.
    contract: Every field matters.

  Returns:
    [m, n] float32.

  Raises:
    ValueError: the shapes or dtypes do not fit.
  """
  if a.shape[1] % 16 or a.shape[1] != b.shape[0] or a.dtype != b.dtype:
    raise ValueError(
        f"no k16 steps of {a.dtype}{a.shape} and {b.dtype}{b.shape}."
    )
  left, right = terms(a.T[:, :, None], contract), terms(b, contract)
  for k in range(0, len(b), 16):
    rows = Terms(*(np.moveaxis(x[k : k + 16], 1, 0) for x in left))
    c = step(c, rows, Terms(*(x[k : k + 16] for x in right)), contract)
  return c


def _exponent(value, least: int, contract) -> np.ndarray:
  """e(v) of float64 values as int16."""
  exponent = np.frexp(value)[1].astype(np.int16) - np.int16(1)
  if contract.operand_exponents == "clamped":
    exponent = np.maximum(exponent, np.int16(least))
  return np.where(value == 0, np.int16(_NONE), exponent)


def _add(c, products, exponents, contract) -> np.ndarray:
  """One addition of [..., group, n] products to [..., n]."""
  wide = c.astype(np.float64)
  e_max = np.maximum(_exponent(wide, -126, contract), exponents.max(axis=-2))
  power = contract.fraction_bits - np.maximum(e_max, np.int16(_LEAST))
  scale = np.ldexp(1.0, power)
  cut = np.trunc(products * scale[..., None, :]).sum(axis=-2)
  total = (cut + np.trunc(wide * scale)) * np.ldexp(1.0, -power)
  out = (
      total.astype(np.float32)
      if contract.final == "nearest_even"
      else _truncate(total)
  ) + np.float32(0)
  # Infinities and NaN cannot be cut; IEEE decides, and overflow is among them.
  if not np.isfinite(total).all():
    plain = products.sum(axis=-2) + wide
    special = ~np.isfinite(plain)
    nan = np.uint32(int(contract.nan, 16)).view(np.float32)
    out = np.where(special, plain.astype(np.float32), out)
    out = np.where(np.isnan(plain), nan, out)
  return out


def _truncate(x: np.ndarray) -> np.ndarray:
  """Cuts float64 to float32 toward zero; beyond float32 is infinity."""
  cut = (x.view(np.int64) & np.int64(-(1 << 29))).view(np.float64)
  small = np.abs(x) < 2.0**-126
  if small.any():
    cut = np.where(small, np.trunc(x * 2.0**149) * 2.0**-149, cut)
  return cut.astype(np.float32)
