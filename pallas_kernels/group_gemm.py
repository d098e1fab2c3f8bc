"""Grouped GEMMs over rows that lie expert by expert.

  same_nk: one program for each (tile of the list, BN columns)
           C[rows of the tile] = R(A[rows] op(B[e]))
  same_mn: one program for each (expert, BM x BN of the matrix)
           C[e] = R(sum over rows of e of A[r]^T B[r]), +0 without rows

  rows of A     e0 e0 e0 | e1 | e2 e2 e2 e2 e2     (no expert: no tile)
  tiles, BM=2   [0     )[1)[2)[3     )[4     )[5)  a list of static length

Which rows a tile owns is data (`numerics/grouped/tiles.py`), so no launch needs
a bound on the rows of one expert; a grid that has one runs here too, and leaves
the rows that it does not reach as memory held them. Both operands are zero
outside of a tile, a group or a width: one is not enough, since 0 NaN is NaN.

Chains: "mma16" for 16-bit operands, one tensor-core chain over ascending k;
"sequential" for float32 and 16 bits, one fused multiply-add a product.

Layer: pallas_kernels. Contract: contracts/grouped_mlp.py, GroupGemmContract.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
import jax.numpy as jnp

from moejax.contracts import grouped_mlp
from moejax.contracts import refusal
from moejax.numerics.grouped import row_plan
from moejax.numerics.grouped import tiles as tiles_lib
from pallas_kernels import half_words
from pallas_kernels import launch
from pallas_kernels import steps

_TILE_K = 32  # Terms of one step of the loop; two k16 steps.
_TILE_M = 64  # Rows of a weight gradient's tile.
_HOPPER = ("9.0",)


def group_gemm_same_nk(
    a: jax.Array,
    b: jax.Array,
    plan: row_plan.RowPlan,
    contract: grouped_mlp.GroupGemmContract,
    *,
    transpose_b: bool = False,
    config: launch.LaunchConfig = launch.LaunchConfig(),
    memory: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Multiplies every row by the matrix of its expert.

  Args:
    a: [row, k] float32, bfloat16 or float16.
    b: [expert, k, n], or [expert, n, k] with transpose_b; a's dtype.
    plan: Says which rows are whose.
    contract: chain, bound, limit, block_rows, unwritten, mma.
    transpose_b: Whether op is the transpose.
    config: No field changes a bit.
    memory: [row, n] of a's dtype, what the output holds before; filled with
      `contract.unwritten` if None.

  Returns:
    ([row, n] of a's dtype, [row, n tile] int32: how often each part of a row
    was written). Rows without an expert hold what memory held and have 0.

  Raises:
    ValueError: shapes do not fit, or the tile is no power of two from 16.
    UnsupportedError: there is no such GPU, chain, dtype or size.
  """
  _check(a, b, contract, config)
  num_n = b.shape[1 if transpose_b else 2]
  if a.shape != (plan.slot_of_row.shape[0], b.shape[2 if transpose_b else 1]):
    raise ValueError(f"a {a.shape} does not fit b {b.shape} and the plan.")
  shape = (a.shape[0], num_n)
  launch.check_size("the output", shape)
  if memory is None:
    fill = grouped_mlp.FILLS[contract.unwritten]
    memory = jnp.full(shape, fill, a.dtype)
  count = jnp.zeros((shape[0], pl.cdiv(num_n, config.tile_n)), jnp.int32)
  if not a.size or not num_n:
    return memory, count
  tiles = tiles_lib.of_contract(plan, contract)
  words = _to_words(memory)
  out, count = launch.call(
      functools.partial(
          _rows_kernel, contract=contract, config=config, shape=shape,
          dtype=a.dtype.name, transpose_b=transpose_b,
      ),
      *tiles, _to_words(a), _to_words(b), words, count,
      grid=(tiles.expert.shape[0], count.shape[1]),
      out=tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (words, count)),
      config=config,
      memory={5: 0, 6: 1},
  )
  return _from_words(out, a.dtype), count


