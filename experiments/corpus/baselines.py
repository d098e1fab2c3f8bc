"""What simple counts know of a text: losses that a model has to beat.

Counted on training tokens only, with V the size of the vocabulary, N the
number of training tokens, c their counts:

- unigram, one added to each count: P1(b) = (c(b) + 1) / (N + V);
- bigram, interpolated after Witten and Bell:
  P2(b | a) = (c(a, b) + t(a) P1(b)) / (c(a) + t(a)), where t(a) is the number
  of different tokens seen after a, and c(a) counts a as a context. A context
  never seen leaves P1.

Neither has a constant to tune, so nothing held out is looked at. Losses are
-ln P in nats, float64.

Layer: experiments.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Counts:
  """Counts of a training text.

  Attributes:
    vocab_size: V.
    tokens: int64 [V], c(b).
    contexts: int64 [V], c(a): how often a token was followed by another.
    followers: int64 [V], t(a).
    pairs: int64 [P], ascending a V + b of the pairs seen.
    pair_counts: int64 [P], c(a, b).
  """

  vocab_size: int
  tokens: np.ndarray
  contexts: np.ndarray
  followers: np.ndarray
  pairs: np.ndarray
  pair_counts: np.ndarray


def fit(tokens: np.ndarray, vocab_size: int) -> Counts:
  """Counts the tokens of a training text and its pairs of neighbours.

  Args:
    tokens: [N] ids of the whole stream, ends of documents included.
    vocab_size: V.

  Raises:
    ValueError: there are fewer than two tokens, or one lies outside V.
  """
  ids = _checked(tokens, vocab_size)
  pairs, pair_counts = np.unique(
      ids[:-1] * vocab_size + ids[1:], return_counts=True
  )
  return Counts(
      vocab_size,
      np.bincount(ids, minlength=vocab_size),
      np.bincount(ids[:-1], minlength=vocab_size),
      np.bincount(pairs // vocab_size, minlength=vocab_size),
      pairs,
      pair_counts,
  )


def unigram_nats(counts: Counts, tokens: np.ndarray) -> np.ndarray:
  """Returns -ln P1 of tokens[1:], float64 [N - 1]."""
  return -np.log(_unigram(counts)[_checked(tokens, counts.vocab_size)[1:]])


def bigram_nats(counts: Counts, tokens: np.ndarray) -> np.ndarray:
  """Returns -ln P2 of tokens[1:] after tokens[:-1], float64 [N - 1]."""
  ids = _checked(tokens, counts.vocab_size)
  first, second = ids[:-1], ids[1:]
  wanted = first * counts.vocab_size + second
  place = np.searchsorted(counts.pairs, wanted)
  place = np.minimum(place, len(counts.pairs) - 1)
  seen = np.where(
      counts.pairs[place] == wanted, counts.pair_counts[place], 0
  )
  below = _unigram(counts)[second]
  kinds = counts.followers[first]
  mass = counts.contexts[first] + kinds
  # A context that was never seen has mass 0 and leaves the unigram.
  bigram = (seen + kinds * below) / np.maximum(mass, 1)
  return -np.log(np.where(mass > 0, bigram, below))


def _unigram(counts: Counts) -> np.ndarray:
  total = counts.tokens.sum() + counts.vocab_size
  return (counts.tokens + 1) / total


def _checked(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
  ids = np.asarray(tokens).astype(np.int64)
  if ids.ndim != 1 or ids.size < 2:
    raise ValueError(f"{ids.shape} tokens are no row of at least two.")
  if ids.min() < 0 or ids.max() >= vocab_size:
    raise ValueError(
        f"ids from {ids.min()} to {ids.max()} do not fit a vocabulary of"
        f" {vocab_size}."
    )
  return ids
