"""The gated MLPs: one dense, many routed.

Layer: modules. Contract: contracts/combine.py.
"""

from flax import nnx
import jax

from moejax.contracts import combine
from moejax.contracts import document
from moejax.contracts import named_combines
from moejax.contracts import ops as ops_lib
from moejax.modules import tap as tap_lib
from moejax.numerics import declared_moves
from moejax.numerics import moves
from moejax.numerics import router as router_lib


class DenseMLP(nnx.Module):
  """down(R(silu(gate(x)) * up(x))) on [..., embed]."""

  def __init__(self, params: dict, operations: ops_lib.Operations):
    self.gate_proj = nnx.Param(params["gate_proj"])
    self.up_proj = nnx.Param(params["up_proj"])
    self.down_proj = nnx.Param(params["down_proj"])
    self.ops = operations

  def __call__(
      self, x: jax.Array, tap: tap_lib.Tap = tap_lib.SILENT
  ) -> jax.Array:
    ops = self.ops
    x, for_up = declared_moves.of(ops).share(x, 2)
    gate = ops.linear(x, self.gate_proj[...], "projection")
    gate = tap("silu", ops.silu(tap("gate_proj", gate)))
    up = tap("up_proj", ops.linear(for_up, self.up_proj[...], "projection"))
    product = tap("activation", ops.multiply(gate, up))
    return tap(
        "down_proj", ops.linear(product, self.down_proj[...], "projection")
    )


class Experts(nnx.Module):
  """The routed MLPs of a layer, and the combine of their outputs.

  For every token and slot: gate_up = R(W13 x); R(R(silu(gate)) * up);
  R(W2 ...); then the terms and their sum as the combine contract says. The
  fused weight holds the gate rows and then the up rows. With `wide`, silu,
  product and a gate in front of W2 stay in float32, with one R behind them.
  """

  def __init__(
      self,
      params: dict,
      contract: combine.CombineContract,
      layer: int,
      operations: ops_lib.Operations,
      limit: float | None = None,
      wide: bool = False,
      block: int | None = None,
  ):
    """Takes "gate_up" and "down" of the parameters.

    Args:
      params: Nested arrays.
      contract: Of the combine.
      layer: Index, for orders that depend on it.
      operations: The arithmetic.
      limit: Bound on gate (above) and up (both sides); None means none.
      wide: Whether the activation is computed in float32.
      block: Neighbours that share a scale where the inputs of both GEMMs pass
        through E4M3; None where they do not.

    Raises:
      NotImplementedError: the contract contracts products and additions.
    """
    if contract.contraction != "mul_add":
      raise NotImplementedError(
          f"contraction={contract.contraction!r}: the decoder rounds its"
          " terms before it adds them."
      )
    self.contract = contract
    self.layer = layer
    self.limit = limit
    self.wide = wide
    self.block = block
    self.ops = operations
    self.hold(params)

  def hold(self, params: dict) -> None:
    """Keeps the weights; other kinds of weights are held by subclasses."""
    self.gate_up = nnx.Param(params["gate_up"])
    self.down = nnx.Param(params["down"])

  def weights(self) -> tuple[jax.Array, jax.Array]:
    """Returns gate_up [expert, 2 I, k] and down [expert, n, I]."""
    return self.gate_up[...], self.down[...]

  def __call__(
      self,
      x: jax.Array,
      route: router_lib.Route,
      tap: tap_lib.Tap = tap_lib.SILENT,
  ) -> jax.Array:
    """Runs [token, embed] through the route's experts: [token, embed].

    Raises:
      ValueError: the gate multiplies the input and a token has several slots.
    """
    ops, contract = self.ops, self.contract
    gate_up_weight, down_weight = self.weights()
    tokens, top_k = route.ids.shape
    site = contract.gate_site
    if site == "input" and top_k != 1:
      raise ValueError(f"gate_site='input' needs top_k=1, not {top_k}.")
    expert_of_row = route.ids.reshape(-1)

    def by_slot(name, rows):
      return tap(name, rows.reshape(tokens, top_k, -1)).reshape(
          tokens * top_k, -1
      )

    def gated(rows):
      gate = ops.cast(route.gates, contract.gate_dtype).reshape(-1, 1)
      wide = ops.multiply(
          ops.cast(rows, "float32"), ops.cast(gate, "float32")
      )
      return ops.cast(wide, rows.dtype.name)

    def quantized(name, rows):
      if self.block is None:
        return rows
      rows = ops.simulate_quantization(rows, "e4m3", self.block)
      return by_slot(name, rows)

    # Dispatch: one row a route, in slot order.
    declared = declared_moves.of(ops)
    rows = declared.dispatch(x, route.ids, gate_up_weight.shape[0])
    if site == "input":
      rows = by_slot("gated_input", gated(rows))
    rows = quantized("input_quantized", rows)
    both = ops.expert_linear(
        rows, gate_up_weight, expert_of_row, "expert_gemm"
    )
    gate, up = declared.halves(by_slot("gate_up", both))
    if self.wide:
      gate, up = (ops.cast(v, "float32") for v in (gate, up))
    if self.limit is not None:
      gate = moves.clamp(gate, None, self.limit)
      up = moves.clamp(up, -self.limit, self.limit)
    product = ops.multiply(by_slot("silu", ops.silu(gate)), up)
    product = by_slot("activation", product)
    if site == "before_down":
      product = by_slot("gated_activation", gated(product))
    if product.dtype != rows.dtype:
      product = by_slot(
          "activation_rounded", ops.cast(product, rows.dtype.name)
      )
    product = quantized("activation_quantized", product)
    out = ops.expert_linear(
        product, down_weight, expert_of_row, "expert_gemm"
    )
    out = by_slot("down", out).reshape(tokens, top_k, -1)
    terms = tap("terms", ops.gate_terms(out, route.gates, contract))
    return tap("combine", ops.combine(terms, route.ids, contract, self.layer))


class WholeExperts(Experts):
  """The same as one operation of `ops.TrainingOperations`.

  It brings a gradient of its own. Terms and sum round as in the contract; what
  lies between the GEMMs is not shown to the tap.
  """

  def __init__(self, *args, **kwargs):
    """As `Experts`.

    Raises:
      NotImplementedError: the contract is not that of the one operation: gates
        in the activations' dtype behind W2, terms rounded to it, added in
        float32 in slot order from zero, rounded before anything joins.
    """
    super().__init__(*args, **kwargs)
    found, wanted = self.contract, named_combines.at_dtype(
        named_combines.named("transformers_grouped_mm"), self.contract.output
    )
    if self.wide or self.block is not None or (
        document.digest(found) != document.digest(wanted)
    ):
      raise NotImplementedError(
          f"combine {found.name!r} with wide={self.wide}, block={self.block}:"
          f" experts as one operation compute {wanted.name!r} alone."
      )

  def __call__(self, x, route, tap=tap_lib.SILENT):
    gate_up, down = self.weights()
    out = self.ops.moe_mlp(
        x, route.gates, gate_up, down, route.ids, self.limit
    )
    return tap("combine", out)


def build(
    params: dict,
    contract: combine.CombineContract,
    layer: int,
    operations: ops_lib.Operations,
    **options,
) -> Experts:
  """Returns `Experts`, or `WholeExperts` where the operations have them.

  Raises:
    NotImplementedError: as the class does.
  """
  whole = hasattr(operations, "moe_mlp")
  kind = WholeExperts if whole else Experts
  return kind(params, contract, layer, operations, **options)
