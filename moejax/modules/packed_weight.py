"""The 4-bit weight of one GEMM of all experts, in AWQ's own layout.

Layer: modules. Format: numerics/packed/awq_format.py.
"""

from collections.abc import Mapping

from flax import nnx
import jax
import numpy as np

from moejax.contracts import ops as ops_lib
from moejax.numerics import fingerprint

LEAVES = ("qweight", "qzeros", "scales")


class PackedWeight(nnx.Module):
  """qweight [expert, k, n / 8], qzeros [expert, group, n / 8], scales.

  The words are held as the checkpoint has them; nothing wide is kept.
  """

  def __init__(self, params: Mapping, name: str):
    """Takes the three tensors.

    Args:
      params: {"qweight", "qzeros", "scales"}.
      name: The weight, for errors.

    Raises:
      ValueError: the tensors are others, or do not belong together.
    """
    if set(params) != set(LEAVES):
      raise ValueError(f"{name} holds {sorted(params)}, not {sorted(LEAVES)}.")
    shapes = {leaf: params[leaf].shape for leaf in LEAVES}
    experts, k, words = shapes["qweight"]
    groups = shapes["qzeros"][1]
    want = {
        "qweight": (experts, k, words),
        "qzeros": (experts, groups, words),
        "scales": (experts, groups, 8 * words),
    }
    if shapes != want or not groups or k % groups:
      raise ValueError(
          f"{name}: {shapes} are no AWQ tensors of one weight; k={k} is cut"
          f" into {groups} groups."
      )
    # Not parameters that learn: a gradient of a packed word means nothing.
    self.qweight = nnx.Variable(params["qweight"])
    self.qzeros = nnx.Variable(params["qzeros"])
    self.scales = nnx.Variable(params["scales"])
    self.num_experts, self.k, self.n = experts, k, 8 * words
    self.group_size = k // groups
    self.name = name

  def dequantized(
      self, operations: ops_lib.PackedOperations, dtype: str
  ) -> jax.Array:
    """Returns [expert, n, k], as `PackedOperations.dequantize` makes it."""
    return operations.dequantize(
        self.qweight[...], self.qzeros[...], self.scales[...], dtype
    )

  def held(self, operations: ops_lib.PackedOperations, dtype: str):
    """Returns what `PackedOperations.hold_packed` makes of the words."""
    return operations.hold_packed(
        self.qweight[...], self.qzeros[...], self.scales[...], dtype
    )

  def summary(self) -> dict:
    """Returns the layout as JSON values, and the digest of all its bytes."""
    tensors = {
        leaf: np.asarray(getattr(self, leaf)[...]) for leaf in LEAVES
    }
    return {
        "experts": self.num_experts,
        "k": self.k,
        "n": self.n,
        "group_size": self.group_size,
        "scales": tensors["scales"].dtype.name,
        "bytes": sum(t.nbytes for t in tensors.values()),
        "digest": fingerprint.checkpoint_digest(tensors.items()),
    }
