"""A median with a confidence interval, in exact arithmetic.

For independent samples of any continuous distribution, the l-th least and the
l-th largest of n samples enclose the distribution's median with probability
1 - 2 P(Binomial(n, 1/2) < l). No shape is assumed and nothing is drawn, so the
same samples give the same interval everywhere.

Layer: protocols.
"""

from collections.abc import Sequence
import fractions
import math
from typing import NamedTuple


class Interval(NamedTuple):
  """A median between two of the samples that it was taken from."""

  lower: fractions.Fraction
  median: fractions.Fraction
  upper: fractions.Fraction


def exact(number: float) -> fractions.Fraction:
  """Returns the decimal fraction that a float is written as: 1.05 is 21/20."""
  return fractions.Fraction(repr(number))


def rank(samples: int, confidence: float) -> int:
  """Returns the largest l of the interval.

  The largest l >= 1 with 2 * sum over i < l of C(samples, i) at most
  (1 - confidence) * 2**samples.

  Raises:
    ValueError: so few samples give no interval, or the confidence is none.
  """
  if not 0 < confidence < 1:
    raise ValueError(f"{confidence=} is not between 0 and 1.")
  allowed = (1 - exact(confidence)) * 2**samples
  found, below = 0, 0
  while 2 * (below + math.comb(samples, found)) <= allowed:
    below += math.comb(samples, found)
    found += 1
  if not found:
    raise ValueError(
        f"{samples} samples give no interval of {confidence=}; take more."
    )
  return found


def of_median(
    values: Sequence[fractions.Fraction], confidence: float
) -> Interval:
  """Returns the median of an odd number of values, with its interval.

  Raises:
    ValueError: they are even in number, or too few.
  """
  if len(values) % 2 == 0:
    raise ValueError(f"{len(values)} values have no middle one.")
  ordered = sorted(values)
  low = rank(len(values), confidence)
  return Interval(ordered[low - 1], ordered[len(values) // 2], ordered[-low])