def group_gemm_same_mn(
    a: jax.Array,
    b: jax.Array,
    plan: row_plan.RowPlan,
    contract: grouped_mlp.GroupGemmContract,
    *,
    config: launch.LaunchConfig = launch.LaunchConfig(),
    memory: jax.Array | None = None,
) -> jax.Array:
  """Multiplies the rows of each expert with each other.

  Args:
    a: [row, m] float32, bfloat16 or float16.
    b: [row, n], a's dtype.
    plan: Says which rows are whose.
    contract: chain, bound, limit, block_rows, mma. A bound drops rows.
    config: No field changes a bit.
    memory: [expert, m, n] of a's dtype, what the output holds before; NaN if
      None. Every element is written.

  Returns:
    [expert, m, n] of a's dtype.

  Raises:
    ValueError: shapes do not fit, or the tile is no power of two from 16.
    UnsupportedError: there is no such GPU, chain, dtype or size.
  """
  _check(a, b, contract, config)
  if a.shape[0] != b.shape[0] or a.shape[0] != plan.slot_of_row.shape[0]:
    raise ValueError(f"a {a.shape} and b {b.shape} do not fit the plan.")
  shape = (plan.counts.shape[0], a.shape[1], b.shape[1])
  launch.check_size("the output", shape)
  if not a.shape[0]:
    return jnp.zeros(shape, a.dtype)
  if memory is None:
    memory = jnp.full(shape, jnp.nan, a.dtype)
  words = _to_words(memory)
  starts = plan.ends - plan.counts
  out = launch.call(
      functools.partial(
          _weights_kernel, contract=contract, config=config, shape=shape,
          dtype=a.dtype.name,
      ),
      starts, starts + tiles_lib.written_rows(plan, contract),
      _to_words(a), _to_words(b), words,
      grid=(
          shape[0], pl.cdiv(shape[1], _TILE_M),
          pl.cdiv(shape[2], config.tile_n),
      ),
      out=jax.ShapeDtypeStruct(words.shape, words.dtype),
      config=config,
      memory={4: 0},
  )
  return _from_words(out, a.dtype)


def _rows_kernel(
    expert_ref,  # [tile]
    first_ref,  # [tile]
    end_ref,  # [tile]
    a_ref,  # [row, k]
    b_ref,  # [expert, k, n] or [expert, n, k]
    _memory_ref,  # [row, n], the memory of out
    _zeros_ref,  # [row, n tile], the memory of count
    out_ref,  # [row, n]
    count_ref,  # [row, n tile]
    *,
    contract: grouped_mlp.GroupGemmContract,
    config: launch.LaunchConfig,
    shape: tuple[int, int],
    dtype: str,
    transpose_b: bool,
):
  tile, part = pl.program_id(0), pl.program_id(1)
  first, end = first_ref[tile], end_ref[tile]
  expert, num_k = expert_ref[tile], a_ref.shape[1]

  @pl.when(first < end)
  def _():
    rows = first + jnp.arange(contract.block_rows, dtype=jnp.int32)
    own = rows < end
    columns, inside = _columns(part, config.tile_n, shape[1])

    def fetch(ks):
      known = ks < num_k
      left = _load(a_ref, (rows[None, :], ks[:, None]),
                   own[None, :] & known[:, None])
      at = (columns[None, :], ks[:, None])
      right = _load(b_ref, (expert, *(at if transpose_b else at[::-1])),
                    inside[None, :] & known[:, None])
      return left, right

    acc = _chain(
        fetch, jnp.int32(0), jnp.int32(num_k),
        (contract.block_rows, config.tile_n), contract, config, dtype,
    )
    place = out_ref.at[rows[:, None], columns[None, :]]
    pltriton.store(
        place, _finish(acc, dtype), mask=own[:, None] & inside[None, :]
    )
    counted = count_ref.at[rows, part]
    pltriton.store(
        counted, pltriton.load(counted, mask=own, other=0) + 1, mask=own
    )


