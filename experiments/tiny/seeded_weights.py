"""Weights drawn from a seed and a name, the same on every machine.

Every weight comes from integers only, so no maths library has a say in it. One
raw 64-bit word of a PCG64 stream gives four 16-bit integers; their sum,
centred, is close to a normal variable; an integer multiplier and a power of two
bring it to its spread; and one rounding to bfloat16 ends it. Each tensor's
stream is seeded by the tensor's name, so the order of drawing changes nothing.

Layer: experiments.
"""

import hashlib
import math

import ml_dtypes
import numpy as np

# The sum of four 16-bit integers has this mean, and a standard deviation of
# about 37837.
_MEAN_SUM = 4 * 65535 // 2
_SHIFT = 22


def draw(
    name: str, shape: tuple[int, ...], seed: int, law: tuple[float, int]
) -> np.ndarray:
  """Draws one tensor of weights.

  A weight is centre + multiplier * (sum - _MEAN_SUM) / 2**_SHIFT, so a
  multiplier of 111 means a standard deviation of about one. As long as the
  numerator stays below 2**24, float32 holds the value exactly and bfloat16
  rounds it once.

  Args:
    name: The tensor's name, which decides its stream.
    shape: The tensor's shape.
    seed: The checkpoint's seed, not negative.
    law: (centre, multiplier) of this kind of tensor.

  Returns:
    The weights, bfloat16[*shape].

  Raises:
    ValueError: a weight of this law could need more than one rounding.
  """
  centre, multiplier = law
  offset = int(centre * 2**_SHIFT)
  if abs(offset) + abs(multiplier) * _MEAN_SUM >= 2**24:
    raise ValueError(f"tensor {name!r}: {law=} leaves the exact range.")
  words = _words(name, math.prod(shape), seed)
  total = np.zeros(words.shape, np.int64)
  for shift in (0, 16, 32, 48):
    total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
  numerator = offset + multiplier * (total - _MEAN_SUM)
  value = numerator.astype(np.float32) * np.float32(2.0**-_SHIFT)
  return value.astype(ml_dtypes.bfloat16).reshape(shape)


def draw_choices(
    name: str, rows: int, chosen: int, choices: int, seed: int
) -> np.ndarray:
  """Draws rows of distinct indices, in random order.

  Args:
    name: The tensor's name, which decides its stream.
    rows: How many rows.
    chosen: Indices in a row, at most `choices`.
    choices: Every index is below this.
    seed: The checkpoint's seed, not negative.

  Returns:
    The indices, int64[rows, chosen].

  Raises:
    ValueError: more are chosen than there are choices.
  """
  if chosen > choices:
    raise ValueError(f"tensor {name!r}: {chosen=} of {choices=} are distinct.")
  words = _words(name, rows * choices, seed).reshape(rows, choices)
  orders = np.argsort(words, axis=1, kind="stable")
  return np.ascontiguousarray(orders[:, :chosen], np.int64)


def _words(name: str, count: int, seed: int) -> np.ndarray:
  """Returns uint64[count] of the stream of a name."""
  key = int.from_bytes(hashlib.sha256(name.encode()).digest(), "big")
  # The raw stream is taken, not Generator.integers: NumPy promises never to
  # change a bit generator's stream, but makes no such promise for the methods
  # of Generator.
  stream = np.random.PCG64(np.random.SeedSequence([seed, key]))
  return stream.random_raw(count)
