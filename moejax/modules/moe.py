"""A sparse layer: route, dispatch, experts, combine.

Layer: modules.
"""

from flax import nnx
import jax
import jax.numpy as jnp

from moejax.contracts import decoder as decoder_contract
from moejax.contracts import ops as ops_lib
from moejax.contracts import packed_moe
from moejax.modules import experts
from moejax.modules import packed_experts
from moejax.modules import router
from moejax.modules import tap as tap_lib
from moejax.numerics import declared_moves


class MoE(nnx.Module):
  """Sends each token through the experts of its route."""

  def __init__(
      self,
      params: dict,
      contract: (
          decoder_contract.DecoderContract | packed_moe.PackedDecoderContract
      ),
      layer: int,
      operations: ops_lib.Operations,
  ):
    """Takes "router", "gate_up" and "down" of the parameters.

    Raises:
      ValueError: the experts are packed, and the contract does not say how
        packed experts run.
    """
    self.router = router.Router(params["router"], contract.router, operations)
    if not packed_experts.is_packed(params):
      self.experts = experts.build(
          params, contract.combine, layer, operations
      )
    elif isinstance(contract, packed_moe.PackedDecoderContract):
      self.experts = packed_experts.build(params, contract, layer, operations)
    else:
      raise ValueError(
          f"layer {layer}: the experts are packed, and contract"
          f" {contract.name!r} does not say how packed experts run."
      )
    self.num_experts = params["router"].shape[0]

  def __call__(
      self,
      x: jax.Array,
      valid: jax.Array,
      tap: tap_lib.Tap = tap_lib.SILENT,
  ) -> jax.Array:
    """[batch, token, embed] to the same shape.

    Args:
      x: The layer's normalised input.
      valid: [batch, token] bool. Padding is routed to no expert: its ids are
        num_experts, which is how it stays out of expert loads.
      tap: Sees every step.
    """
    for_router, flat = declared_moves.of(self.router.ops).share(
        x.reshape(-1, x.shape[-1]), 2
    )
    route = self.router(for_router, tap.within("router"))
    ids = jnp.where(valid.reshape(-1, 1), route.ids, self.num_experts)
    out = self.experts(flat, route._replace(ids=ids), tap.within("experts"))
    return out.reshape(x.shape)


def expert_loads(ids: jax.Array, num_experts: int) -> jax.Array:
  """Counts the routes of each expert: [num_experts] int32; padding is none."""
  return jnp.bincount(ids.reshape(-1), length=num_experts + 1)[:-1].astype(
      jnp.int32
  )
