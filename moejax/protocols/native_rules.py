"""Rules for arithmetic that nobody promised: native against native.

Two native runs differ in bits and both may be right. Rules with a source
decide what is still right; each prints the limit it used.

Forward error bound (L4). Every operation of our decoder is run on the
reference's own inputs. Both our result and the reference's must lie within the
operation's forward error bound of the portable value.

A combine has a contract. On equal terms both sides must return the same bits,
but for one freedom: where the accumulator is float32, the framework may add in
any order, so each result must be the rounding of a value within the float32
bound of the exact sum. (PyTorch on a CPU adds the last columns of a tensor in
another order than the others.)

Envelope (L1 to L3, the final state, and operations without a bound). The
reference is run against itself under other legal orders: every contracting axis
reversed, and every operation in float64. Let r be the largest difference of a
tap from the native reference in any of them. Two legal runs lie within r of it
each, so they lie within 2 r of one another: that is the limit. Selections and
tokens follow the reference in all of these runs, so that a selection does not
turn a rounding into another computation.

Margin (L0 and selections). Where our own selection differs from the
reference's, the reference's scores of the two candidates must lie within twice
the envelope of these scores: a smaller error could not have exchanged them.

Layer: protocols.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses

import numpy as np

from moejax.contracts import verdict
from moejax.numerics.portable import bound_ops
from moejax.numerics.portable import error_bounds
from moejax.numerics import rounding
from moejax.protocols import capture
from moejax.protocols import compare
from moejax.protocols import selections
from moejax.protocols import taps as taps_lib

ENVELOPE = (
    "envelope: 2 x the largest difference of the reference from itself under"
    " another legal order"
)
BOUND = (
    "forward error bound: B u + one spacing around the portable value, u ="
    " 2^-24 (Higham 2002, eq. 3.5)"
)
CONTRACT = (
    "the combine contract: the rounding of a float32 sum of equal terms in some"
    " order; same bits where the accumulator has 16 bits"
)
MARGIN = (
    "margin: the exchanged scores lie within the envelope of the scores; slots"
    " of an unsorted top-k are a set"
)

# The table is a quotient, a power and a quotient, none of them a tap: u for
# each quotient, |exponent ln(theta)| u < 16 u and 32 u for the power; what is
# left is for scaled frequencies.
_FREQUENCY_BOUND = 64 * bound_ops.UNIT
# Errors grow from round to round and have no useful bound, so the envelope is
# the rule for what these taps show.
_UNBOUNDED = ".sinkhorn"
_RULES = {
    "moe.experts.terms": CONTRACT,
    "moe.experts.combine": CONTRACT,
}

Captures = Sequence[capture.Capture]
Key = tuple[int | None, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
  """A selection in which we and the reference differ.

  Attributes:
    prompt: Prompt id.
    step: 0 for prefill.
    layer: Of the router; None for the choice of a token.
    token: Index in the step.
    ours: Our selection.
    reference: The reference's.
    margin: The largest score gap that had to be crossed.
    limit: Twice the envelope of the scores.
    tap: That holds the selection; "logits" for the choice of a token.
  """

  prompt: str
  step: int
  layer: int | None
  token: int
  ours: tuple[int, ...]
  reference: tuple[int, ...]
  margin: float
  limit: float
  tap: str

  @property
  def legal(self) -> bool:
    """Whether the margin rule allows the exchange."""
    return self.margin <= self.limit


def envelope(
    reference: Captures, legal: Sequence[Captures]
) -> dict[Key, float]:
  """{(layer, tap): r}, the largest |legal run - reference| of each tap.

  The arrays of the final state count as taps (`taps.final_state`).
  """
  out: dict[Key, float] = {}

  def add(name, x, y):
    key = taps_lib.split(name)
    out[key] = max(out.get(key, 0.0), largest_gap(x, y))

  for other in legal:
    for name, _, _, x, y in pairs(other, reference):
      add(name, x, y)
    for a, b in zip(other, reference, strict=True):
      for array, y in b.final_state.items():
        add(taps_lib.final_state(array), a.final_state[array], y)
  return out


def pairs(ours: Captures, reference: Captures):
  """Yields (tap, prompt id, step, ours, reference) of all common taps."""
  for a, b in zip(ours, reference, strict=True):
    for index, (left, right) in enumerate(zip(a.steps, b.steps, strict=True)):
      for name, x in left.taps.items():
        if name in right.taps:
          yield name, a.prompt_id, index, x, right.taps[name]


def largest_gap(x: np.ndarray, y: np.ndarray) -> float:
  """max |x - y|; infinity if shapes differ or only one is finite."""
  if x.shape != y.shape:
    return np.inf
  if not x.size:
    return 0.0
  x, y = x.astype(np.float64), y.astype(np.float64)
  with np.errstate(invalid="ignore"):
    gap = np.where(x == y, 0.0, np.abs(x - y))
  return float(np.where(np.isnan(gap), np.inf, gap).max())


def judge_by_envelope(
    comparison: compare.Comparison, limits: Mapping[Key, float]
) -> None:
  """Replaces "other bits" by within or beyond the envelope, tap by tap.

  Selections are left alone: `judge_selections` has their rule.
  """
  for key, count in comparison.counts.items():
    if count.verdict != verdict.BEYOND_RULE or selections.is_selection(key[1]):
      continue
    count.rule, count.limit = ENVELOPE, 2 * limits.get(key, 0.0)
    if count.max_abs <= count.limit:
      count.verdict = verdict.WITHIN_RULE


def judge_by_bounds(
    comparison: compare.Comparison,
    replay: Captures,
    portable: Captures,
    bounds: Captures,
    reference: Captures,
    accumulator: str,
) -> None:
  """Judges single operations on the reference's inputs.

  Args:
    comparison: Its L4 counts are replaced.
    replay: Our native operations on the reference's inputs.
    portable: The portable operations on them.
    bounds: The bounds on them.
    reference: The native reference.
    accumulator: Of our combine contract.
  """
  counts: dict[Key, compare.TapCount] = {}
  worst: dict[Key, float] = {}
  by_id = {c.prompt_id: c for c in reference}
  for runs in zip(
      pairs(replay, reference),
      pairs(portable, reference),
      pairs(bounds, reference),
      strict=True,
  ):
    (name, prompt, step, x, y), (*_, center, _), (*_, bound, _) = runs
    taps = by_id[prompt].steps[step].taps
    key = taps_lib.split(name)
    if taps_lib.level(name) != "L4" or selections.is_selection(name):
      continue
    if key[1].endswith(_UNBOUNDED):
      continue
    count = counts.setdefault(key, compare.TapCount(*key, "L4"))
    count.elements += y.size
    if compare.same_bits(x, y):
      continue
    compare.measure(count, x, y)
    if key[1] == "rotary.inverse_frequencies":
      bound = _FREQUENCY_BOUND * np.abs(center.astype(np.float64))
    ratio = _ratio(x, y, center, bound)
    if key[1] == "moe.experts.combine":
      terms = name.removesuffix("combine") + "terms"
      ratio = _sum_ratio(x, y, taps[terms], accumulator)
    worst[key] = max(worst.get(key, 0.0), ratio)
  for key, count in counts.items():
    if key in worst:
      count.rule = _RULES.get(key[1], BOUND)
      within = worst[key] <= 1
      count.verdict = verdict.WITHIN_RULE if within else verdict.BEYOND_RULE
    comparison.counts[key] = count


def _ratio(x, y, center, bound) -> float:
  """The larger of |x - center| and |y - center|, in units of the bound."""
  if not (x.shape == y.shape == center.shape == bound.shape):
    return np.inf
  center = center.astype(np.float64)
  out = 0.0
  for value in (x, y):
    value = value.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
      ratio = np.where(value == center, 0.0, np.abs(value - center) / bound)
    out = max(out, float(np.where(np.isnan(ratio), np.inf, ratio).max()))
  return out


def _sum_ratio(x, y, terms, accumulator: str) -> float:
  """0 if x and y are roundings of float32 sums of the terms, else infinity."""
  if x.dtype != y.dtype or accumulator != "float32":
    return np.inf
  wide = terms.astype(np.float64)
  total = wide.sum(1)
  reach = error_bounds.total(wide, np, axis=1)[:, 0] * bound_ops.UNIT
  low = rounding.round_oracle(total - reach, x.dtype.name)
  high = rounding.round_oracle(total + reach, x.dtype.name)
  inside = [
      (low.astype(np.float64) <= v.astype(np.float64))
      & (v.astype(np.float64) <= high.astype(np.float64))
      for v in (x, y)
  ]
  return 0.0 if np.all(inside) else np.inf


def exchanges(
    ours: Captures, reference: Captures, limits: Mapping[Key, float]
) -> list[Exchange]:
  """Every selection of ours, on forced paths, that differs from theirs."""
  out = []
  for name, prompt, step, x, y in pairs(ours, reference):
    if not selections.is_selection(name):
      continue
    context = next(c for c in reference if c.prompt_id == prompt).steps[step]
    decides = selections.scores_of(name, context.taps)
    layer, tap = taps_lib.split(name)
    limit = 0.0
    if decides is not None:
      limit = 2 * limits.get(taps_lib.split(decides), 0.0)
    for token in np.flatnonzero((x != y).any(-1)).tolist():
      mine, theirs = x[token], y[token]
      if tap == taps_lib.VISIBLE:
        mine, theirs = np.flatnonzero(mine), np.flatnonzero(theirs)
      if selections.same(decides, mine, theirs):
        continue
      # What a token's id decides, no rounding exchanges.
      margin = np.inf
      if decides is not None:
        scores = context.taps[decides][token]
        margin = selections.gap(decides, mine, theirs, scores)
      out.append(
          Exchange(
              prompt, step, layer, token,
              tuple(mine.tolist()), tuple(theirs.tolist()), margin, limit, tap,
          )
      )
  limit = 2 * limits.get((None, "logits"), 0.0)
  for a, b in zip(ours, reference, strict=True):
    for step, (left, right) in enumerate(zip(a.steps, b.steps, strict=True)):
      if left.chosen != right.chosen:
        row = right.taps["logits"][-1].astype(np.float64)
        gap = float(row[right.chosen] - row[left.chosen])
        token = len(right.tokens) - 1
        out.append(
            Exchange(
                a.prompt_id, step, None, token,
                (left.chosen,), (right.chosen,), gap, limit, "logits",
            )
        )
  return out


def judge_selections(
    comparison: compare.Comparison, exchanged: Sequence[Exchange]
) -> None:
  """Judges each layer's selections by the margins of their exchanges."""
  for key, count in comparison.counts.items():
    if count.verdict != verdict.BEYOND_RULE:
      continue
    if not selections.is_selection(key[1]):
      continue
    mine = [e for e in exchanged if (e.layer, e.tap) == key]
    count.rule = MARGIN
    # None at all: the sets are the same.
    if all(e.legal for e in mine):
      count.verdict = verdict.WITHIN_RULE


def levels(
    comparison: compare.Comparison,
    exchanged: Sequence[Exchange],
    free: Captures,
    reference: Captures,
) -> dict[str, str]:
  """The verdict of each level under the native rules.

  Args:
    comparison: Judged, of runs on the reference's tokens and routes.
    exchanged: From `exchanges`.
    free: Our decoder following its own choices; decides L0 first.
    reference: The native reference.
  """
  out = comparison.levels()
  out["L2"] = verdict.worst(
      c.verdict for c in comparison.counts.values() if c.level == "L2"
  )
  if all(a.generated == b.generated for a, b in zip(free, reference)):
    out["L0"] = verdict.SAME_BITS
  elif exchanged and all(e.legal for e in exchanged):
    out["L0"] = verdict.WITHIN_RULE
  else:
    out["L0"] = verdict.BEYOND_RULE
  return out
