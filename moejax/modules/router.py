"""Logits to a route, as a module over the operations.

Layer: modules. Contract: contracts/route.py.
"""

from flax import nnx
import jax

from moejax.contracts import ops as ops_lib
from moejax.contracts import route
from moejax.modules import tap as tap_lib
from moejax.numerics import declared_moves
from moejax.numerics import router as router_lib


class Router(nnx.Module):
  """Selects top_k experts and their gates for each token."""

  def __init__(
      self,
      weight: jax.Array,
      contract: route.RouterContract,
      operations: ops_lib.Operations,
  ):
    if contract.score != "softmax" or contract.scale != 1.0:
      raise NotImplementedError(
          f"router score={contract.score!r}, scale={contract.scale}: this"
          " module covers softmax without a factor."
      )
    self.weight = nnx.Param(weight)
    self.contract = contract
    self.ops = operations

  def __call__(
      self, x: jax.Array, tap: tap_lib.Tap = tap_lib.SILENT
  ) -> router_lib.Route:
    """Routes [token, embed]: ids [token, slot] int32, gates [token, slot]."""
    ops, contract = self.ops, self.contract
    logits = ops.linear(
        ops.cast(x, contract.logits_dtype),
        ops.cast(self.weight[...], contract.logits_dtype),
        "router_logits",
    )
    logits = tap("logits", logits)
    scores = ops.softmax(
        ops.cast(logits, contract.score_dtype), "router_softmax"
    )
    scores = tap("scores", scores)
    ids = router_lib.select(scores, contract.top_k, contract.tie_rule)
    ids = tap("ids", ids)
    moves = declared_moves.of(ops)
    gates = moves.pick(scores, ids)
    if contract.normalize:
      for_sum, gates = moves.share(gates, 2)
      total = tap("gate_sum", ops.sum(for_sum, "router_normalization"))
      gates = tap("normalized", ops.divide(gates, total))
    if contract.gate_dtype != contract.score_dtype:
      gates = tap("gates", ops.cast(gates, contract.gate_dtype))
    return router_lib.Route(ids, gates)
