"""The operation set of a decoder contract.

Every reduction goes to the arithmetic that the contract declares for its site;
what reduces nothing goes to the contract's elementwise arithmetic. So one
decoder can, for example, run natively but for its norms.

Layer: numerics. Protocol: contracts/ops.py.
"""

import dataclasses

from moejax.contracts import decoder
from moejax.contracts import ops
from moejax.numerics import expert_rows
from moejax.numerics import native_ops
from moejax.numerics.portable import certificate as certificate_lib
from moejax.numerics.portable import portable_ops
from moejax.numerics import sequential_ops


def operations(
    contract: decoder.DecoderContract,
    certificate: certificate_lib.Certificate | None = None,
) -> ops.Operations:
  """Returns the operations that execute a contract.

  Args:
    contract: Which arithmetic serves which site.
    certificate: Collects what portable operations did, if there are any.
  """
  chains = {
      field.name: getattr(contract.reductions, field.name).chain
      for field in dataclasses.fields(contract.reductions)
  }
  kinds = {contract.elementwise, *chains.values()}
  if kinds == {"native"}:
    return native_ops.NativeOperations()
  portable = portable_ops.PortableOperations(certificate)
  if kinds == {"portable"}:
    return portable
  sets = {
      "native": native_ops.NativeOperations(),
      "portable": portable,
      "sequential": sequential_ops.SequentialReductions(portable),
  }
  return _BySite(
      contract.name,
      sets[contract.elementwise],
      {site: sets[chain] for site, chain in chains.items()},
  )


class _BySite:
  """Sends each reduction to the set of its site."""

  def __init__(self, name, elementwise, sites):
    self.name = name
    self._elementwise = elementwise
    self._sites = sites
    for method in (
        "cast",
        "add",
        "add_scalar",
        "multiply",
        "scale",
        "divide",
        "power",
        "rsqrt",
        "exp",
        "cos",
        "sin",
        "silu",
        "sigmoid",
        "softplus",
        "sqrt",
        "simulate_quantization",
    ):
      setattr(self, method, getattr(elementwise, method))
    # The combine has a contract of its own and runs as that says.
    native = native_ops.NativeOperations()
    self.gate_terms = native.gate_terms
    self.combine = native.combine

  def mean(self, x, site):
    return self._sites[site].mean(x, site)

  def sum(self, x, site):
    return self._sites[site].sum(x, site)

  def softmax(self, x, site):
    return self._sites[site].softmax(x, site)

  def sinkhorn(self, x, iterations, epsilon, site):
    return self._sites[site].sinkhorn(x, iterations, epsilon, site)

  def linear(self, x, weight, site):
    return self._sites[site].linear(x, weight, site)

  def matmul(self, a, b, site):
    return self._sites[site].matmul(a, b, site)

  def expert_linear(self, rows, weight, expert_of_row, site):
    return expert_rows.per_expert(
        lambda x, w: self.linear(x, w, site), rows, weight, expert_of_row
    )
