"""Two captures of the same model: what is equal, and what differs first.

Bits are compared, then counted by tap. The first difference is the first tap
in execution order that both sides have and whose bits differ: every tap before
it is equal, so the operation between had equal inputs. A tap that only one
side has is reported as missing and never skipped.

Layer: protocols.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from moejax.contracts import verdict
from moejax.numerics import formats
from moejax.numerics import router
from moejax.numerics import ulp
from moejax.protocols import capture
from moejax.protocols import selections
from moejax.protocols import taps as taps_lib


@dataclasses.dataclass(slots=True)
class TapCount:
  """How one tap of one layer compares over all prompts and steps.

  Attributes:
    layer: Index, or None for taps outside the layers.
    tap: Name without the layer.
    level: "L1" to "L4".
    verdict: As in contracts/verdict.py.
    elements: Elements compared.
    differing: Of those, how many have other bits.
    max_ulp: Largest distance in representable steps, where both are finite.
    max_abs: Largest absolute difference.
    rule: What the verdict rests on; empty for a comparison of bits.
    limit: The rule's limit on max_abs, or None.
  """

  layer: int | None
  tap: str
  level: str
  verdict: str = verdict.SAME_BITS
  elements: int = 0
  differing: int = 0
  max_ulp: int = 0
  max_abs: float = 0.0
  rule: str = ""
  limit: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
  """Where two captures first part.

  Attributes:
    prompt: Prompt id.
    step: 0 for prefill, then the decode steps.
    layer: Index or None.
    operator: The tap's name without the layer.
    kind: "values", "dtype", "shape", "boundary_tie" (equal scores on both
      sides of the last slot), "order_tie" (equal scores inside the selection).
    index: Coordinates of the first differing element, axes as `axes`.
    axes: Names of the axes.
    ours: Our value there, as text.
    reference: The reference's.
    distance_ulp: Steps between them; None where that has no meaning.
    differing: Differing elements of this tap in this step.
    elements: All of them.
    margin: For routes the gap of the scores at the boundary; for entries that
      between the entries which one side alone sees.
  """

  prompt: str
  step: int
  layer: int | None
  operator: str
  kind: str
  index: tuple[int, ...] = ()
  axes: tuple[str, ...] = ()
  ours: str = ""
  reference: str = ""
  distance_ulp: int | None = None
  differing: int = 0
  elements: int = 0
  margin: float | None = None


@dataclasses.dataclass(slots=True)
class Comparison:
  """The outcome: counts by (layer, tap), first difference, missing taps."""

  counts: dict[tuple[int | None, str], TapCount]
  first: Difference | None
  missing: list[str]
  tokens_equal: bool
  states_equal: bool

  def levels(self) -> dict[str, str]:
    """The verdict of each level under the rule "same bits"."""
    out = {
        "L0": _bits(self.tokens_equal),
        "L2": verdict.worst(
            [_bits(self.states_equal), *self._verdicts("L2")]
        ),
    }
    for level in ("L1", "L3", "L4"):
      out[level] = verdict.worst(self._verdicts(level))
    return {level: out[level] for level in verdict.LEVELS}

  def _verdicts(self, level: str) -> list[str]:
    return [c.verdict for c in self.counts.values() if c.level == level]


def _bits(equal: bool) -> str:
  return verdict.SAME_BITS if equal else verdict.BEYOND_RULE


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
  """Equal shape, dtype and bytes."""
  return a.shape == b.shape and a.dtype == b.dtype and (
      np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
  )


def compare(
    ours: Sequence[capture.Capture], reference: Sequence[capture.Capture]
) -> Comparison:
  """Compares captures of the same prompts, bit by bit.

  Raises:
    ValueError: the two hold other prompts or another number of steps.
  """
  _check_same_runs(ours, reference)
  counts: dict[tuple[int | None, str], TapCount] = {}
  first, missing = None, set()
  for a, b in zip(ours, reference, strict=True):
    for index, (left, right) in enumerate(zip(a.steps, b.steps, strict=True)):
      for name in [*left.taps, *(n for n in right.taps if n not in left.taps)]:
        layer, tap = taps_lib.split(name)
        alone = name not in left.taps or name not in right.taps
        if alone and tap == taps_lib.PACKED_ELEMENTS:
          continue
        count = counts.setdefault(
            (layer, tap), TapCount(layer, tap, taps_lib.level(name))
        )
        if alone:
          side = "reference" if name in left.taps else "ours"
          missing.add(f"{name} (not in {side})")
          count.verdict = verdict.worst([count.verdict, verdict.MISSING])
          continue
        x, y = left.taps[name], right.taps[name]
        count.elements += y.size
        if same_bits(x, y):
          continue
        count.verdict = verdict.BEYOND_RULE
        measure(count, x, y)
        if first is None:
          first = locate(a.prompt_id, index, name, x, y, right.taps)
  for a, b in zip(ours, reference, strict=True):
    found = _final_states(counts, missing, a, b)
    first = first or found
  return Comparison(
      counts,
      first,
      sorted(missing),
      all(a.generated == b.generated for a, b in zip(ours, reference)),
      all(
          s.state == r.state
          for a, b in zip(ours, reference)
          for s, r in zip(a.steps, b.steps)
      ),
  )


def _final_states(counts, missing, a, b) -> Difference | None:
  """Counts the arrays left after the last step; returns what differs first."""
  first = None
  for array in [*a.final_state, *(b.final_state.keys() - a.final_state)]:
    name = taps_lib.final_state(array)
    key = taps_lib.split(name)
    count = counts.setdefault(key, TapCount(*key, taps_lib.level(name)))
    x, y = a.final_state.get(array), b.final_state.get(array)
    if x is None or y is None:
      missing.add(name)
      count.verdict = verdict.worst([count.verdict, verdict.MISSING])
      continue
    count.elements += y.size
    if same_bits(x, y):
      continue
    count.verdict = verdict.BEYOND_RULE
    measure(count, x, y)
    if first is None:
      first = locate(a.prompt_id, len(b.steps) - 1, name, x, y, {})
  return first


def _check_same_runs(ours, reference) -> None:
  left = [(c.prompt_id, c.prompt, len(c.steps)) for c in ours]
  right = [(c.prompt_id, c.prompt, len(c.steps)) for c in reference]
  if left != right:
    pairs = [(a, b) for a, b in zip(left, right) if a != b]
    raise ValueError(
        f"the captures are of other runs: {len(left)} and {len(right)}"
        f" prompts, first differing (id, tokens, steps): {pairs[:1]}."
    )


def measure(count: TapCount, x: np.ndarray, y: np.ndarray) -> None:
  """Adds the size of a difference to a count."""
  if x.shape != y.shape or x.dtype != y.dtype:
    count.differing += y.size
    return
  uint = f"u{x.dtype.itemsize}"
  count.differing += int(np.count_nonzero(x.view(uint) != y.view(uint)))
  with np.errstate(invalid="ignore", over="ignore"):
    gap = np.abs(x.astype(np.float64) - y.astype(np.float64))
  finite = np.isfinite(gap)
  if finite.any():
    count.max_abs = max(count.max_abs, float(gap[finite].max()))
  if formats.is_float(x.dtype) and x.dtype != np.float64:
    count.max_ulp = max(count.max_ulp, int(ulp.distance_ulp(x, y).max()))


def locate(
    prompt: str, step: int, name: str, x: np.ndarray, y: np.ndarray, context
) -> Difference:
  """Describes the first differing element of a tap.

  Args:
    prompt: Prompt id.
    step: Index of the step.
    name: Full tap name.
    x: Ours.
    y: The reference's.
    context: The reference's taps of this step, for the scores of a route.
  """
  layer, tap = taps_lib.split(name)
  place = dict(
      prompt=prompt, step=step, layer=layer, operator=tap,
      axes=taps_lib.axes(name),
  )
  for kind, left, right in (
      ("dtype", x.dtype.name, y.dtype.name),
      ("shape", x.shape, y.shape),
  ):
    if left != right:
      return Difference(
          kind=kind, ours=str(left), reference=str(right), differing=y.size,
          elements=y.size, **place,
      )
  uint = f"u{x.dtype.itemsize}"
  differs = x.view(uint) != y.view(uint)
  index = tuple(int(i) for i in np.argwhere(differs)[0])
  kind, margin = "values", None
  if selections.is_selection(name):
    decides = selections.scores_of(name, context)
    if tap == taps_lib.ROUTE_IDS:
      kind, margin = _route_kind(context.get(decides), x, y, index[0])
    elif decides in context:
      pair = (np.flatnonzero(v[index[0]]) for v in (x, y))
      margin = selections.gap(decides, *pair, context[decides][index[0]])
      kind = "boundary_tie" if margin == 0 else kind
  steps = None
  if formats.is_float(x.dtype) and x.dtype != np.float64:
    steps = int(ulp.distance_ulp(x[index], y[index]))
  return Difference(
      kind=kind,
      index=index,
      ours=_text(x[index]),
      reference=_text(y[index]),
      distance_ulp=steps,
      differing=int(differs.sum()),
      elements=y.size,
      margin=margin,
      **place,
  )


def _text(value) -> str:
  return str(value.item()) if formats.is_float(value.dtype) else str(value)


def _route_kind(scores, x, y, token) -> tuple[str, float | None]:
  """Whether two routes of equal scores differ only by the tie rule."""
  if scores is None:
    return "values", None
  row = scores[token].astype(np.float64)
  margin = float(router.boundary_margin(scores[token][None], x.shape[-1])[0])
  if not np.array_equal(row[x[token]], row[y[token]]):
    return "values", margin
  same_set = set(x[token].tolist()) == set(y[token].tolist())
  return ("order_tie" if same_set else "boundary_tie"), margin
