"""The activation of a packed expert layer: silu(gate) * up in 16 bits.

silu is a function of one 16-bit value, and a contract names it by the digest of
its 65,536 results. The kernel reads that table: it is the function itself, and
no device's exponential comes into play.

Layer: pallas_kernels. Contract: contracts/packed_moe.py.
"""

import functools

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from moejax.contracts import packed_moe
from moejax.contracts import refusal
from moejax.numerics.packed import activation
from pallas_kernels import half_words
from pallas_kernels import launch

_MINUS_ZERO = 0x8000


def silu_words(contract: packed_moe.PackedMoeContract) -> jax.Array:
  """Returns the contract's table as [65536] uint16 words.

  Raises:
    UnsupportedError: no table of this project has the contract's digest.
  """
  table = activation.silu_table(contract.dtype)
  if activation.table_digest(table) != contract.silu_table:
    raise refusal.UnsupportedError(
        f"silu_table={contract.silu_table} is no table of this project."
    )
  return half_words.to_words(table)


def silu_and_mul(
    s1: jax.Array,
    table: jax.Array,
    contract: packed_moe.PackedMoeContract,
    config: launch.LaunchConfig,
) -> jax.Array:
  """Returns S2 = R_16(R_16(silu(gate)) * (up + 0.0)).

  Args:
    s1: [route, 2 I] uint16 words: gate half, then up half.
    table: From `silu_words`.
    contract: dtype, up_zero.
    config: interpret alone matters.

  Returns:
    [route, I] uint16 words.
  """
  routes, hidden = s1.shape[0], s1.shape[1] // 2
  width = hidden & -hidden  # A power of two that divides it.
  width = min(width, 256)
  return launch.call(
      functools.partial(_kernel, contract=contract, width=width),
      s1, table,
      grid=(routes, hidden // width),
      out=jax.ShapeDtypeStruct((routes, hidden), jnp.uint16),
      config=launch.LaunchConfig(interpret=config.interpret),
  )


def _kernel(
    s1_ref,  # [route, 2 I]
    table_ref,  # [65536]
    s2_ref,  # [route, I]
    *,
    contract: packed_moe.PackedMoeContract,
    width: int,
):
  route, part = pl.program_id(0), pl.program_id(1)
  hidden = s2_ref.shape[1]
  columns = pl.ds(part * width, width)
  gate = s1_ref[route, columns].astype(jnp.int32)
  up = s1_ref[route, pl.ds(hidden + part * width, width)]
  if contract.up_zero == "added":
    up = jnp.where(up == jnp.uint16(_MINUS_ZERO), jnp.uint16(0), up)
  silu = half_words.widen(table_ref[gate], contract.dtype)
  product = silu * half_words.widen(up, contract.dtype)
  s2_ref[route, columns] = half_words.round_half(product, contract.dtype)
