"""Grouped GEMMs over rows that lie expert by expert, in JAX.

  same_nk:  C[r] = R(A[r] op(B[e])),             r a row of expert e
  same_mn:  C[e] = R(sum over rows r of e of A[r]^T B[r])

The first is the forward pass and the gradient of rows; the second is the
gradient of weights, +0 for an expert without rows. Rows behind the last expert
are +0 in C, whatever A holds there. `group_gemm_oracle.py` is the definition.

Layer: numerics. Contract: contracts/grouped_mlp.py.
"""

import jax
from jax import lax
import jax.numpy as jnp

from moejax.contracts import grouped_mlp
from moejax.numerics import moves
from moejax.numerics.grouped import chains
from moejax.numerics.grouped import once
from moejax.numerics.grouped import row_plan
from moejax.numerics.grouped import storage
from moejax.numerics.grouped import tiles as tiles_lib


def group_gemm_same_nk(
    a: jax.Array,
    b: jax.Array,
    plan: row_plan.RowPlan,
    contract: grouped_mlp.GroupGemmContract,
    *,
    transpose_b: bool = False,
) -> jax.Array:
  """Multiplies every row by the matrix of its expert.

  Args:
    a: [row, k] float; rows without an expert are not read.
    b: [expert, k, n], or [expert, n, k] with transpose_b; a's dtype.
    plan: Says which rows are whose.
    contract: Every field matters.
    transpose_b: Whether op is the transpose.

  Returns:
    [row, n] of a's dtype, one rounding from the accumulator. Rows that a bound
    does not reach hold `contract.unwritten`.

  Raises:
    ValueError: shapes or dtypes do not fit, or float64 is needed and off.
  """
  _check_dtypes(a, b)
  contracted = b.shape[2 if transpose_b else 1]
  if a.shape != (plan.slot_of_row.shape[0], contracted):
    raise ValueError(
        f"same_nk: a {a.shape} and b {b.shape} do not fit each other and a plan"
        f" of {plan.slot_of_row.shape[0]} rows."
    )
  if not a.shape[0]:
    return jnp.zeros((0, b.shape[1 if transpose_b else 2]), a.dtype)
  owned = jnp.arange(a.shape[0], dtype=jnp.int32) < plan.ends[-1]
  a = moves.where(owned[:, None], a, jnp.zeros((), a.dtype))
  if contract.chain == "native":
    out = storage.rounded(_ragged(a, b, plan.counts, transpose_b), a.dtype)
  else:
    out = _tiled(a, b, plan, contract, transpose_b)
  return moves.where(owned[:, None], out, jnp.zeros((), a.dtype))


