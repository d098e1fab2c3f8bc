"""What a decoder selects by score, and how far two selections lie apart.

A router selects experts: by its scores, or by scores with a balancing bias; a
hash layer looks its experts up by token id and selects nothing. An indexer
selects the compressed entries that a query sees. Where a rounding error may
have exchanged two candidates, the gap between their scores is the margin.

transformers asks for the routes of DeepSeek-V4 by an unsorted top-k, which
promises a set of experts and no order of slots. Native routes of a router with
a balancing bias are therefore compared as sets.

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


def is_sorted(decides: str | None) -> bool:
  """Whether slots fall by score, given the tap that decides a selection."""
  return decides is None or decides.endswith(".scores")


def same(decides: str | None, ours: np.ndarray, reference: np.ndarray) -> bool:
  """Whether two selections of one token are the same, as far as promised."""
  if is_sorted(decides) or ours.shape != reference.shape:
    return np.array_equal(ours, reference)
  return np.array_equal(np.sort(ours), np.sort(reference))


def gap(
    decides: str | None, ours: np.ndarray, reference: np.ndarray, scores
) -> float:
  """The largest difference of scores that had to be crossed for one token.

  Args:
    decides: From `scores_of`.
    ours: [selected] candidates.
    reference: The same.
    scores: [candidate], the reference's.

  Returns:
    Of sorted slots the largest gap between the two sides of a slot. Of sets
    that between candidates which one side alone selected. Infinity if one side
    selected more than the other, which no rounding explains.
  """
  row = scores.astype(np.float64)
  if ours.size != reference.size:
    return np.inf
  if is_sorted(decides):
    return float(np.abs(row[ours] - row[reference]).max())
  mine = row[np.setdiff1d(ours, reference)]
  theirs = row[np.setdiff1d(reference, ours)]
  return float(max(theirs.max() - mine.min(), mine.max() - theirs.min()))
