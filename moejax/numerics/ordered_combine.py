"""The combine, one addition at a time, exactly as its contract says.

The oracle works in NumPy's float32 on the main thread, which is IEEE 754 with
subnormals. The twin carries every float32 value in a float64 and rounds it
with integer operations (`rounding.round_value`), so that neither a contraction
nor a flush nor a removed cast can touch it, compiled or not, on any backend:

  product: exact in float64 (24 + 24 bits), rounded once
  sum:     rounded to float64 and then to float32, which is the same as rounded
           once, because 53 >= 2 * 24 + 2

Layer: numerics. Contract: contracts/combine.py.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import combine
from moejax.numerics import formats
from moejax.numerics import rounding

_TINY = 2.0**-126


def term_order(
    contract: combine.CombineContract,
    expert_ids,
    layer: int = 0,
    order=None,
    xp=jnp,
):
  """Returns which slot is added j-th: [token, slot] int32.

  Args:
    contract: Its order and permutations matter here.
    expert_ids: [token, slot] ints; their values matter for order "expert".
    layer: Which of several permutations applies.
    order: [token, slot] ints, for an explicit contract without permutations.
    xp: `jax.numpy` or `numpy`.

  Raises:
    ValueError: the contract's permutations do not fit top_k or the layer, or
      an explicit order is missing.
  """
  tokens, top_k = expert_ids.shape
  if contract.order == "expert":
    return xp.argsort(expert_ids, axis=-1, stable=True).astype(xp.int32)
  if contract.order == "slot":
    row = tuple(range(top_k))
  elif contract.permutations:
    several = len(contract.permutations) > 1
    if several and layer >= len(contract.permutations):
      raise ValueError(
          f"layer={layer} has no permutation: the contract holds"
          f" {len(contract.permutations)}."
      )
    row = contract.permutations[layer if several else 0]
    if len(row) != top_k:
      raise ValueError(f"permutation {row} does not order top_k={top_k} slots.")
  elif order is None:
    raise ValueError("an explicit contract without permutations needs `order`.")
  else:
    return xp.asarray(order, xp.int32)
  return xp.broadcast_to(xp.asarray(row, xp.int32), (tokens, top_k))


# The oracle.


def gate_terms_oracle(
    expert_out: np.ndarray, gate: np.ndarray, contract: combine.CombineContract
) -> np.ndarray:
  """R_operand(R_FP32(R_gate(gate) * expert_out)), or R_operand(expert_out).

  Args:
    expert_out: [token, slot, embed], float32, bfloat16 or float16.
    gate: [token, slot], same choice of dtypes.
    contract: gate_site, gate_dtype, operand, subnormals, rounding, nan.

  Returns:
    [token, slot, embed] in contract.operand. At most two roundings. Every NaN
    is the contract's, cut to the operand's width.
  """
  value = expert_out.astype(np.float32)
  if expert_out.dtype == np.float16:  # Whose payload survives differs by CPU.
    value = np.where(np.isnan(value), np.float32(np.nan), value)
  value = _flush_oracle(value, contract)
  if contract.gate_site == "after_down":
    gate = _to_oracle(gate.astype(np.float32), contract.gate_dtype, "ieee")
    gate = _flush_oracle(gate.astype(np.float32), contract)
    with np.errstate(all="ignore"):
      value = _result_oracle(gate[..., None] * value, contract)
  terms = _to_oracle(value, contract.operand, contract.rounding)
  with np.errstate(invalid="ignore"):  # Signalling NaNs are legal inputs.
    nan = np.isnan(terms)
  return np.where(nan, nan_of(contract, contract.operand), terms)


def add_terms_oracle(
    terms: np.ndarray,
    order: np.ndarray,
    contract: combine.CombineContract,
    shared: np.ndarray | None = None,
) -> np.ndarray:
  """Adds [token, slot, embed] terms in the given order into [token, embed].

  Args:
    terms: From `gate_terms_oracle`.
    order: [token, slot] ints from `term_order`.
    contract: accumulator, start, round_before_shared, output, subnormals, nan.
    shared: [token, embed] output of the shared expert, or None.

  Returns:
    [token, embed] in contract.output.
  """
  terms = np.take_along_axis(terms, np.asarray(order)[..., None], axis=1)
  terms = _flush_oracle(terms.astype(np.float32), contract)
  total = np.zeros_like(terms[:, 0])
  first = 0
  if contract.start == "first":
    total, first = _round_sum_oracle(terms[:, 0], contract), 1
  for slot in range(first, terms.shape[1]):
    total = _round_sum_oracle(_add_oracle(total, terms[:, slot], contract),
                              contract)
  return _finish_oracle(total, contract, shared)


def ordered_combine_oracle(
    expert_out: np.ndarray,
    gate: np.ndarray,
    expert_ids: np.ndarray,
    contract: combine.CombineContract,
    shared: np.ndarray | None = None,
    layer: int = 0,
    order: np.ndarray | None = None,
) -> np.ndarray:
  """Gates and adds each token's expert outputs under a contract.

  From a = +0, over the slots s in order:
    mul_add:  a = R_accumulator(R_FP32(a + R_operand(R_FP32(g_s * e_s))))
    fma:      a = R_accumulator(R_FP32(a + g_s * e_s))
  then y = R_output(R_FP32(a + shared)).

  Args:
    expert_out: [token, slot, embed] float32, bfloat16 or float16.
    gate: [token, slot]; dimensionless, they need not sum to one.
    expert_ids: [token, slot] ints.
    contract: Every field matters.
    shared: [token, embed], or None for a model without a shared expert.
    layer: Selects the permutation of a per-layer order.
    order: [token, slot], for a per-token order.

  Returns:
    [token, embed] in contract.output.

  Raises:
    ValueError: the contract's order does not fit.
  """
  slots = term_order(contract, expert_ids, layer, order, xp=np)
  if contract.contraction == "mul_add" or contract.gate_site != "after_down":
    terms = gate_terms_oracle(expert_out, gate, contract)
    return add_terms_oracle(terms, slots, contract, shared)
  gate = _to_oracle(gate.astype(np.float32), contract.gate_dtype, "ieee")
  gate = np.take_along_axis(gate, slots, axis=1)[..., None]
  gate = _flush_oracle(gate.astype(np.float32), contract)
  value = np.take_along_axis(expert_out, slots[..., None], axis=1)
  value = _flush_oracle(value.astype(np.float32), contract)
  total = np.zeros_like(value[:, 0])
  for slot in range(value.shape[1]):
    if slot == 0 and contract.start == "first":
      with np.errstate(all="ignore"):
        total = gate[:, slot] * value[:, slot]
    else:
      total = _fma_oracle(gate[:, slot], value[:, slot], total)
    total = _round_sum_oracle(_result_oracle(total, contract), contract)
  return _finish_oracle(total, contract, shared)


def _to_oracle(x: np.ndarray, dtype: str, rule: str) -> np.ndarray:
  if dtype == "bfloat16":
    return rounding.bf16_bits_oracle(x, rule).view(formats.BFLOAT16.numpy)
  with np.errstate(over="ignore", invalid="ignore"):
    return x.astype(formats.of(dtype).numpy)


def _flush_oracle(x: np.ndarray, contract) -> np.ndarray:
  if contract.subnormals == "keep":
    return x
  return np.where(np.abs(x) < np.float32(_TINY), np.copysign(np.float32(0), x),
                  x)


def _result_oracle(x: np.ndarray, contract) -> np.ndarray:
  x = np.where(np.isnan(x), _nan(contract), x)
  return _flush_oracle(x, contract)


def _nan(contract) -> np.float32:
  return np.uint32(int(contract.nan, 16)).view(np.float32)


def _add_oracle(a: np.ndarray, b: np.ndarray, contract) -> np.ndarray:
  with np.errstate(all="ignore"):
    return _result_oracle(a + b, contract)


def _round_sum_oracle(total: np.ndarray, contract) -> np.ndarray:
  return _to_oracle(total, contract.accumulator, "ieee").astype(np.float32)


def _finish_oracle(total, contract, shared) -> np.ndarray:
  if shared is not None:
    if contract.round_before_shared:
      total = _to_oracle(total, contract.output, "ieee").astype(np.float32)
    shared = _flush_oracle(shared.astype(np.float32), contract)
    total = _add_oracle(total, shared, contract)
  out = _to_oracle(total, contract.output, "ieee")
  return np.where(np.isnan(total), nan_of(contract, contract.output), out)


def nan_of(contract, dtype: str) -> np.ndarray:
  """The contract's NaN, cut to the width of a dtype."""
  fmt = formats.of(dtype)
  word = int(contract.nan, 16)
  if fmt is formats.FLOAT16:  # Five exponent bits: keep the leading payload.
    word = 0x7E000000 if word == 0x7FC00000 else 0x7FFF0000
  word >>= 32 - fmt.bits
  return np.array(word, fmt.uint).view(fmt.numpy)


