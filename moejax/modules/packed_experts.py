"""The routed MLPs of a layer whose weights are packed.

Two modules, one for each way that the contract knows. Both show the tap
`packed_elements`: how many output elements of W13 and of W2 came from packed
weights, route by route, so a run proves by itself that it ran packed.

Layer: modules. Contract: contracts/packed_moe.py.
"""

from collections.abc import Mapping

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import document
from moejax.contracts import ops as ops_lib
from moejax.contracts import packed_gemm
from moejax.contracts import packed_moe
from moejax.contracts import refusal
from moejax.modules import experts as experts_lib
from moejax.modules import packed_weight
from moejax.modules import tap as tap_lib
from moejax.numerics import router as router_lib
from moejax.numerics.packed import alignment

_GEMMS = ("gate_up", "down")


def is_packed(params: Mapping) -> bool:
  """Whether the experts of a layer's parameters are packed."""
  return isinstance(params["gate_up"], Mapping)


def build(
    params: Mapping,
    contract: packed_moe.PackedDecoderContract,
    layer: int,
    operations: ops_lib.PackedOperations,
) -> nnx.Module:
  """Returns the experts of a layer as the contract says they run.

  Args:
    params: "gate_up" and "down", each the three AWQ tensors of all experts:
      [embed, 2 * hidden] with the gate columns first, and [hidden, embed].
    contract: Of the decoder.
    layer: Index, for orders that depend on it.
    operations: The arithmetic.

  Raises:
    ValueError: the tensors do not belong together, or their groups are not
      those of the contract.
    UnsupportedError: the sizes do not fall into the contract's tiles.
  """
  make = (
      DequantizedExperts
      if isinstance(contract.experts, packed_moe.DequantizedContract)
      else PackedExperts
  )
  return make(params, contract, layer, operations)


class DequantizedExperts(experts_lib.Experts):
  """`Experts` over weights that are made wide for each call.

  w = R((code - zero) * R(scale)), one rounding a weight; then the operations
  of `Experts` with theirs. Between calls there are packed words alone.
  """

  def __init__(self, params, contract, layer, operations):
    self._dtype = contract.experts.dtype
    self._group_size = contract.experts.group_size
    super().__init__(params, contract.combine, layer, operations)

  def hold(self, params: Mapping) -> None:
    """Keeps the words."""
    self.gate_up, self.down = _weights(params)
    for weight in (self.gate_up, self.down):
      want = weight.k if self._group_size == -1 else self._group_size
      _check_groups(weight, want, self._group_size)

  def weights(self) -> tuple[jax.Array, jax.Array]:
    """Makes the words wide."""
    return tuple(
        weight.dequantized(self.ops, self._dtype)
        for weight in (self.gate_up, self.down)
    )

  def __call__(
      self,
      x: jax.Array,
      route: router_lib.Route,
      tap: tap_lib.Tap = tap_lib.SILENT,
  ) -> jax.Array:
    """Runs [token, embed] through the route's experts: [token, embed]."""
    out = super().__call__(x, route, tap)
    routed = route.ids < self.gate_up.num_experts
    sizes = jnp.asarray([self.gate_up.n, self.down.n], jnp.int32)
    tap("packed_elements", jnp.where(routed[..., None], sizes, 0))
    return out


