"""Grouped GEMMs, defined: one expert after another, one product at a time.

Layer: numerics. Contract: contracts/grouped_mlp.py.
"""

import numpy as np

from moejax.contracts import grouped_mlp
from moejax.numerics import rounding
from moejax.numerics import sequential_ops
from moejax.numerics.packed import mma16


def same_nk_oracle(
    a: np.ndarray,
    b: np.ndarray,
    counts: np.ndarray,
    contract: grouped_mlp.GroupGemmContract,
    *,
    transpose_b: bool = False,
    reach: int | None = None,
) -> np.ndarray:
  """C[r] = R(A[r] op(B[e])) for the rows r of expert e.

  Args:
    a: [row, k].
    b: [expert, k, n], or [expert, n, k] with transpose_b; a's dtype.
    counts: [expert] rows of each expert, which lie one after another.
    contract: chain, block_rows, unwritten, mma.
    transpose_b: Whether op is the transpose.
    reach: Rows of one expert that the launch reaches, in whole blocks; all if
      None. Rows beyond hold `contract.unwritten`.

  Returns:
    [row, n] of a's dtype; rows without an expert are +0.
  """
  op = np.swapaxes(b, 1, 2) if transpose_b else b
  out = np.zeros((a.shape[0], op.shape[2]), a.dtype)
  for expert, rows, whole in _groups(counts, contract, reach):
    out[whole] = np.array(grouped_mlp.FILLS[contract.unwritten]).astype(a.dtype)
    out[rows] = matmul_oracle(a[rows], op[expert], contract, a.dtype.name)
  return out


def same_mn_oracle(
    a: np.ndarray,
    b: np.ndarray,
    counts: np.ndarray,
    contract: grouped_mlp.GroupGemmContract,
    dtype: str,
    *,
    reach: int | None = None,
) -> np.ndarray:
  """C[e] = R(sum over the rows r of e, ascending, of A[r]^T B[r]).

  Args:
    a: [row, m].
    b: [row, n], a's dtype.
    counts: [expert].
    contract: chain, block_rows, mma.
    dtype: Of the result.
    reach: Rows of one expert that take part, in whole blocks; all if None.

  Returns:
    [expert, m, n]; +0 for an expert without rows.
  """
  out = np.zeros((len(counts), a.shape[1], b.shape[1]), np.dtype(dtype))
  for expert, rows, _ in _groups(counts, contract, reach):
    out[expert] = matmul_oracle(a[rows].T, b[rows], contract, dtype)
  return out


def matmul_oracle(
    a: np.ndarray,
    b: np.ndarray,
    contract: grouped_mlp.GroupGemmContract,
    dtype: str,
) -> np.ndarray:
  """[m, k] times [k, n] in the contract's chain over ascending k.

  Raises:
    NotImplementedError: the chain is native.
  """
  if contract.chain == "native":
    raise NotImplementedError("the native chain has no definition here.")
  if contract.chain == "mma16":
    pad = -a.shape[1] % 16
    zero = np.zeros((a.shape[0], b.shape[1]), np.float32)
    acc = mma16.mma16(
        zero, np.pad(a, ((0, 0), (0, pad))), np.pad(b, ((0, pad), (0, 0))),
        contract.mma,
    )
    return rounding.round_oracle(acc.astype(np.float64), dtype)
  if contract.chain == "sequential" and a.dtype != np.float64:
    return sequential_ops.matmul_oracle(a, b, dtype)
  acc = np.zeros((a.shape[0], b.shape[1]), np.float64)
  with np.errstate(all="ignore"):
    for k in range(a.shape[1]):
      product = a[:, k, None].astype(np.float64) * b[None, k].astype(np.float64)
      acc = acc + product
  return rounding.round_oracle(acc, dtype)


def _groups(counts, contract, reach):
  """(expert, its rows within reach, all its rows) of experts with rows."""
  start = 0
  for expert, count in enumerate(np.asarray(counts).tolist()):
    within = count
    if reach is not None:
      block = contract.block_rows
      within = min(count, -(-reach // block) * block)
    if count:
      yield expert, slice(start, start + within), slice(start, start + count)
    start += count