def _fma_oracle(g: np.ndarray, e: np.ndarray, a: np.ndarray) -> np.ndarray:
  """R_FP32(a + g * e): float64 rounded to odd makes the second one right."""
  with np.errstate(all="ignore"):
    product = g.astype(np.float64) * e.astype(np.float64)
    a = a.astype(np.float64)
    total = product + a
    back = total - product
    error = (product - (total - back)) + (a - back)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    away = (error > 0) == (total > 0)
    bits = np.where(inexact, np.where(away, bits + 1, bits - 1), bits)
    return bits.view(np.float64).astype(np.float32)


# The twin. Every float32 value travels as a float64 of the same value.


def gate_terms(
    expert_out: jax.Array, gate: jax.Array, contract: combine.CombineContract
) -> jax.Array:
  """The twin of `gate_terms_oracle`: same arguments, same bits."""
  if contract.gate_site == "after_down":
    gate = rounding.round_value(rounding.widen(gate), contract.gate_dtype)
    value = _result(
        _flush(gate, contract)[..., None]
        * _flush(rounding.widen(expert_out), contract),
        contract,
    )
  else:
    value = _flush(rounding.widen(expert_out), contract)
    if contract.rounding == "paper" and contract.operand == "bfloat16":
      value = _infinite_where_the_payload_is_low(value, expert_out)
  value = rounding.round_value(value, contract.operand)
  return _pack(value, contract, contract.operand)