class PackedExperts(nnx.Module):
  """The expert layer of vLLM's Marlin, by `PackedOperations.packed_moe`.

  Which routes share a block decides bits, so a token's bits may depend on the
  others of its step. Padding takes no part: it is left out before routes are
  counted, as a server that knows no padding would have it.
  """

  def __init__(
      self,
      params: Mapping,
      contract: packed_moe.PackedDecoderContract,
      layer: int,
      operations: ops_lib.PackedOperations,
  ):
    """See `build`."""
    del layer  # vLLM's combine is in slot order in every layer.
    self.gate_up, self.down = _weights(params)
    self.contract = contract.experts
    self.ops = operations
    for weight, gemm in (
        (self.gate_up, self.contract.w13), (self.down, self.contract.w2)
    ):
      _check_tiles(weight, gemm)
      _check_groups(weight, gemm.group_size, gemm.group_size)
    # What the layer's backend reads in every step, made once.
    self.operands = nnx.Variable(tuple(
        weight.held(operations, self.contract.dtype)
        for weight in (self.gate_up, self.down)
    ))

  def __call__(
      self,
      x: jax.Array,
      route: router_lib.Route,
      tap: tap_lib.Tap = tap_lib.SILENT,
  ) -> jax.Array:
    """Runs [token, embed] through the route's experts: [token, embed].

    On the host, since the plan depends on the routes.

    Raises:
      ValueError: x or the gates have another dtype than the contract, or all
        tokens are padding.
    """
    ids, gates = np.asarray(route.ids), np.asarray(route.gates)
    tokens, top_k = ids.shape
    experts = self.gate_up.num_experts
    valid = (ids < experts).all(axis=1)
    if not valid.any():
      raise ValueError(f"none of {tokens} tokens is routed to an expert.")
    blocks = alignment.route_blocks(
        ids[valid], experts,
        alignment.block_rows_for(valid.sum() * top_k, experts),
    )
    w13, w2 = self.operands.get_value()
    surfaces = self.ops.packed_moe(
        np.asarray(x)[valid], gates[valid], w13, w2, blocks, self.contract
    )

    def shown(name, rows, *inner):
      rows = np.asarray(rows)
      out = np.zeros((tokens, *inner, rows.shape[-1]), rows.dtype)
      out[valid] = rows.reshape(-1, *inner, rows.shape[-1])
      return tap(name, jnp.asarray(out))

    shown("gate_up", surfaces.w13, top_k)
    shown("activation", surfaces.activation, top_k)
    shown("terms", surfaces.routed_w2, top_k)
    elements = np.zeros((blocks.num_routes, 2), np.int32)
    for block in range(blocks.num_blocks):
      elements[blocks.routes(block)] = (
          surfaces.w13.shape[-1], surfaces.routed_w2.shape[-1]
      )
    shown("packed_elements", elements, top_k)
    return shown("combine", surfaces.final)


def summary(layers: Mapping[int, nnx.Module]) -> dict:
  """Returns which layers hold packed experts, as JSON values.

  Args:
    layers: {index: the experts of that layer}.

  Returns:
    {"layers.N": {"module", "gate_up", "down"}} of the packed ones; of each
    weight its sizes, bytes and the digest of its words.
  """
  return {
      f"layers.{index}": {
          "module": type(module).__name__,
          **{name: getattr(module, name).summary() for name in _GEMMS},
      }
      for index, module in layers.items()
      if isinstance(module, (DequantizedExperts, PackedExperts))
  }


def _weights(params: Mapping) -> tuple:
  gate_up, down = (
      packed_weight.PackedWeight(params[name], name) for name in _GEMMS
  )
  if (
      gate_up.num_experts != down.num_experts
      or (gate_up.k, gate_up.n) != (down.n, 2 * down.k)
  ):
    raise ValueError(
        f"gate_up of {gate_up.num_experts} experts, k={gate_up.k},"
        f" n={gate_up.n} and down of {down.num_experts}, k={down.k},"
        f" n={down.n} are no experts of one layer."
    )
  return gate_up, down


def _check_groups(weight, want: int, said: int) -> None:
  if weight.group_size != want:
    raise ValueError(
        f"{weight.name} has groups of {weight.group_size} inputs (k="
        f"{weight.k}), the contract has group_size={said}."
    )


def _check_tiles(weight, gemm: packed_gemm.PackedGemmContract) -> None:
  faults = [
      f"{axis}={size} is no multiple of {name}={getattr(gemm, name)}"
      for axis, size, name in (
          ("k", weight.k, "thread_k"),
          ("n", weight.n, "thread_n"),
          ("k", weight.k, "group_size"),
      )
      if size % getattr(gemm, name)
  ]
  if faults:
    raise refusal.UnsupportedError(
        f"{weight.name} does not fall into the tiles of {gemm.name}"
        f" ({document.digest(gemm)[:12]}): {'; '.join(faults)}."
    )
