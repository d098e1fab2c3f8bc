"""A sparse layer: route by score or by token id, experts, combine, shared.

Layer: modules. Contracts: contracts/route.py, contracts/combine.py.
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from moejax.contracts import deepseek_v4 as contract_lib
from moejax.contracts import ops as ops_lib
from moejax.modules import experts as experts_lib
from moejax.modules import tap as tap_lib
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import quantize
from moejax.numerics import moves
from moejax.numerics import router as router_lib

class Router(nnx.Module):
  """sqrt(softplus(logits)); a bias selects and takes no part in the gates."""

  def __init__(self, params, contract, gate_epsilon, operations):
    self.weight = nnx.Param(params["router"])
    self.table = params["table"] if "table" in params else None
    self.bias = nnx.Param(params["bias"]) if "bias" in params else None
    self.contract = contract
    self.gate_epsilon = gate_epsilon
    self.ops = operations

  def __call__(
      self, x: jax.Array, tokens: jax.Array, tap: tap_lib.Tap
  ) -> router_lib.Route:
    """Routes [token, embed] with ids [token]."""
    ops, contract = self.ops, self.contract
    logits = ops.linear(
        ops.cast(x, contract.logits_dtype),
        ops.cast(self.weight[...], contract.logits_dtype),
        "router_logits",
    )
    logits = ops.cast(tap("logits", logits), contract.score_dtype)
    scores = tap("scores", ops.sqrt(tap("softplus", ops.softplus(logits))))
    if self.table is not None:
      ids = self.table[tokens]
    else:
      biased = ops.add(ops.cast(scores, "float32"), self.bias[...])
      biased = tap("biased", biased)
      ids = router_lib.select(biased, contract.top_k, contract.tie_rule)
    ids = tap("ids", ids)
    gates = moves.gather_rows(scores, ids)
    total = tap("gate_sum", ops.sum(gates, "router_normalization"))
    if self.gate_epsilon:
      total = ops.add_scalar(total, self.gate_epsilon)
      total = tap("gate_sum_shifted", total)
    gates = tap("normalized", ops.divide(gates, total))
    gates = tap("gates", ops.scale(gates, contract.scale))
    return router_lib.Route(ids, ops.cast(gates, contract.gate_dtype))


class SharedExpert(nnx.Module):
  """down(R(R(silu(min(gate, c))) * clamp(up, -c, c))) on [token, embed].

  Under expert_activation="float32" the inner R is to float32, and the product
  is rounded to float32 and then to the model's dtype.
  """

  def __init__(self, params, limit, graph, operations):
    self.gate_proj = nnx.Param(params["gate_proj"])
    self.up_proj = nnx.Param(params["up_proj"])
    self.down_proj = nnx.Param(params["down_proj"])
    self.limit = limit
    self.graph = graph
    self.ops = operations

  def __call__(self, x: jax.Array, tap: tap_lib.Tap) -> jax.Array:
    ops, limit = self.ops, self.limit
    quantization = self.graph.quantization
    x = quantize.activation(x, quantization, "input_quantized", ops, tap)
    gate = tap("gate_proj", ops.linear(x, self.gate_proj[...], "projection"))
    up = tap("up_proj", ops.linear(x, self.up_proj[...], "projection"))
    if self.graph.expert_activation == "float32":
      gate, up = (ops.cast(v, "float32") for v in (gate, up))
    gate = tap("silu", ops.silu(moves.clamp(gate, None, limit)))
    product = ops.multiply(gate, moves.clamp(up, -limit, limit))
    product = tap("activation", product)
    if product.dtype != x.dtype:
      product = ops.cast(product, x.dtype.name)
      product = tap("activation_rounded", product)
    product = quantize.activation(
        product, quantization, "activation_quantized", ops, tap
    )
    return tap(
        "down_proj", ops.linear(product, self.down_proj[...], "projection")
    )


class MoE(nnx.Module):
  """Routed experts and the shared one.

  Under a contract that rounds before the shared addition: R(R(routed) +
  shared). Else the routed sum stays in its accumulator: R(routed + shared).
  """

  def __init__(
      self,
      params: dict,
      config: config_lib.DeepseekV4Config,
      contract: contract_lib.DeepseekV4Contract,
      layer: int,
      operations: ops_lib.Operations,
  ):
    combine, graph = contract.combine, contract.graph
    self.output = combine.output
    if combine.output != config.dtype:
      raise ValueError(
          f"combine {combine.name!r} has output={combine.output!r}, but the"
          f" decoder is {config.dtype}: see named_combines.at_dtype."
      )
    if not combine.round_before_shared:
      combine = dataclasses.replace(combine, output=combine.accumulator)
    self.router = Router(
        params, contract.router, graph.gate_epsilon, operations
    )
    quantization = graph.quantization
    self.experts = experts_lib.build(
        params,
        combine,
        layer,
        operations,
        limit=config.swiglu_limit,
        wide=graph.expert_activation == "float32",
        block=quantization.activation_block
        if quantization.activations
        else None,
    )
    self.shared = SharedExpert(
        params["shared"], config.swiglu_limit, graph, operations
    )
    self.num_experts = config.num_experts
    self.ops = operations

  def __call__(
      self,
      x: jax.Array,
      tokens: jax.Array,
      valid: jax.Array,
      tap: tap_lib.Tap,
  ) -> jax.Array:
    """[batch, token, embed] to the same; padding is routed to no expert."""
    ops = self.ops
    flat = x.reshape(-1, x.shape[-1])
    route = self.router(flat, tokens.reshape(-1), tap.within("router"))
    ids = jnp.where(valid.reshape(-1, 1), route.ids, self.num_experts)
    routed = self.experts(flat, route._replace(ids=ids), tap.within("experts"))
    shared = self.shared(flat, tap.within("shared"))
    if routed.dtype != shared.dtype:
      shared = ops.cast(shared, routed.dtype.name)
    out = ops.cast(ops.add(routed, shared), self.output)
    return tap("sum", out).reshape(x.shape)
