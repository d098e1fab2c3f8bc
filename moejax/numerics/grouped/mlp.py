"""A routed expert MLP with one hand-written gradient.

  y = moe_mlp(x, gates, gate_up, down, ids, contract)

The forward pass is that of `contracts/grouped_mlp.py`. The backward pass, given
dy, line by line (weight before fc2; R rounds to the dtype of x unless another
is named):

  B1  D  = rows of dy
  B2  dQ = R(D W2)
  B3  dW2[e] = R_w(sum over rows of D^T Q)
  B4  dg = R_g(sum over hidden of P dQ, ascending, in float32)
  B5  dP = R(dQ G)
  B6, B7  dA, dB: `activation.py`
  B8  dW13[e] = R_w(sum over rows of [dA, dB]^T X)
  B9  dX = R([dA, dB] W13), split: R(R(dA W1) + R(dB W3))
  B10 dx = sum over slots of dX

and for a weight after fc2: dU = R(D G), dP = R(dU W2), dW2[e] of dU^T P, and
dg = R_g(sum over embed of U D).

Weights may be wider than x (float32 masters of bfloat16 rows): they are rounded
to x's dtype inside, and their gradients have their own.

Layer: numerics. Contract: contracts/grouped_mlp.py.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from moejax.contracts import grouped_mlp
from moejax.numerics import moves
from moejax.numerics import rounding
from moejax.numerics import sequential_ops
from moejax.numerics.grouped import activation
from moejax.numerics.grouped import checks
from moejax.numerics.grouped import group_gemm
from moejax.numerics.grouped import once
from moejax.numerics.grouped import row_moves
from moejax.numerics.grouped import row_plan
from moejax.numerics.grouped import storage

Fc1 = jax.Array | tuple[jax.Array, jax.Array]


def moe_mlp(
    x: jax.Array,
    gates: jax.Array,
    gate_up: Fc1,
    down: jax.Array,
    ids: jax.Array,
    contract: grouped_mlp.GroupedMlpContract,
    *,
    checked: bool = False,
) -> jax.Array:
  """Applies to every token the MLPs of its experts and adds their outputs.

  Args:
    x: [token, embed] float.
    gates: [token, slot], float32 or x's dtype.
    gate_up: [expert, 2 hidden, embed], gate rows first; or the pair of
      [expert, hidden, embed].
    down: [expert, embed, hidden].
    ids: [token, slot] int32; the number of experts says "no expert". An expert
      may stand in several slots of a token.
    contract: Every field matters.
    checked: Also checks ids and launch bounds: at once where they are values,
      through `jax.experimental.checkify` where they are traced.

  Returns:
    [token, embed] of x's dtype. Differentiable once, in reverse, for x, gates
    and weights; each gradient has its argument's dtype.

  Raises:
    ValueError: shapes or dtypes do not fit; a check fails; in the backward
      pass, a cotangent of another dtype than y.
    NotImplementedError: under vmap or a second derivative.
  """
  _check(x, gates, gate_up, down, ids)
  if checked:
    checks.check_ids(ids, down.shape[0])
  plan = row_plan.row_plan(ids, down.shape[0])
  if checked:
    checks.check_plan(plan)
    for gemm in (contract.forward, contract.dgrad, contract.wgrad):
      checks.check_bound(plan, gemm)
  return of_plan(x, gates, gate_up, down, plan, contract)


def of_plan(
    x: jax.Array,
    gates: jax.Array,
    gate_up: Fc1,
    down: jax.Array,
    plan: row_plan.RowPlan,
    contract: grouped_mlp.GroupedMlpContract,
) -> jax.Array:
  """`moe_mlp` over rows that are planned already."""
  return _operation(contract)(x, gates, gate_up, down, plan)


@functools.cache
def _operation(contract):
  return once.differentiated(
      functools.partial(_forward, contract=contract),
      functools.partial(_backward, contract=contract),
      "moe_mlp",
  )


def _forward(x, gates, gate_up, down, plan, *, contract):
  """(y, residuals): F1 to F7."""
  operands = (x, gates, gate_up, down, plan)
  if not x.shape[0]:
    return jnp.zeros_like(x), (operands, None)
  rows = row_moves.scatter_rows(x, plan)
  gate, up = _fc1(rows, gate_up, plan, contract)
  kept = _second_half(gate, up, gates, down, plan, contract)
  y = row_moves.gather_rows(kept["v"], plan)
  del kept["v"]
  if contract.residuals == "recompute":
    kept = {}
  return y, (operands, (gate, up, kept))


def _fc1(rows, gate_up, plan, contract):
  """A and B, before any clamp."""
  def nk(weight):
    return group_gemm.group_gemm_same_nk(
        rows, storage.rounded(weight, rows.dtype), plan, contract.forward,
        transpose_b=True,
    )

  if contract.fc1_layout == "split":
    return tuple(map(nk, _halves(gate_up)))
  return tuple(jnp.split(nk(_merged(gate_up)), 2, axis=-1))


def _second_half(gate, up, gates, down, plan, contract):
  """F4 to F6: P, Q or U, and V, by name."""
  zero = storage.run_time_zero(plan.ends)
  _, p = activation.forward(gate, up, contract, zero)
  g = row_moves.gate_rows(gates, plan)
  down = storage.rounded(down, p.dtype)

  def fc2(v):
    return group_gemm.group_gemm_same_nk(
        v, down, plan, contract.forward, transpose_b=True
    )

  if contract.weight_placement == "before_fc2":
    q = _weighted(p, g, zero)
    return {"p": p, "q": q, "v": fc2(q)}
  u = fc2(p)
  return {"p": p, "u": u, "v": _weighted(u, g, zero)}


def _backward(residuals, dy, *, contract):
  """The cotangents of x, gates, gate_up, down; None for the plan."""
  operands, kept = residuals
  x, gates, gate_up, down, plan = operands
  if kept is None:
    zeros = jax.tree.map(jnp.zeros_like, (x, gates, gate_up, down))
    return (*zeros, None)
  gate, up, known = kept
  if contract.residuals == "recompute":
    known = _second_half(gate, up, gates, down, plan, contract)
  zero = storage.run_time_zero(plan.ends)
  d = row_moves.scatter_rows(dy, plan)
  d_p, d_down, d_gates = _fc2_gradient(
      d, known, gates, down, plan, contract, zero
  )
  d_gate, d_up = activation.backward(gate, up, d_p, contract, zero)
  rows = row_moves.scatter_rows(x, plan)
  d_rows, d_gate_up = _fc1_gradient(
      rows, d_gate, d_up, gate_up, plan, contract
  )
  return row_moves.gather_rows(d_rows, plan), d_gates, d_gate_up, d_down, None


def _fc2_gradient(d, known, gates, down, plan, contract, zero):
  """B2 to B5: (dP, dW2, dg)."""
  dgrad, dtype = contract.dgrad, d.dtype
  narrow = storage.rounded(down, dtype)
  g = row_moves.gate_rows(gates, plan)
  if contract.weight_placement == "before_fc2":
    d_q = group_gemm.group_gemm_same_nk(d, narrow, plan, dgrad)
    d_down = group_gemm.group_gemm_same_mn(
        d, known["q"], plan, contract.wgrad, down.dtype
    )
    by_row = _row_dot(known["p"], d_q, dgrad, gates.dtype)
    return _weighted(d_q, g, zero), d_down, row_moves.gate_slots(by_row, plan)
  d_u = _weighted(d, g, zero)
  d_p = group_gemm.group_gemm_same_nk(d_u, narrow, plan, dgrad)
  d_down = group_gemm.group_gemm_same_mn(
      d_u, known["p"], plan, contract.wgrad, down.dtype
  )
  by_row = _row_dot(known["u"], d, dgrad, gates.dtype)
  return d_p, d_down, row_moves.gate_slots(by_row, plan)


def _weighted(rows, g, zero):
  """R_d(rows g): one product in float32, one rounding."""
  wide = storage.wide(rows)
  return storage.rounded(
      storage.product(wide, g.astype(wide.dtype)[:, None], zero), rows.dtype
  )


def _row_dot(a, b, gemm, dtype):
  """R_dtype(sum of a[r] b[r]), ascending in float32 from +0; [row].

  The native chain leaves the order to the framework.
  """
  a, b = storage.wide(a), storage.wide(b)
  if gemm.chain == "native":
    return storage.rounded(jnp.sum(a * b, axis=-1), dtype)
  exact = jnp.add if a.dtype == jnp.float64 else sequential_ops.add_term
  a, b = rounding.widen(a), rounding.widen(b)
  total = lax.fori_loop(
      0, a.shape[1], lambda i, acc: exact(acc, a[:, i] * b[:, i]),
      jnp.zeros(a.shape[:1], jnp.float64),
  )
  return rounding.round_pack(total, jnp.dtype(dtype).name)


def _fc1_gradient(rows, d_gate, d_up, gate_up, plan, contract):
  """B8 and B9: (dX, the cotangent of gate_up in its own form)."""
  dtype = rows.dtype
  pair = isinstance(gate_up, tuple)

  def nk(d, weight):
    return group_gemm.group_gemm_same_nk(
        d, storage.rounded(weight, dtype), plan, contract.dgrad
    )

  def mn(d):
    weight = gate_up[0] if pair else gate_up
    return group_gemm.group_gemm_same_mn(
        d, rows, plan, contract.wgrad, weight.dtype
    )

  if contract.fc1_layout == "split":
    left, right = (
        storage.wide(nk(d, weight))
        for d, weight in zip((d_gate, d_up), _halves(gate_up), strict=True)
    )
    d_rows = storage.rounded(left + right, dtype)
    d_weights = (mn(d_gate), mn(d_up))
    return d_rows, d_weights if pair else moves.concatenate(d_weights, 1)
  both = moves.concatenate([d_gate, d_up], 1)
  d_weight = mn(both)
  d_rows = nk(both, _merged(gate_up))
  return d_rows, tuple(jnp.split(d_weight, 2, axis=1)) if pair else d_weight


def _halves(gate_up: Fc1):
  if isinstance(gate_up, tuple):
    return gate_up
  return tuple(jnp.split(gate_up, 2, axis=1))


def _merged(gate_up: Fc1):
  if isinstance(gate_up, tuple):
    return moves.concatenate(list(gate_up), 1)
  return gate_up


def _check(x, gates, gate_up, down, ids) -> None:
  experts, embed, hidden = down.shape
  parts = gate_up if isinstance(gate_up, tuple) else (gate_up,)
  wanted = (experts, 2 * hidden // len(parts), embed)
  if any(part.shape != wanted for part in parts) or x.shape[1:] != (embed,):
    raise ValueError(
        f"moe_mlp: x {x.shape}, gate_up {[p.shape for p in parts]} and down"
        f" {down.shape} do not fit; down is [expert, embed, hidden]."
    )
  if ids.shape != gates.shape or ids.shape[:1] != x.shape[:1] or not (
      ids.ndim == 2 and ids.shape[1]
  ):
    raise ValueError(
        f"moe_mlp: ids {ids.shape} and gates {gates.shape} must be"
        f" [token, slot] with {x.shape[0]} tokens and a slot."
    )
  if gates.dtype not in (jnp.float32, x.dtype):
    raise ValueError(
        f"moe_mlp: gates of {gates.dtype}; float32 or x's {x.dtype}."
    )
  if len({part.dtype for part in parts}) > 1 or any(
      part.dtype.itemsize < x.dtype.itemsize for part in (*parts, down)
  ):
    raise ValueError(
        f"moe_mlp: weights of {[p.dtype.name for p in (*parts, down)]} for x"
        f" of {x.dtype}; they must be as wide."
    )
