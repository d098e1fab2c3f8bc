"""Routed batches, the dense reference, and the rule of closeness.

The reference knows no rows: every expert sees every token, a one-hot product
chooses, and `jax.grad` differentiates, in float64 over the same inputs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import grouped_mlp
from moejax.numerics.grouped import composed
from moejax.numerics.grouped import mlp

NAMES = ("y", "dx", "d_gates", "d_gate_up", "d_down")
FORMS = tuple(
    (layout, placement)
    for layout in ("split", "merged", "eager")
    for placement in ("before_fc2", "after_fc2")
)
# Relative Frobenius error; largest error over largest value. The figures of
# the specification; float64 has no roundings between.
RULES = {
    "bfloat16": (1e-2, 2e-2), "float32": (1e-5, 1e-5), "float64": (1e-12, 1e-12)
}


class Problem(NamedTuple):
  """Operands, ids and the cotangent of y."""

  x: np.ndarray
  gates: np.ndarray
  gate_up: np.ndarray
  down: np.ndarray
  ids: np.ndarray
  dy: np.ndarray

  @property
  def operands(self):
    return self[:4]


def problem(
    ids, *, experts=4, embed=8, hidden=6, dtype="float64", seed=0, gates=None,
    weights=None,
) -> Problem:
  """Random operands around given ids [token, slot]."""
  ids = np.asarray(ids, np.int32)
  rng = np.random.default_rng(seed)

  def draw(*shape):
    return rng.standard_normal(shape)

  x, dy = draw(len(ids), embed), draw(len(ids), embed)
  drawn = rng.random(ids.shape) + 0.1
  narrow, gate_dtype = jnp.dtype(dtype), np.float32
  if dtype == "float64":
    gate_dtype = np.float64
  weights = jnp.dtype(weights or dtype)
  return Problem(
      x.astype(narrow),
      np.asarray(drawn if gates is None else gates, gate_dtype),
      (draw(experts, 2 * hidden, embed) / np.sqrt(embed)).astype(weights),
      (draw(experts, embed, hidden) / np.sqrt(hidden)).astype(weights),
      ids,
      dy.astype(narrow),
  )


def one_expert(tokens: int, top_k: int = 2) -> np.ndarray:
  """Every slot of every token goes to expert 0."""
  return np.zeros((tokens, top_k), np.int32)


def contract_of(chain: str, form, **fields) -> grouped_mlp.GroupedMlpContract:
  """A contract of one of FORMS; the layout of "eager" is no matter."""
  layout, placement = form
  return grouped_mlp.of_chain(
      chain,
      fc1_layout="merged" if layout == "eager" else layout,
      weight_placement=placement,
      **fields,
  )


@functools.partial(jax.jit, static_argnames=("contract", "form"))
def _results(operands, ids, dy, contract, form):
  function = {
      "eager": composed.eager, "composed": composed.composed
  }.get(form, mlp.moe_mlp)
  y, vjp = jax.vjp(lambda *a: function(*a, ids, contract), *operands)
  return (y, *vjp(dy))


def results(case: Problem, contract, form="") -> dict[str, np.ndarray]:
  """y and the gradients, by name."""
  found = _results(case.operands, case.ids, case.dy, contract, form)
  return dict(zip(NAMES, map(np.asarray, found), strict=True))


@functools.partial(jax.jit, static_argnames="limit")
def _dense(operands, ids, dy, limit):
  def function(x, gates, gate_up, down):
    one_hot = jax.nn.one_hot(ids, down.shape[0], dtype=gates.dtype)
    weight = jnp.einsum("tk,tke->te", gates, one_hot)
    gate, up = jnp.split(jnp.einsum("th,eih->tei", x, gate_up), 2, axis=2)
    if limit is not None:
      gate = jnp.where(gate <= limit, gate, limit)
      inside = (up <= limit) & (up >= -limit)
      up = jnp.where(inside, up, jnp.sign(up) * limit)
    out = gate * jax.nn.sigmoid(gate) * up
    return jnp.einsum("te,tei,ehi->th", weight, out, down)

  y, vjp = jax.vjp(function, *operands)
  return (y, *vjp(dy))


def reference(case: Problem, limit=None) -> dict[str, np.ndarray]:
  """The dense reference in float64, over the values of the operands."""
  wide = [np.asarray(v, np.float64) for v in (*case.operands, case.dy)]
  found = _dense(tuple(wide[:4]), case.ids, wide[4], limit)
  return dict(zip(NAMES, map(np.asarray, found), strict=True))


def beyond(found: dict, wanted: dict, dtype: str) -> dict[str, str]:
  """What is not finite or not close by the rule of a dtype, by name."""
  frobenius, largest = RULES[dtype]
  out = {}
  for name, value in wanted.items():
    value = np.asarray(value, np.float64)
    got = np.asarray(found[name], np.float64)
    if got.shape != value.shape:
      out[name] = f"shape {got.shape}, not {value.shape}"
    elif not np.isfinite(got).all():
      out[name] = f"{np.count_nonzero(~np.isfinite(got))} not finite"
    elif value.size:
      error, scale = np.abs(got - value), np.abs(value).max()
      relative = np.linalg.norm(error) / max(np.linalg.norm(value), 1e-300)
      if relative > frobenius or error.max() > largest * scale:
        out[name] = f"relative {relative:.1e}, largest {error.max():.1e}"
  return out


def assert_right(case: Problem, dtype="float64", *, limit=None, chain="native",
                 forms=FORMS, **fields):
  """Every form is finite and close to the dense reference, gradients too."""
  wanted = reference(case, limit)
  for form in forms:
    contract = contract_of(chain, form, clamp_limit=limit, **fields)
    found = beyond(results(case, contract, form[0]), wanted, dtype)
    if found:
      raise AssertionError(f"{form}: {found}")
