"""How near the decisions of a run stood to another decision.

A route changes when a difference crosses the gap between the last selected and
the first rejected score; a token changes when it crosses the gap between the
two largest logits. Zero is a tie and is reported as one.

Layer: protocols.
"""

from collections.abc import Sequence

import numpy as np

from moejax.numerics import router
from moejax.protocols import capture
from moejax.protocols import selections
from moejax.protocols import taps as taps_lib

_QUANTILES = (0.0, 0.01, 0.1, 0.5)


def summarize(captures: Sequence[capture.Capture], top_k: int) -> dict:
  """Returns the margins of routers (by layer) and of the token choice.

  Args:
    captures: A run with the taps of routers and "logits". Layers that look
      their experts up have no margin.
    top_k: Slots of a route.

  Returns:
    JSON values: for each layer and for the tokens the number of decisions, the
    ties, and the smallest, 1 %, 10 % and median margin.
  """
  gaps: dict[int, list] = {}
  inside: dict[int, int] = {}
  tokens = []
  for one in captures:
    for step in one.steps:
      row = np.sort(step.taps["logits"][-1].astype(np.float64))
      tokens.append(row[-1] - row[-2])
      for name in step.taps:
        layer, tap = taps_lib.split(name)
        if tap != taps_lib.ROUTE_IDS:
          continue
        scores = step.taps.get(selections.scores_of(name, step.taps))
        if scores is None:
          continue
        gaps.setdefault(layer, []).append(router.boundary_margin(scores, top_k))
        inside[layer] = inside.get(layer, 0) + _inner_ties(scores, top_k)
  return {
      "routers": [
          {
              "layer": layer,
              "order_ties": inside[layer],
              **_describe(np.concatenate(gaps[layer])),
          }
          for layer in sorted(gaps)
      ],
      "tokens": _describe(np.array(tokens)),
  }


def _inner_ties(scores: np.ndarray, top_k: int) -> int:
  """Tokens with equal scores inside the selection: only their order is free."""
  falling = -np.sort(-scores.astype(np.float64), axis=-1)[..., :top_k]
  return int((falling[..., 1:] == falling[..., :-1]).any(-1).sum())


def _describe(gaps: np.ndarray) -> dict:
  finite = gaps[np.isfinite(gaps)]
  low, percent, tenth, median = (
      (float(np.quantile(finite, q, method="lower")) for q in _QUANTILES)
      if finite.size
      else (None,) * 4
  )
  return {
      "decisions": int(gaps.size),
      "boundary_ties": int((gaps == 0).sum()),
      "smallest": low,
      "percent_1": percent,
      "percent_10": tenth,
      "median": median,
  }
