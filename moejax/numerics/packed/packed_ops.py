"""The operation set of a decoder contract with packed experts.

Layer: numerics. Protocol: contracts/ops.py, PackedOperations.
"""

from moejax.contracts import ops
from moejax.contracts import packed_moe
from moejax.numerics import reference_ops
from moejax.numerics.packed import awq_twin
from moejax.numerics.packed import oracle
from moejax.numerics.portable import certificate as certificate_lib


def operations(
    contract: packed_moe.PackedDecoderContract,
    certificate: certificate_lib.Certificate | None = None,
) -> ops.PackedOperations:
  """Returns the operations that execute a contract.

  Those of the decoder are `reference_ops`; weights are made wide in JAX, and
  the packed layer is the NumPy oracle's.

  Args:
    contract: Of the whole decoder.
    certificate: As in `reference_ops.operations`.
  """
  return _Packed(reference_ops.operations(contract.decoder, certificate))


class _Packed:
  """The decoder's operations and the two of packed experts."""

  dequantize = staticmethod(awq_twin.dequantize)
  packed_moe = staticmethod(oracle.packed_moe_oracle)

  def __init__(self, decoder: ops.Operations):
    self._decoder = decoder

  def __getattr__(self, name: str):
    # Asked only for what is not here; copies ask before there is a decoder.
    if name == "_decoder":
      raise AttributeError(name)
    return getattr(self._decoder, name)
