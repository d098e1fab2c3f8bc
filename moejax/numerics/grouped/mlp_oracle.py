"""A routed expert MLP and its gradient, defined: B1 to B10 in NumPy.

Every line of `mlp.py` with its roundings, one expert after another, in the
declared chains and with portable functions. In float64 no line rounds.

Layer: numerics. Contract: contracts/grouped_mlp.py.
"""

import numpy as np

from moejax.contracts import grouped_mlp
from moejax.numerics import rounding
from moejax.numerics.grouped import activation
from moejax.numerics.grouped import group_gemm_oracle as gemm_lib
from moejax.numerics.grouped import row_moves
from moejax.numerics.grouped import row_plan


def moe_mlp_oracle(
    x: np.ndarray,
    gates: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    ids: np.ndarray,
    dy: np.ndarray,
    contract: grouped_mlp.GroupedMlpContract,
) -> dict[str, np.ndarray]:
  """Returns the output, the gradients and the rows between them, by name.

  Args:
    x: [token, embed].
    gates: [token, slot], float32 or x's dtype.
    gate_up: [expert, 2 hidden, embed].
    down: [expert, embed, hidden].
    ids: [token, slot]; the number of experts says "no expert".
    dy: [token, embed], the cotangent, x's dtype.
    contract: `functions` is taken for portable, `residuals` has no meaning.

  Returns:
    y, dx, d_gates, d_gate_up, d_down; and by row: d_fc2, the input gradient of
    the second GEMM, and d_rows, that of the first.

  Raises:
    NotImplementedError: a chain is native.
  """
  dtype, limit = x.dtype, contract.clamp_limit
  counts = row_plan.expert_histogram_oracle(ids, len(down))
  pos = row_plan.scatter_index_oracle(ids, len(down))
  valid, hidden = int(counts.sum()), down.shape[2]
  wide = np.float64 if dtype == np.float64 else np.float32
  w13, w2 = (_rounded(w, dtype) for w in (gate_up, down))
  sizes = (ids.size, ids.shape[0])
  halves = [slice(0, hidden), slice(hidden, 2 * hidden)]
  after = contract.weight_placement == "after_fc2"

  def rows_of(v):
    return row_moves.moe_scatter_oracle(v, pos, valid)

  def tokens_of(v):
    return row_moves.moe_gather_oracle(v, pos, valid)

  def nk(a, b, gemm, transpose_b=False):
    return gemm_lib.same_nk_oracle(
        a, b, counts, gemm, transpose_b=transpose_b,
        reach=gemm.reach(*sizes),
    )

  def mn(a, b, weight):
    gemm = contract.wgrad
    return gemm_lib.same_mn_oracle(
        a, b, counts, gemm, weight.dtype.name, reach=gemm.reach(*sizes)
    )

  g = np.zeros((ids.size, 1), wide)
  placed = pos < valid
  g[pos[placed], 0] = gates[placed].astype(wide)

  def weighted(v):
    return _rounded(v.astype(wide) * g, dtype)

  rows = rows_of(x)
  both = nk(rows, w13, contract.forward, True)
  gate, up = (both[:, half] for half in halves)
  _, p = activation.forward_oracle(gate, up, limit)
  fc2_in = p if after else weighted(p)
  fc2_out = nk(fc2_in, w2, contract.forward, True)
  y = tokens_of(weighted(fc2_out) if after else fc2_out)

  d = rows_of(dy)
  d_out = weighted(d) if after else d
  d_fc2 = nk(d_out, w2, contract.dgrad)
  d_p = d_fc2 if after else weighted(d_fc2)
  by_row = _row_dot(*((fc2_out, d) if after else (p, d_fc2)), gates.dtype)
  d_gates = np.where(placed, by_row[pos], np.zeros((), gates.dtype))
  d_both = np.concatenate(
      activation.backward_oracle(gate, up, d_p, limit), axis=1
  )
  if contract.fc1_layout == "merged":
    d_rows = nk(d_both, w13, contract.dgrad)
  else:
    parts = [
        nk(d_both[:, half], w13[:, half], contract.dgrad) for half in halves
    ]
    d_rows = _rounded(parts[0].astype(wide) + parts[1].astype(wide), dtype)
  return {
      "y": y,
      "dx": tokens_of(d_rows),
      "d_gates": d_gates,
      "d_gate_up": mn(d_both, rows, gate_up),
      "d_down": mn(d_out, fc2_in, down),
      "d_fc2": d_fc2,
      "d_rows": d_rows,
  }


def _rounded(x, dtype):
  return x if x.dtype == dtype else rounding.round_oracle(
      x.astype(np.float64), dtype.name
  )


def _row_dot(a, b, dtype):
  """The products of each row, ascending, in float32 (float64) from +0."""
  contract = grouped_mlp.GroupGemmContract(chain="sequential")
  return np.concatenate([
      np.zeros((0, 1), dtype),
      *(
          gemm_lib.matmul_oracle(
              a[row : row + 1], b[row : row + 1].T, contract, dtype.name
          )
          for row in range(len(a))
      ),
  ])[:, 0]