def group_gemm_same_mn(
    a: jax.Array,
    b: jax.Array,
    plan: row_plan.RowPlan,
    contract: grouped_mlp.GroupGemmContract,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
  """Multiplies the rows of each expert with each other.

  Args:
    a: [row, m] float; rows without an expert are not read.
    b: [row, n], a's dtype.
    plan: Says which rows are whose.
    contract: A bound drops rows from the sum; nothing stays unwritten.
    dtype: Of the result; a's if None.

  Returns:
    [expert, m, n], one rounding from the accumulator.

  Raises:
    ValueError: as for `group_gemm_same_nk`.
  """
  _check_dtypes(a, b)
  if {a.shape[0], b.shape[0]} != {plan.slot_of_row.shape[0]}:
    raise ValueError(
        f"same_mn: a {a.shape} and b {b.shape} do not fit each other and a plan"
        f" of {plan.slot_of_row.shape[0]} rows."
    )
  dtype = jnp.dtype(a.dtype if dtype is None else dtype)
  shape = (plan.counts.shape[0], a.shape[1], b.shape[1])
  if not a.shape[0]:
    return jnp.zeros(shape, dtype)
  if contract.chain != "native":
    return _row_chain(a, b, plan, contract, dtype)
  owned = (jnp.arange(a.shape[0], dtype=jnp.int32) < plan.ends[-1])[:, None]
  a, b = (moves.where(owned, v, jnp.zeros((), v.dtype)) for v in (a, b))
  out = _ragged_rows(a, b, plan.counts)
  some = (plan.counts > 0)[:, None, None]
  return storage.rounded(jnp.where(some, out, jnp.zeros((), out.dtype)), dtype)


def grouped_matmul(
    a: jax.Array,
    b: jax.Array,
    plan: row_plan.RowPlan,
    forward: grouped_mlp.GroupGemmContract,
    dgrad: grouped_mlp.GroupGemmContract,
    wgrad: grouped_mlp.GroupGemmContract,
    *,
    transpose_b: bool = False,
) -> jax.Array:
  """`group_gemm_same_nk` with its gradient: same_nk for a, same_mn for b.

  b may be wider than a (float32 weights of bfloat16 rows): it is rounded to
  a's dtype here and its gradient has its own dtype, rounded once.

  Raises:
    NotImplementedError: under vmap or a second derivative.
  """

  def run(a, b, plan):
    narrow = storage.rounded(b, a.dtype)
    out = group_gemm_same_nk(
        a, narrow, plan, forward, transpose_b=transpose_b
    )
    return out, (a, b, plan)

  def gradient(kept, dy):
    a, b, plan = kept
    narrow = storage.rounded(b, a.dtype)
    da = group_gemm_same_nk(
        dy, narrow, plan, dgrad, transpose_b=not transpose_b
    )
    pair = (dy, a) if transpose_b else (a, dy)
    return da, group_gemm_same_mn(*pair, plan, wgrad, b.dtype), None

  return once.differentiated(run, gradient, "grouped_matmul")(a, b, plan)


def _ragged(a, b, counts, transpose_b: bool):
  dims = lax.RaggedDotDimensionNumbers(
      dot_dimension_numbers=(((1,), (2 if transpose_b else 1,)), ((), ())),
      lhs_ragged_dimensions=[0],
      rhs_group_dimensions=[0],
  )
  return _ragged_dot(a, b, counts, dims)


def _ragged_rows(a, b, counts):
  dims = lax.RaggedDotDimensionNumbers(
      dot_dimension_numbers=(((0,), (0,)), ((), ())),
      lhs_ragged_dimensions=[0],
      rhs_group_dimensions=[],
  )
  return _ragged_dot(a, b, counts, dims)


def _ragged_dot(a, b, counts, dims):
  """float32 operands keep all their bits: no TF32."""
  precision = lax.Precision.HIGHEST if a.dtype.itemsize > 2 else None
  return lax.ragged_dot_general(
      a, b, counts, dims, precision=precision,
      preferred_element_type=storage.wide(a[:0]).dtype,
  )


def _tiled(a, b, plan, contract, transpose_b: bool):
  """Each tile multiplies its rows and stores those that are its own."""
  chain = chains.of_contract(contract, a.dtype)
  tiles = tiles_lib.of_contract(plan, contract)
  index, inside = tiles_lib.tile_rows(tiles, contract.block_rows)
  rows = moves.take_rows(a, index.reshape(-1))
  rows = rows.reshape(*index.shape, a.shape[1])
  rows = moves.where(inside[..., None], rows, jnp.zeros((), a.dtype))
  matrices = moves.take_rows(b, tiles.expert)
  if transpose_b:
    matrices = jnp.swapaxes(matrices, 1, 2)
  out = chains.matmul(rows, matrices, chain, a.dtype.name)
  memory = jnp.full(
      (a.shape[0], out.shape[-1]), grouped_mlp.FILLS[contract.unwritten],
      a.dtype,
  )
  target = jnp.where(inside, index, jnp.int32(a.shape[0]))
  stored = moves.to_bits(memory).at[target].set(
      moves.to_bits(out), mode="drop"
  )
  return lax.bitcast_convert_type(stored, a.dtype)


def _row_chain(a, b, plan, contract, dtype):
  """All experts step through their rows together, each from its first."""
  chain = chains.of_contract(contract, a.dtype)
  reached = tiles_lib.written_rows(plan, contract)
  starts = plan.ends - plan.counts
  lanes = jnp.arange(chain.width, dtype=jnp.int32)

  def step(number, acc):
    place = number * chain.width + lanes
    own = (place < reached[:, None])[..., None]
    rows = starts[:, None] + place

    def operand(x):
      found = moves.take_rows(x, rows.reshape(-1))
      found = found.reshape(*rows.shape, x.shape[1])
      return moves.where(own, found, jnp.zeros((), x.dtype))

    return jax.vmap(chain.step)(acc, operand(a), operand(b))

  steps = (jnp.max(reached) + jnp.int32(chain.width - 1)) // chain.width
  acc = chain.start((plan.counts.shape[0], a.shape[1], b.shape[1]))
  acc = lax.fori_loop(jnp.int32(0), steps, step, acc)
  return chain.finish(acc, dtype.name)


def _check_dtypes(a, b) -> None:
  if a.dtype != b.dtype:
    raise ValueError(f"a grouped GEMM of {a.dtype} and {b.dtype}.")
