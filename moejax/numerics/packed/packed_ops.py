"""The operation set of a decoder contract with packed experts.

The packed layer is plugged in: by default it is the NumPy oracle's, and kernels
take its place from above (`contracts.ops.PackedLayer`).

Layer: numerics. Protocol: contracts/ops.py, PackedOperations.
"""

from typing import Any

import jax
import numpy as np

from moejax.contracts import ops
from moejax.contracts import packed_moe
from moejax.numerics import reference_ops
from moejax.numerics.packed import alignment
from moejax.numerics.packed import awq_format
from moejax.numerics.packed import awq_twin
from moejax.numerics.packed import oracle
from moejax.numerics.portable import bound_ops
from moejax.numerics.portable import certificate as certificate_lib


class OracleLayer:
  """The NumPy oracle. It keeps the words as they are, and copies nothing."""

  name = "oracle"

  def hold(self, qweight, qzeros, scales, dtype) -> tuple[jax.Array, ...]:
    """Returns the three arrays."""
    del dtype
    return qweight, qzeros, scales

  def surfaces(self, x, gates, w13, w2, blocks, contract) -> oracle.Surfaces:
    """Unpacks the experts that have a route, and runs the oracle."""
    experts, local = np.unique(blocks.block_experts, return_inverse=True)
    # Local ids in ascending order leave every block where it was.
    blocks = alignment.RouteBlocks(
        blocks.sorted_routes, local.astype(np.int32), blocks.num_routes
    )
    weights = (_unpacked(held, experts) for held in (w13, w2))
    return oracle.packed_moe_oracle(x, gates, *weights, blocks, contract)


class _NoRoom:
  """Error bounds: the layer has a contract, which leaves no room at all."""

  name = "bounds"
  hold = OracleLayer.hold

  def surfaces(self, x, gates, w13, w2, blocks, contract) -> oracle.Surfaces:
    """Returns zeros of the surfaces' shapes."""
    del w2, contract
    routes, both = blocks.num_routes, 8 * w13[0].shape[-1]
    return oracle.Surfaces(*(
        np.zeros(shape)
        for shape in (
            (routes, both), (routes, both // 2), (routes, x.shape[-1]),
            (len(gates), x.shape[-1]),
        )
    ))


def operations(
    contract: packed_moe.PackedDecoderContract,
    certificate: certificate_lib.Certificate | None = None,
    layer: ops.PackedLayer = OracleLayer(),
) -> ops.PackedOperations:
  """Returns the operations that execute a contract.

  Those of the decoder are `reference_ops`; weights are made wide in JAX.

  Args:
    contract: Of the whole decoder.
    certificate: As in `reference_ops.operations`.
    layer: Runs the packed layer.
  """
  decoder = reference_ops.operations(contract.decoder, certificate)
  return _Packed(decoder, layer)


def bounds() -> ops.PackedOperations:
  """Returns `bound_ops` for a decoder whose experts are packed."""
  return _Packed(bound_ops.BoundOperations(), _NoRoom())


class _Packed:
  """The decoder's operations and those of packed experts.

  Attributes:
    packed_gemms: How many GEMMs took their weights from packed words so far.
  """

  def __init__(self, decoder: ops.Operations, layer: ops.PackedLayer):
    self._decoder = decoder
    self._layer = layer
    self.packed_gemms = 0
    self.hold_packed = layer.hold

  def dequantize(self, *args: Any) -> jax.Array:
    """Makes the words of one GEMM wide."""
    self.packed_gemms += 1
    return awq_twin.dequantize(*args)

  def packed_moe(self, *args: Any) -> oracle.Surfaces:
    """Runs the two GEMMs of a layer from words."""
    self.packed_gemms += 2
    return self._layer.surfaces(*args)

  def __getattr__(self, name: str):
    # Asked only for what is not here; copies ask before there is a decoder.
    if name == "_decoder":
      raise AttributeError(name)
    return getattr(self._decoder, name)


def _unpacked(held, experts) -> list[awq_format.PackedOperand]:
  """The operands of some experts, one code an entry, on the host."""
  words, zeros, scales = map(np.asarray, held)
  rows = words.shape[1] // zeros.shape[1]
  return [
      awq_format.from_checkpoint(words[e], zeros[e], scales[e], rows)
      for e in experts
  ]
