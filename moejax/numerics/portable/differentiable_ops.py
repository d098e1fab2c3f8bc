"""Portable operations with the gradients of a backward contract.

Every operation runs forward as in `portable_ops.py` and brings the rule that
contracts/gradients/backward.py states for it, made of portable operations with
one rounding each. JAX adds no cotangents here: a value with several uses is
shared by `moves.share`, whose rule adds in the declared order. (Its own
addition on a CPU would flush subnormals.)

Layer: numerics. Protocol: contracts/ops.py.
"""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts.gradients import backward as backward_contract
from moejax.numerics import expert_rows
from moejax.numerics.portable import certificate as certificate_lib
from moejax.numerics.portable import declared_gradients
from moejax.numerics.portable import gradient_ops
from moejax.numerics.portable import with_gradients


def _refusing(name):
  def method(self, *args):
    with_gradients.refuse(name, args)
    return getattr(self.plain, name)(*args)

  return method


class DifferentiableOperations:
  """Implements `ops.Operations` and `declared_moves.Moves` with gradients.

  Attributes:
    plain: The same operations without gradients; rules are made of them.
    moves: The moves.
  """

  name = "portable"

  def __init__(
      self,
      contract: backward_contract.BackwardContract,
      certificate: certificate_lib.Certificate | None = None,
      padding_token: int | None = None,
  ):
    """Builds the set.

    Args:
      contract: The backward graph.
      certificate: Collects what the operations did, both ways.
      padding_token: Token whose row of the embedding table has no gradient.
    """
    self.contract = contract
    self.plain = gradient_ops.PortableGradientOps(certificate)
    self.certificate = self.plain.certificate
    self.moves = declared_gradients.DeclaredMoves(
        self.plain, contract, padding_token
    )

  def cast(self, x, dtype):
    if x.dtype == dtype:
      return x
    return with_gradients.run(
        lambda x: self.plain.cast(x, dtype), self.cast_back, (x,)
    )

  def cast_back(self, g, operands, result, needed):
    return (self.plain.cast(g, operands[0].dtype.name),)

  def add(self, x, y):
    return with_gradients.run(self.plain.add, self.add_back, (x, y))

  def add_back(self, g, operands, result, needed):
    return [
        self.plain.sum_to(g, x.shape) if wanted else None
        for x, wanted in zip(operands, needed, strict=True)
    ]

  def add_scalar(self, x, c):
    return with_gradients.run(
        lambda x: self.plain.add_scalar(x, c), lambda g, *_: (g,), (x,)
    )

  def multiply(self, x, y):
    if x is y:
      return self.square(x)
    return with_gradients.run(self.plain.multiply, self.multiply_back, (x, y))

  def multiply_back(self, g, operands, result, needed):
    x, y = operands
    return (
        self.times_to(g, y, x.shape) if needed[0] else None,
        self.times_to(g, x, y.shape) if needed[1] else None,
    )

  def times_to(self, g, factor, shape):
    return self.plain.sum_to(self.plain.multiply(g, factor), shape)

  def square(self, x):
    """A product of a value with itself is one use of it."""
    return with_gradients.run(
        lambda x: self.plain.multiply(x, x), self.square_back, (x,)
    )

  def square_back(self, g, operands, result, needed):
    return (self.plain.multiply(g, self.plain.scale(operands[0], 2.0)),)

  def scale(self, x, c):
    return with_gradients.run(
        lambda x: self.plain.scale(x, c),
        lambda g, *_: (self.plain.scale(g, c),),
        (x,),
    )

  def divide(self, x, y):
    return with_gradients.run(self.plain.divide, self.divide_back, (x, y))

  def divide_back(self, g, operands, result, needed):
    plain, (x, y) = self.plain, operands
    by_x = by_y = None
    if needed[0]:
      by_x = plain.sum_to(plain.divide(g, y), x.shape)
    if needed[1]:
      rest = plain.divide(plain.divide(x, y), y)
      by_y = plain.sum_to(plain.multiply(plain.negate(g), rest), y.shape)
    return by_x, by_y

  def rsqrt(self, x):
    return with_gradients.run(self.plain.rsqrt, self.rsqrt_back, (x,))

  def rsqrt_back(self, g, operands, result, needed):
    half = self.plain.scale(g, -0.5)
    return (self.plain.multiply(half, self.plain.cube(result)),)

  def silu(self, x):
    return with_gradients.run(self.plain.silu, self.silu_back, (x,))

  def silu_back(self, g, operands, result, needed):
    return (self.plain.silu_backward(g, operands[0]),)

  def mean(self, x, site):
    return with_gradients.run(
        lambda x: self.plain.mean(x, site), self.mean_back, (x,)
    )

  def mean_back(self, g, operands, result, needed):
    shape = operands[0].shape
    return (self.plain.divide(_spread(g, shape), jnp.float64(shape[-1])),)

  def sum(self, x, site):
    return with_gradients.run(
        lambda x: self.plain.sum(x, site),
        lambda g, operands, *_: (_spread(g, operands[0].shape),),
        (x,),
    )

  def softmax(self, x, site):
    return with_gradients.run(
        lambda x: self.plain.softmax(x, site), self.softmax_back, (x,)
    )

  def softmax_back(self, g, operands, result, needed):
    return (self.plain.softmax_backward(g, result),)

  def log_softmax(self, x):
    return with_gradients.run(
        self.plain.log_softmax, self.log_softmax_back, (x,)
    )

  def log_softmax_back(self, g, operands, result, needed):
    return (self.plain.log_softmax_backward(g, result),)

  def nll_loss(self, x, targets):
    """Minus the mean of x [row, class] at the targets [row] that are >= 0."""
    return with_gradients.run(
        lambda x: self.plain.nll_loss(x, targets),
        lambda g, operands, *_: (
            self.plain.nll_loss_backward(g, operands[0].shape, targets),
        ),
        (x,),
    )

  def linear(self, x, weight, site):
    def back(g, operands, result, needed):
      x, weight = operands
      rows = g.reshape(-1, g.shape[-1])
      flat = x.reshape(-1, x.shape[-1])
      return (
          self.plain.matmul(g, weight, site) if needed[0] else None,
          self.plain.matmul(rows.T, flat, site) if needed[1] else None,
      )

    return with_gradients.run(
        lambda x, w: self.plain.linear(x, w, site), back, (x, weight)
    )

  def matmul(self, a, b, site):
    def back(g, operands, result, needed):
      a, b = operands
      by_a = by_b = None
      if needed[0]:
        by_a = self.plain.matmul(g, jnp.swapaxes(b, -1, -2), site)
        by_a = self.plain.sum_to(by_a, a.shape)
      if needed[1]:
        by_b = self.plain.matmul(jnp.swapaxes(a, -1, -2), g, site)
        by_b = self.plain.sum_to(by_b, b.shape)
      return by_a, by_b

    return with_gradients.run(
        lambda a, b: self.plain.matmul(a, b, site), back, (a, b)
    )

  def expert_linear(self, rows, weight, expert_of_row, site):
    ids = np.asarray(expert_of_row)

    def back(g, operands, result, needed):
      rows, weight = operands
      turned = jnp.swapaxes(weight, -1, -2)
      return (
          self.plain.expert_linear(g, turned, ids, site) if needed[0] else None,
          self.expert_weight_back(g, rows, ids, weight) if needed[1] else None,
      )

    return with_gradients.run(
        lambda rows, weight: self.plain.expert_linear(rows, weight, ids, site),
        back,
        (rows, weight),
    )

  def expert_weight_back(self, g, rows, ids, weight):
    plain, kept = self.plain, ids < weight.shape[0]
    start = jnp.zeros(weight.shape, weight.dtype)
    if self.contract.expert_weight == "rows_in_turn":
      each = plain.multiply(g[:, :, None], rows[:, None, :])
      return plain.add_rows(start, ids[kept], np.asarray(each)[kept])
    out = expert_rows.weight_per_expert(
        lambda a, b: plain.matmul(a.T, b, "expert_gemm"),
        g,
        rows,
        ids,
        weight.shape[0],
    )
    if (
        self.contract.dispatch == "falling_experts"
        and len(np.unique(ids[kept])) > 1
    ):
      # One buffer an expert, zero elsewhere, and all of them added up.
      out = plain.add_scalar(out, 0.0)
    return out

  def gate_terms(self, expert_out, gate, contract):
    if contract.gate_site != "after_down":
      with_gradients.refuse(f"gate_site={contract.gate_site!r}", (gate,))
    return with_gradients.run(
        lambda e, g: self.plain.gate_terms(e, g, contract),
        self.gate_terms_back,
        (expert_out, gate),
    )

  def gate_terms_back(self, g, operands, result, needed):
    expert_out, gate = operands
    by_gate = self.times_to(g, expert_out, (*gate.shape, 1)).reshape(gate.shape)
    if self.contract.gate_from_zero:
      by_gate = self.plain.add_scalar(by_gate, 0.0)
    return self.plain.multiply(g, gate[..., None]), by_gate

  def combine(self, terms, expert_ids, contract, layer):
    return with_gradients.run(
        lambda t: self.plain.combine(t, expert_ids, contract, layer),
        lambda g, operands, *_: (_spread(g[:, None], operands[0].shape),),
        (terms,),
    )

  power = _refusing("power")
  exp = _refusing("exp")
  cos = _refusing("cos")
  sin = _refusing("sin")
  sigmoid = _refusing("sigmoid")
  softplus = _refusing("softplus")
  sqrt = _refusing("sqrt")
  sinkhorn = _refusing("sinkhorn")
  simulate_quantization = _refusing("simulate_quantization")


def _spread(x, shape):
  """Repeats values by their bits: XLA on a CPU flushes bfloat16 subnormals."""
  return jnp.asarray(np.broadcast_to(np.asarray(x), shape))


def loss(
    operations: DifferentiableOperations, logits: jax.Array, tokens: np.ndarray
) -> jax.Array:
  """Next-token cross entropy, a float32 scalar in nats.

  The logits become float32; each row's log softmax is one rounding; the mean
  of its values at the next tokens is another. The last row of each sequence
  has no next token.

  Args:
    operations: The arithmetic.
    logits: [batch, token, vocab].
    tokens: [batch, token] ints.
  """
  wide = operations.cast(logits, "float32").reshape(-1, logits.shape[-1])
  targets = np.full(tokens.shape, -1, np.int64)
  targets[:, :-1] = tokens[:, 1:]
  return operations.nll_loss(
      operations.log_softmax(wide), targets.reshape(-1)
  )
