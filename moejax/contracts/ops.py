"""The operations a decoder needs, as one protocol.

A module never calls `jnp` for arithmetic: it calls the set of operations it
was given. So one decoder runs in native, portable or contract arithmetic, and
a kernel takes the place of an operation without a change to any module. Each
method is *one* operation of the model's graph with *one* rounding, to the
dtype of its first operand unless a dtype is named.

Layer: contracts. Imports contracts.
"""

from typing import Any, Protocol

from moejax.contracts import combine
from moejax.contracts import packed_moe

Array = Any


class Operations(Protocol):
  """The operation set. `site` names a reduction (`reduction.SITES`)."""

  def cast(self, x: Array, dtype: str) -> Array:
    """Rounds x to dtype, to nearest even."""

  def add(self, x: Array, y: Array) -> Array:
    """x + y."""

  def add_scalar(self, x: Array, c: float) -> Array:
    """x + c, where c is not rounded first."""

  def multiply(self, x: Array, y: Array) -> Array:
    """x * y."""

  def scale(self, x: Array, c: float) -> Array:
    """x * c, where c is not rounded first."""

  def divide(self, x: Array, y: Array) -> Array:
    """x / y."""

  def power(self, base: float, x: Array) -> Array:
    """base ** x."""

  def rsqrt(self, x: Array) -> Array:
    """1 / sqrt(x)."""

  def exp(self, x: Array) -> Array:
    """exp(x)."""

  def cos(self, x: Array) -> Array:
    """cos(x), x in radians."""

  def sin(self, x: Array) -> Array:
    """sin(x), x in radians."""

  def silu(self, x: Array) -> Array:
    """x / (1 + exp(-x))."""

  def sigmoid(self, x: Array) -> Array:
    """1 / (1 + exp(-x))."""

  def softplus(self, x: Array) -> Array:
    """log(1 + exp(x))."""

  def sqrt(self, x: Array) -> Array:
    """sqrt(x)."""

  def simulate_quantization(
      self, x: Array, code_format: str, block: int
  ) -> Array:
    """Quantises blocks of the last axis and makes them wide again.

    R(q * scale) as `numerics/quantization_simulation.py` defines it, for the
    formats "e4m3" and "e2m1".
    """

  def mean(self, x: Array, site: str) -> Array:
    """Mean over the last axis, which is kept with length one."""

  def sum(self, x: Array, site: str) -> Array:
    """Sum over the last axis, which is kept with length one."""

  def softmax(self, x: Array, site: str) -> Array:
    """exp(x - max) / sum(exp(x - max)) over the last axis."""

  def sinkhorn(
      self, x: Array, iterations: int, epsilon: float, site: str
  ) -> Array:
    """Normalises square matrices: columns, then (rows, columns) in turn.

    One round is three operations: s = R(sum along the axis), t = R(s +
    epsilon), x = R(x / t). [..., n, n] to [..., 2 * iterations - 1, n, n]:
    the matrix after every round.
    """

  def linear(self, x: Array, weight: Array, site: str) -> Array:
    """[..., k] times [n, k] transposed: [..., n]."""

  def matmul(self, a: Array, b: Array, site: str) -> Array:
    """[..., m, k] times [..., k, n]: [..., m, n]."""

  def expert_linear(
      self, rows: Array, weight: Array, expert_of_row: Array, site: str
  ) -> Array:
    """rows [route, k] times weight[expert_of_row] [n, k]: [route, n].

    A row whose expert id is num_experts belongs to no expert and becomes zero.
    """

  def gate_terms(
      self,
      expert_out: Array,
      gate: Array,
      contract: combine.CombineContract,
  ) -> Array:
    """R_operand(R_FP32(R_gate(gate) * expert_out)): [token, slot, embed]."""

  def combine(
      self,
      terms: Array,
      expert_ids: Array,
      contract: combine.CombineContract,
      layer: int,
  ) -> Array:
    """Adds the terms [token, slot, embed] into [token, embed].

    The terms come from `gate_terms`; what is left of the contract is the
    order, the accumulator and the output rounding. `expert_ids` [token, slot]
    fixes the order where the contract adds by expert.
    """


class PackedOperations(Operations, Protocol):
  """What a decoder needs beside, if its experts are packed."""

  def dequantize(
      self, qweight: Array, qzeros: Array, scales: Array, dtype: str
  ) -> Array:
    """R((code - zero) * R(scale)) of AWQ tensors: [expert, n, k].

    Args:
      qweight: [expert, k, n / 8] int32.
      qzeros: [expert, group, n / 8] int32.
      scales: [expert, group, n] in a 16-bit dtype.
      dtype: Of the result, 16-bit.
    """

  def hold_packed(
      self, qweight: Array, qzeros: Array, scales: Array, dtype: str
  ) -> Any:
    """What `packed_moe` keeps of a weight from step to step: arrays in a tree.

    The arguments are those of `dequantize`; dtype is the contract's.
    """

  def packed_moe(
      self,
      x: Array,
      gates: Array,
      w13: Any,
      w2: Any,
      blocks: Any,
      contract: packed_moe.PackedMoeContract,
  ) -> Any:
    """The four surfaces of a packed expert layer, by route id.

    Weights are those of all experts, from `hold_packed`. The other arguments
    and the result are those of `numerics.packed.oracle`.
    """


class PackedLayer(Protocol):
  """Who runs a packed expert layer: the oracle, or kernels from above.

  Attributes:
    name: For reports.
  """

  name: str

  def hold(
      self, qweight: Array, qzeros: Array, scales: Array, dtype: str
  ) -> Any:
    """See `PackedOperations.hold_packed`."""

  def surfaces(
      self,
      x: Array,
      gates: Array,
      w13: Any,
      w2: Any,
      blocks: Any,
      contract: packed_moe.PackedMoeContract,
  ) -> Any:
    """See `PackedOperations.packed_moe`."""


class TrainingOperations(Operations, Protocol):
  """What a decoder needs beside, if its routed MLPs are one operation each."""

  def moe_mlp(
      self,
      x: Array,
      gates: Array,
      gate_up: Array,
      down: Array,
      expert_ids: Array,
      limit: float | None,
  ) -> Array:
    """The routed experts of [token, embed], gated and added: the same shape.

    Args:
      x: [token, embed].
      gates: [token, slot].
      gate_up: [expert, 2 * expert_hidden, embed], the gate rows first.
      down: [expert, embed, expert_hidden].
      expert_ids: [token, slot] int32; num_experts is no expert.
      limit: Bound on gate (above) and up (both sides); None means none.
    """
