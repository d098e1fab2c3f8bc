"""The combine on a GPU, one addition at a time, exactly as its contract says.

A program takes some columns of one token and walks its slots in order:

  v_s = R_FP32(R_gate(g_s) * e_s)
  t_s = R_operand(v_s)
  a   = +0 (or the first term)
  for s in the order:  a = R_accumulator(R_FP32(a + t_s))
  y   = R_output(R_FP32(a + shared))      or R_output(R_output(a) + shared)

and for contraction "fma": a = R_accumulator(R_FP32(a + g_s * e_s)). Every float
enters and leaves as its bits, and bfloat16 is rounded with integers. A product
passes a selection by its bits (`_result`) before it is added, which nothing
contracts across; Triton under Pallas would not contract anyway.

Layer: pallas_kernels. Contract: contracts/combine.py.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from moejax.contracts import combine
from moejax.numerics import formats
from moejax.numerics import ordered_combine as definition
from moejax.numerics import rounding
from pallas_kernels import half_words
from pallas_kernels import launch
from pallas_kernels import steps

_LEAST = 0x00800000  # The bits of 2**-126.


def ordered_combine(
    expert_out: jax.Array,
    gate: jax.Array,
    expert_ids: jax.Array,
    contract: combine.CombineContract,
    shared: jax.Array | None = None,
    layer: int = 0,
    order: jax.Array | None = None,
    config: launch.LaunchConfig = launch.LaunchConfig(),
) -> jax.Array:
  """Gates and adds each token's expert outputs under a contract.

  The same arguments and bits as `numerics.ordered_combine`.

  Args:
    expert_out: [token, slot, embed] float32, bfloat16 or float16.
    gate: [token, slot], likewise.
    expert_ids: [token, slot] ints.
    contract: Every field matters.
    shared: [token, embed], or None.
    layer: Selects the permutation of a per-layer order.
    order: [token, slot], for a per-token order.
    config: interpret alone matters.

  Returns:
    [token, embed] in contract.output.

  Raises:
    ValueError: the contract's order or a shape does not fit.
    UnsupportedError: there is no GPU, or an array is too large.
  """
  if gate.shape != expert_out.shape[:2] or expert_ids.shape != gate.shape:
    raise ValueError(
        f"expert_out {expert_out.shape}, gate {gate.shape} and expert_ids"
        f" {expert_ids.shape} do not belong together."
    )
  slots = definition.term_order(contract, expert_ids, layer, order)
  return _run(expert_out, gate, slots, contract, shared, config)


def add_terms(
    terms: jax.Array,
    order: jax.Array,
    contract: combine.CombineContract,
    shared: jax.Array | None = None,
    config: launch.LaunchConfig = launch.LaunchConfig(),
) -> jax.Array:
  """Adds [token, slot, embed] terms in the given order into [token, embed].

  The same arguments and bits as `numerics.ordered_combine.add_terms`.

  Raises:
    ValueError: a shape does not fit.
    UnsupportedError: there is no GPU, or an array is too large.
  """
  return _run(terms, None, order, contract, shared, config)


def _run(values, gate, order, contract, shared, config):
  launch.check_device(config)
  launch.check_size("expert_out", values.shape)
  tokens, top_k, embed = values.shape
  if order.shape != (tokens, top_k) or top_k < 1 or (
      shared is not None and shared.shape != (tokens, embed)
  ):
    raise ValueError(
        f"order {order.shape} and shared"
        f" {None if shared is None else shared.shape} do not belong to"
        f" {values.shape}."
    )
  dtypes = tuple(
      None if x is None else x.dtype.name for x in (values, gate, shared)
  )
  words = _jitted(
      *(None if x is None else _words(x) for x in (values, gate, shared)),
      order.astype(jnp.int32),
      contract=contract, dtypes=dtypes, config=config,
  )
  return lax.bitcast_convert_type(words, formats.of(contract.output).numpy)


@functools.partial(jax.jit, static_argnames=("contract", "dtypes", "config"))
def _jitted(values, gate, shared, order, *, contract, dtypes, config):
  return combine_words(values, gate, shared, order, contract, dtypes, config)


def combine_words(
    values, gate, shared, order, contract, dtypes, config
) -> jax.Array:
  """The kernel over bits: what a larger program calls.

  Args:
    values: [token, slot, embed] words: expert outputs, or terms if gate is
      None.
    gate: [token, slot] words, or None.
    shared: [token, embed] words, or None.
    order: [token, slot] int32.
    contract: Every field matters.
    dtypes: Of values, gate and shared; None for what is absent.
    config: interpret alone matters.

  Returns:
    [token, embed] words of contract.output.
  """
  tokens, _, embed = values.shape
  width = min(embed & -embed, 512)  # A power of two that divides it.
  present = [x for x in (gate, shared) if x is not None]
  return launch.call(
      functools.partial(
          _kernel, contract=contract, dtypes=dtypes, width=width,
          fma=steps.of(config.interpret).fma,
      ),
      order, values, *present,
      grid=(tokens, embed // width),
      out=jax.ShapeDtypeStruct(
          (tokens, embed), formats.of(contract.output).uint
      ),
      config=launch.LaunchConfig(interpret=config.interpret),
  )


def _kernel(order_ref, values_ref, *refs, contract, dtypes, width, fma):
  refs = list(refs)
  gate_ref = refs.pop(0) if dtypes[1] else None
  shared_ref = refs.pop(0) if dtypes[2] else None
  out_ref = refs.pop(0)
  token = pl.program_id(0)
  columns = pl.ds(pl.program_id(1) * width, width)
  gated = gate_ref is not None and contract.gate_site == "after_down"

  total = None
  for turn in range(order_ref.shape[1]):
    slot = order_ref[token, turn]
    value = _widen(values_ref[token, slot, columns], dtypes[0])
    gate = None
    if gated:
      gate = jnp.full((width,), gate_ref[token, slot], gate_ref.dtype)
      gate = _round(_widen(gate, dtypes[1]), contract.gate_dtype, "ieee")
      gate = _flush(gate, contract)
    if gated and contract.contraction == "fma":
      value = _flush(value, contract)
      if total is None and contract.start == "first":
        total = gate * value
      else:
        start = jnp.zeros_like(value)
        total = fma(gate, value, start if total is None else total)
      total = _result(total, contract)
    else:
      if gate_ref is not None:
        value = _term(value, gate, contract, dtypes[0])
      value = _flush(value, contract)
      if total is not None:
        total = _result(total + value, contract)
      else:
        total = value if contract.start == "first" else _from_zero(value)
    total = _round(total, contract.accumulator, "ieee")

  if shared_ref is not None:
    if contract.round_before_shared:
      total = _round(total, contract.output, "ieee")
    shared = _flush(_widen(shared_ref[token, columns], dtypes[2]), contract)
    total = _result(total + shared, contract)
  uint = formats.of(contract.output).uint
  nan = definition.nan_of(contract, contract.output).view(uint)
  words = _narrow(total, contract.output, "ieee")
  out_ref[token, columns] = jnp.where(jnp.isnan(total), jnp.asarray(nan), words)


def _term(value, gate, contract, dtype):
  """R_operand(R_FP32(gate * value)), or R_operand(value) without a gate."""
  if dtype == "float16":  # The payload of a NaN is not the value's.
    value = jnp.where(jnp.isnan(value), jnp.float32(jnp.nan), value)
  if gate is not None:
    value = _result(gate * _flush(value, contract), contract)
  else:
    value = _flush(value, contract)
  return _round(value, contract.operand, contract.rounding)


def _words(x) -> jax.Array:
  return lax.bitcast_convert_type(jnp.asarray(x), formats.of(x.dtype).uint)


def _widen(words, dtype):
  if dtype == "float32":
    return lax.bitcast_convert_type(words, jnp.float32)
  return half_words.widen(words, dtype)


def _narrow(x, dtype, rule):
  """The words of R_dtype(x)."""
  if dtype == "bfloat16":
    return rounding.bf16_bits(x, rule)
  narrow = x.astype(formats.of(dtype).numpy)
  return lax.bitcast_convert_type(narrow, formats.of(dtype).uint)


def _round(x, dtype, rule):
  return x if dtype == "float32" else _widen(_narrow(x, dtype, rule), dtype)


def _flush(x, contract):
  """Subnormal float32 to a zero of its sign, if the contract says so."""
  if contract.subnormals == "keep":
    return x
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  magnitude = bits & jnp.uint32(0x7FFFFFFF)
  sign = bits & jnp.uint32(0x80000000)
  bits = jnp.where(magnitude < jnp.uint32(_LEAST), sign, bits)
  return lax.bitcast_convert_type(bits, jnp.float32)


def _result(x, contract):
  """The contract's NaN, and its rule for subnormal results."""
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  nan = jnp.uint32(int(contract.nan, 16))
  bits = jnp.where(jnp.isnan(x), nan, bits)
  return _flush(lax.bitcast_convert_type(bits, jnp.float32), contract)


def _from_zero(x):
  """+0 + x: a compiler may drop the addition and keep a -0."""
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  bits = jnp.where(bits == jnp.uint32(0x80000000), jnp.uint32(0), bits)
  return lax.bitcast_convert_type(bits, jnp.float32)
