"""Do packed tensors mean the weights that they were made from?

A file whose nibbles lie in another order, or whose zero points follow another
convention, loads without an error and means other weights. With the original
at hand it shows: rounded to nearest, no weight lies further than about one
step of its scale from the original. Under a wrong reading most do. So each
known fault (`awq_format.READINGS`) is tried, and so is every order of the
eight nibbles, by asking for each nibble which column it holds.

This holds for round-to-nearest packings alone. A search that rescales weights
before it rounds them leaves other weights, and then nothing explains them.

Layer: torch_bridge. Needs no torch.
"""

from typing import NamedTuple

import numpy as np

from moejax.contracts import refusal
from moejax.numerics.packed import awq_format

# Half a step of rounding, and where codes are clipped up to half a step more;
# the rest is for the rounding of the scale to 16 bits.
MAX_STEPS = 1.25


class Reading(NamedTuple):
  """How far the weights under a reading lie from the original.

  Attributes:
    name: One of `awq_format.READINGS`.
    beyond: Weights further than MAX_STEPS scales away.
    worst: The largest distance.
  """

  name: str
  beyond: int
  worst: float


def readings(
    qweight: np.ndarray,
    qzeros: np.ndarray,
    scales: np.ndarray,
    original: np.ndarray,
) -> tuple[Reading, ...]:
  """Returns the table of fault signatures, the right reading first.

  Args:
    qweight: [k, n / 8] int32.
    qzeros: [group, n / 8] int32.
    scales: [group, n].
    original: [k, n], input-major.
  """
  wide = original.astype(np.float32)
  allowed = _allowed(scales, len(wide))
  found = []
  for name in awq_format.READINGS:
    values = awq_format.read_as(qweight, qzeros, scales, name)
    distance = np.abs(values - wide)
    found.append(
        Reading(name, int((distance > allowed).sum()), float(distance.max()))
    )
  return tuple(found)


def nibble_order(
    qweight: np.ndarray,
    qzeros: np.ndarray,
    scales: np.ndarray,
    original: np.ndarray,
) -> tuple[int, ...] | None:
  """Returns which column each nibble holds, or None if no order explains it.

  Entry i is the column, of a word's eight, that nibble i holds, in qweight and
  in qzeros alike. The arguments are those of `readings`.
  """
  natural = tuple(range(8))
  k, words = qweight.shape
  groups = len(scales)
  codes = awq_format.unpack(qweight, natural).reshape(k, words, 8)
  zeros = awq_format.unpack(qzeros, natural).reshape(groups, words, 8)
  zeros = np.repeat(zeros, k // groups, axis=0)
  steps = codes.astype(np.float32) - zeros.astype(np.float32)
  scale = np.repeat(scales.astype(np.float32), k // groups, axis=0)
  scale = scale.reshape(k, words, 8)
  wide = original.astype(np.float32).reshape(k, words, 8)
  allowed = _allowed(scales, k).reshape(k, words, 8)
  beyond = np.empty((8, 8), np.int64)
  for nibble in range(8):
    values = steps[..., nibble, None] * scale
    beyond[nibble] = (np.abs(values - wide) > allowed).sum(axis=(0, 1))
  order = tuple(map(int, beyond.argmin(axis=1)))
  if sorted(order) != list(natural) or beyond.min(axis=1).any():
    return None
  return order


def check(
    module: str,
    qweight: np.ndarray,
    qzeros: np.ndarray,
    scales: np.ndarray,
    original: np.ndarray,
) -> None:
  """Refuses tensors that do not mean the original, and says what they mean.

  Raises:
    refusal.HarnessError: a weight is further than MAX_STEPS scales from the
      original; the message has the table of fault signatures and the order of
      nibbles or the reading under which none is.
  """
  table = readings(qweight, qzeros, scales, original)
  if not table[0].beyond:
    return
  order = nibble_order(qweight, qzeros, scales, original)
  fitting = [r.name for r in table if not r.beyond]
  if order is not None:
    cause = f"nibbles hold columns {order}, want {awq_format.ORDER}"
  elif fitting:
    cause = f"the reading {' or '.join(fitting)} explains them"
  else:
    cause = "no known fault explains them"
  signatures = ", ".join(
      f"{r.name} {r.beyond} (worst {r.worst:.4g})" for r in table
  )
  raise refusal.HarnessError(
      f"{module}.qweight: {table[0].beyond} of {original.size} weights lie"
      f" further than {MAX_STEPS} scales from the original, want none; {cause}."
      f" Weights beyond under each reading: {signatures}."
  )


def _allowed(scales: np.ndarray, k: int) -> np.ndarray:
  steps = np.abs(scales.astype(np.float32)) * np.float32(MAX_STEPS)
  return np.repeat(steps, k // len(scales), axis=0)
