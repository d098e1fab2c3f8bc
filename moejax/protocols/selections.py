"""What a decoder selects by score, and how far two selections lie apart.

A router selects experts: by its scores, or by scores with a balancing bias; a
hash layer looks its experts up by token id and selects nothing. An indexer
selects the compressed entries that a query sees. Where a rounding error may
have exchanged two candidates, the gap between their scores is the margin.

Layer: protocols.
"""

from collections.abc import Mapping

import numpy as np

from moejax.protocols import taps as taps_lib

_INDEX_SCORES = "attention.indexer.index_scores"
INDEXER = (taps_lib.VISIBLE, _INDEX_SCORES)


def is_selection(name: str) -> bool:
  """Whether a tap holds a selection rather than a value."""
  return taps_lib.split(name)[1] in (taps_lib.ROUTE_IDS, taps_lib.VISIBLE)


def scores_of(name: str, taps: Mapping[str, np.ndarray]) -> str | None:
  """Returns the tap whose values decide a selection.

  Args:
    name: Of the selection.
    taps: Of the step.

  Returns:
    A full name, which `taps` may lack; None where a token's id decides.
  """
  layer, tap = taps_lib.split(name)
  if tap == taps_lib.VISIBLE:
    return taps_lib.join(layer, _INDEX_SCORES)
  router = name.removesuffix("ids")
  if router + "biased" in taps:
    return router + "biased"
  return None if router + "softplus" in taps else router + "scores"


def gap(name: str, ours: np.ndarray, reference: np.ndarray, scores) -> float:
  """The largest difference of scores that had to be crossed for one token.

  Args:
    name: Of the selection.
    ours: [slot] expert ids, or [entry] of zeros and ones.
    reference: The same.
    scores: [candidate], the reference's.

  Returns:
    For routes the largest gap between the two sides of a slot. For entries
    that between the entries which one side alone sees; infinity if one sees
    more than the other, which no rounding explains.
  """
  row = scores.astype(np.float64)
  if taps_lib.split(name)[1] == taps_lib.ROUTE_IDS:
    return float(np.abs(row[ours] - row[reference]).max())
  mine, theirs = row[ours > reference], row[reference > ours]
  if mine.size != theirs.size:
    return np.inf
  if not mine.size:
    return 0.0
  return float(max(theirs.max() - mine.min(), mine.max() - theirs.min()))
