"""Random packed expert layers and requests, made from a seed.

A fixture is an argument of a proof, so it is a function of its numbers alone:
the same seed gives the same codes, activations and routes on every machine.

Layer: protocols.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from moejax.numerics import formats
from moejax.numerics.packed import awq_format


@dataclasses.dataclass(frozen=True, slots=True)
class LayerShape:
  """The sizes of an expert layer.

  Attributes:
    experts: Number of experts.
    embed: H, width of a token.
    hidden: I, width of the activation; W13 has 2 I columns.
    group_size: Rows that share a scale and a zero point.
  """

  experts: int = 128
  embed: int = 2048
  hidden: int = 768
  group_size: int = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
  """What enters a layer: activations and routes.

  Attributes:
    x: [token, H] in a 16-bit dtype.
    expert_ids: [token, slot] int64, distinct within a token.
    gates: [token, slot] float32, each token's sum to about one.
  """

  x: np.ndarray
  expert_ids: np.ndarray
  gates: np.ndarray


def layer(
    seed: int, shape: LayerShape, dtype: str
) -> tuple[
    Sequence[awq_format.PackedOperand], Sequence[awq_format.PackedOperand]
]:
  """Returns the W13 and the W2 operands of all experts.

  Codes and zero points are uniform. Scales are 0.002 to 0.02; a few are far
  smaller, negative or zero, as a kernel may not rely on a checkpoint's habits.
  """

  def operand(expert: int, gemm: int, k: int, n: int):
    rng = np.random.default_rng([seed, expert, gemm])
    groups = k // shape.group_size
    scales = rng.uniform(0.002, 0.02, (groups, n))
    odd = rng.random((groups, n))
    scales = np.where(odd < 0.02, -scales, scales)
    scales = np.where(odd > 0.98, scales * 2.0**-12, scales)
    scales = np.where(odd > 0.99, 0.0, scales)
    return awq_format.PackedOperand(
        _nibbles(rng, k, n), _nibbles(rng, groups, n),
        scales.astype(np.float32).astype(formats.of(dtype).numpy),
    )

  sizes = ((shape.embed, 2 * shape.hidden), (shape.hidden, shape.embed))
  w13, w2 = (
      [operand(e, g, *size) for e in range(shape.experts)]
      for g, size in enumerate(sizes)
  )
  return w13, w2


def request(
    seed: int, tokens: int, top_k: int, shape: LayerShape, dtype: str
) -> Request:
  """Returns random activations and a skewed routing.

  Tokens differ in size by up to 2**8, and one value in twenty is exactly zero.
  An expert's popularity falls with its place in a random order, so that some
  experts fill several blocks and most none.
  """
  rng = np.random.default_rng([seed, tokens, top_k])
  x = rng.standard_normal((tokens, shape.embed))
  x = x * 2.0 ** rng.integers(-6, 3, (tokens, 1))
  x = np.where(rng.random(x.shape) < 0.05, 0.0, x)
  skew = rng.uniform(0.3, 1.5)
  popularity = -skew * np.log(1 + rng.permutation(shape.experts))
  noisy = popularity + rng.gumbel(size=(tokens, shape.experts))
  expert_ids = np.argsort(-noisy, axis=1, kind="stable")[:, :top_k]
  gates = rng.random((tokens, top_k)) + 0.05
  gates = gates / gates.sum(axis=1, keepdims=True)
  return Request(
      x.astype(np.float32).astype(formats.of(dtype).numpy),
      expert_ids.astype(np.int64),
      gates.astype(np.float32),
  )


def _nibbles(rng: np.random.Generator, *shape: int) -> np.ndarray:
  return rng.integers(0, 256, shape, np.uint8) >> 4