def _infinite_where_the_payload_is_low(value, expert_out):
  """The rule "paper": a float32 NaN with a payload in its low half only."""
  if expert_out.dtype != jnp.float32:
    return value
  bits = lax.bitcast_convert_type(expert_out, jnp.uint32)
  infinite = (bits & jnp.uint32(0x7FFF0000)) == jnp.uint32(0x7F800000)
  infinity = jnp.where(
      bits >> 31 == 1, jnp.float64(-jnp.inf), jnp.float64(jnp.inf)
  )
  return jnp.where(infinite, infinity, value)


def add_terms(
    terms: jax.Array,
    order: jax.Array,
    contract: combine.CombineContract,
    shared: jax.Array | None = None,
) -> jax.Array:
  """The twin of `add_terms_oracle`: same arguments, same bits."""
  # Widened first: moving bfloat16 values about, XLA on a CPU may flush them.
  terms = _flush(rounding.widen(terms), contract)
  terms = jnp.take_along_axis(terms, order[..., None], axis=1)
  total = rounding.round_value(
      _started(_result(terms[:, 0], contract), contract), contract.accumulator
  )
  for slot in range(1, terms.shape[1]):
    total = rounding.round_value(
        _result(total + terms[:, slot], contract), contract.accumulator
    )
  return _finish(total, contract, shared)


def ordered_combine(
    expert_out: jax.Array,
    gate: jax.Array,
    expert_ids: jax.Array,
    contract: combine.CombineContract,
    shared: jax.Array | None = None,
    layer: int = 0,
    order: jax.Array | None = None,
) -> jax.Array:
  """The twin of `ordered_combine_oracle`: same arguments, same bits."""
  slots = term_order(contract, expert_ids, layer, order)
  if contract.contraction == "mul_add" or contract.gate_site != "after_down":
    terms = gate_terms(expert_out, gate, contract)
    return add_terms(terms, slots, contract, shared)
  gate = rounding.round_value(rounding.widen(gate), contract.gate_dtype)
  gate = _flush(jnp.take_along_axis(gate, slots, axis=1), contract)
  value = _flush(rounding.widen(expert_out), contract)
  value = jnp.take_along_axis(value, slots[..., None], axis=1)
  # A product that vanishes only when it is rounded keeps its sign.
  product = _started(gate[:, 0, None] * value[:, 0], contract)
  total = _result(product, contract)
  total = rounding.round_value(total, contract.accumulator)
  for slot in range(1, value.shape[1]):
    fused = _sum_to_odd(gate[:, slot, None] * value[:, slot], total)
    total = rounding.round_value(
        _result(fused, contract), contract.accumulator
    )
  return _finish(total, contract, shared)


def _flush(y: jax.Array, contract) -> jax.Array:
  if contract.subnormals == "keep":
    return y
  bits = lax.bitcast_convert_type(y, jnp.uint64)
  zero = lax.bitcast_convert_type(bits & jnp.uint64(1 << 63), jnp.float64)
  return jnp.where(jnp.abs(y) < _TINY, zero, y)


def _result(y: jax.Array, contract) -> jax.Array:
  return _flush(rounding.round_value(y, "float32"), contract)


def _finish(total: jax.Array, contract, shared) -> jax.Array:
  if shared is not None:
    if contract.round_before_shared:
      total = rounding.round_value(total, contract.output)
    total = _result(
        total + _flush(rounding.widen(shared), contract), contract
    )
  total = rounding.round_value(total, contract.output)
  return _pack(total, contract, contract.output)


def _pack(y: jax.Array, contract, dtype: str) -> jax.Array:
  """`rounding.pack`, with the contract's NaN.

  Chosen among integers: XLA selects bfloat16 values by way of float32, which
  replaces the bits of a NaN.
  """
  fmt = formats.of(dtype)
  bits = jnp.where(
      jnp.isnan(y),
      jnp.asarray(nan_of(contract, dtype).view(fmt.uint)),
      lax.bitcast_convert_type(rounding.pack(y, dtype), fmt.uint),
  )
  return lax.bitcast_convert_type(bits, fmt.numpy)


def _started(first: jax.Array, contract) -> jax.Array:
  """+0 + first, or first: XLA drops an addition of zero and keeps a -0."""
  if contract.start == "first":
    return first
  return jnp.where(first == 0, jnp.float64(0), first)


def _sum_to_odd(a: jax.Array, b: jax.Array) -> jax.Array:
  """a + b in float64, rounded to odd, so that a second rounding is right."""
  total = a + b
  back = total - a
  error = (a - (total - back)) + (b - back)
  bits = lax.bitcast_convert_type(total, jnp.int64)
  inexact = (error != 0) & jnp.isfinite(total) & (bits & 1 == 0)
  away = (error > 0) == (total > 0)
  bits = jnp.where(inexact, jnp.where(away, bits + 1, bits - 1), bits)
  return lax.bitcast_convert_type(bits, jnp.float64)