def _weights_kernel(
    start_ref,  # [expert]
    end_ref,  # [expert]
    a_ref,  # [row, m]
    b_ref,  # [row, n]
    _memory_ref,  # [expert, m, n], the memory of out
    out_ref,  # [expert, m, n]
    *,
    contract: grouped_mlp.GroupGemmContract,
    config: launch.LaunchConfig,
    shape: tuple[int, int, int],
    dtype: str,
):
  expert = pl.program_id(0)
  end = end_ref[expert]
  ms, m_inside = _columns(pl.program_id(1), _TILE_M, shape[1])
  ns, n_inside = _columns(pl.program_id(2), config.tile_n, shape[2])

  def fetch(rows):
    own = (rows < end)[:, None]  # A window may reach into the next expert.
    return tuple(
        _load(ref, (rows[:, None], at[None, :]), own & inside[None, :])
        for ref, at, inside in (
            (a_ref, ms, m_inside), (b_ref, ns, n_inside)
        )
    )

  acc = _chain(
      fetch, start_ref[expert], end, (_TILE_M, config.tile_n), contract,
      config, dtype,
  )
  pltriton.store(
      out_ref.at[expert, ms[:, None], ns[None, :]], _finish(acc, dtype),
      mask=m_inside[:, None] & n_inside[None, :],
  )


def _chain(fetch, start, end, shape, contract, config, dtype):
  """acc + the products of indices [start, end), ascending: [m, n] float32.

  `fetch` takes indices [width] and returns words [width, m] and [width, n].
  """
  take = steps.of(config.interpret)
  fused = contract.chain == "sequential"
  width = 1 if fused else _TILE_K

  def step(number, acc):
    ks = start + number * width + jnp.arange(width, dtype=jnp.int32)
    left, right = fetch(ks)
    if not fused:
      halves = (half_words.from_words(v, dtype) for v in (left, right))
      return take.mma(acc, *halves, contract.mma)
    left, right = (_wide(v, dtype) for v in (left, right))
    return take.fma(
        jnp.broadcast_to(left[0][:, None], shape),
        jnp.broadcast_to(right[0][None, :], shape), acc,
    )

  count = (end - start + jnp.int32(width - 1)) // width
  return lax.fori_loop(
      jnp.int32(0), count, step, jnp.zeros(shape, jnp.float32)
  )


def _columns(part, width: int, total: int):
  """The columns of a tile and which of them exist."""
  columns = part * width + jnp.arange(width, dtype=jnp.int32)
  return columns, columns < total


def _load(ref, index, mask):
  """Words at the index; 0 outside of the mask, which is read nowhere."""
  return pltriton.load(ref.at[index], mask=mask, other=0)


def _wide(words, dtype: str):
  if dtype == "float32":
    return lax.bitcast_convert_type(words, jnp.float32)
  return half_words.widen(words, dtype)


def _finish(acc, dtype: str):
  if dtype == "float32":
    return lax.bitcast_convert_type(acc, jnp.uint32)
  return half_words.round_half(acc, dtype)


def _to_words(x):
  return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _from_words(words, dtype):
  return lax.bitcast_convert_type(words, dtype)


def _check(a, b, contract, config) -> None:
  chains = {
      "float32": ("sequential",), "bfloat16": ("mma16", "sequential"),
      "float16": ("mma16", "sequential"),
  }
  if a.dtype != b.dtype:
    raise ValueError(f"operands of {a.dtype} and {b.dtype}.")
  if contract.chain not in chains.get(a.dtype.name, ()):
    raise refusal.UnsupportedError(
        f"no kernel has chain {contract.chain!r} for {a.dtype} operands."
    )
  block = contract.block_rows
  if block < 16 or block & (block - 1):
    raise ValueError(
        f"block_rows={block}; a tile of a kernel is a power of two from 16."
    )
  if contract.chain == "mma16":
    steps.check_mma(contract.mma, config.interpret)
  launch.check_device(config, _HOPPER if contract.chain == "mma16" else ())
  for name, array in (("a", a), ("b", b)):
    launch.check_size(name, array.shape)
