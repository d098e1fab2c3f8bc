"""A picture of a comparison: one cell for each tap of each layer.

Rows are the taps in order of execution, columns the layers, so a run reads
down the first column, then down the next. Taps outside the layers run across.
The colour says the verdict and its strength the share of differing elements; a
corner, a cross and a dash say the same without colour.

Layer: reports. Imports contracts.
"""

import collections
from collections.abc import Mapping
from collections.abc import Sequence

from moejax.contracts import verdict
from moejax.reports import canvas as canvas_lib
from moejax.reports import words

# {class: (light, dark)}. Blue and orange stay apart for colour-blind readers.
COLOURS = {
    "text": ("#1b1f24", "#e6e9ed"),
    "muted": ("#59636e", "#9aa4af"),
    "same": ("#e3e8ec", "#2a3138"),
    "within-1": ("#cfe3f5", "#1c3650"),
    "within-2": ("#93c0e6", "#235785"),
    "within-3": ("#4f90cd", "#3f88c9"),
    "within-4": ("#1f5f9e", "#8fc2f0"),
    "beyond-1": ("#fbdcc4", "#4a2a12"),
    "beyond-2": ("#f5ab78", "#8a4613"),
    "beyond-3": ("#dd6b20", "#dd7a2b"),
    "beyond-4": ("#a23f05", "#ffbe85"),
    "ink-1": ("#1b1f24", "#e6e9ed"),
    "ink-2": ("#1b1f24", "#e6e9ed"),
    "ink-3": ("#1b1f24", "#14181d"),
    "ink-4": ("#ffffff", "#14181d"),
}
_SHARES = (0.01, 0.1, 0.5)  # Upper ends of the first three strengths.
_OUTLINE = f"stroke:var(--heat-muted,{COLOURS['muted'][0]})"
_RULES = (
    f".heat-hollow{{fill:none;{_OUTLINE};stroke-dasharray:2 2}}"
    f".heat-stroke{{fill:none;{_OUTLINE};stroke-width:1.5}}"
)

# Pixels.
_ROW = 15
_LABEL = 226  # Group and name of a tap.
_GRID = 560  # The grid's width if the cells can have it.
_CELL = (11, 42)
_NUMBERED = 26  # From this width on a cell shows its share.
_TOP = 118  # Title and legend.
_MARGIN = 34  # Right of the grid: the levels.
_HEADS = 30
_HEADS_EVERY = 60  # Rows; the next group after them has heads of its own.

Key = tuple[int | None, str]


def render(taps: Sequence[Mapping], title: str) -> str:
  """Draws the counts of one arithmetic.

  Args:
    taps: The report's counts by tap, in order of execution.
    title: Stands above the figure and names it for a screen reader.

  Returns:
    An `<svg>` element to be put into a page. Equal arguments give equal bytes.
  """
  counts = {(t["layer"], t["tap"]): t for t in taps}
  layers = sorted({layer for layer, _ in counts if layer is not None})
  cell = min(max(_GRID // max(len(layers), 1), _CELL[0]), _CELL[1])
  before, inside, after = _rows(list(counts))
  headed = _headed(inside)
  canvas = canvas_lib.Canvas(
      "heat",
      COLOURS,
      width=max(_LABEL + cell * max(len(layers), 4) + _MARGIN, 430),
      height=_TOP
      + _ROW * (len(before) + len(inside) + len(after))
      + _HEADS * max(len(headed), 1)
      + 26,
  )
  canvas.text("text", 0, 16, title, size=13, weight="bold")
  _legend(canvas)
  y = _TOP
  whole = cell * max(len(layers), 4)
  y = _outside(canvas, before, counts, y, whole)
  previous = ""
  for tap in inside:
    if tap in headed:
      y, previous = _column_heads(canvas, layers, cell, y), ""
    previous = _label(canvas, tap, y, previous)
    row = [counts[layer, tap] for layer in layers if (layer, tap) in counts]
    for one in row:
      x = _LABEL + cell * layers.index(one["layer"])
      _cell(canvas, one, x, y, cell - 1)
    _level(canvas, row[0], _LABEL + cell * len(layers), y)
    y += _ROW
  _outside(canvas, after, counts, y + 8 * bool(inside), whole)
  if not taps:
    canvas.text("muted", 0, _TOP + 12, "No tap was captured.")
  return canvas.svg(_alternative(title, taps), _RULES)


def _alternative(title: str, taps: Sequence[Mapping]) -> str:
  """The figure in words, for those who do not see it."""
  found = collections.Counter(t["verdict"] for t in taps)
  return f"Heat map, {title}: " + (
      ", ".join(
          f"{words.plural(found[state], 'tap')} {words.VERDICTS[state][1]}"
          for state in verdict.ORDER
          if state in found
      )
      or "no taps"
  )


def _rows(keys: Sequence[Key]) -> tuple[list, list, list]:
  """Splits taps into those before, inside and after the layers, in order.

  Layers of other kinds have other taps; a tap that a later layer adds stands
  behind its predecessor there.
  """
  numbered = [i for i, (layer, _) in enumerate(keys) if layer is not None]
  first = numbered[0] if numbered else len(keys)
  before = [tap for layer, tap in keys[:first]]
  after = [tap for layer, tap in keys[first:] if layer is None]
  inside: list[str] = []
  previous: dict[int, str] = {}
  for layer, tap in keys[first:]:
    if layer is None:
      continue
    if tap not in inside:
      at = inside.index(previous[layer]) + 1 if layer in previous else 0
      inside.insert(at, tap)
    previous[layer] = tap
  return before, inside, after


def _headed(inside: Sequence[str]) -> set[str]:
  """The taps with the layers' numbers above them: a first one, then in reach.

  A group of taps is not cut apart.
  """
  found, since = set(), _HEADS_EVERY
  for index, tap in enumerate(inside):
    group = words.readable(tap)[0]
    starts = not index or words.readable(inside[index - 1])[0] != group
    if since >= _HEADS_EVERY and starts:
      found.add(tap)
      since = 0
    since += 1
  return found


def _outside(canvas, taps, counts, y, width) -> int:
  previous = ""
  for tap in taps:
    previous = _label(canvas, tap, y, previous)
    _cell(canvas, counts[None, tap], _LABEL, y, width - 1)
    _level(canvas, counts[None, tap], _LABEL + width, y)
    y += _ROW
  return y


def _column_heads(canvas, layers, cell, y) -> int:
  every = -(-22 // cell)
  for column, layer in enumerate(layers):
    if column % every == 0:
      x = _LABEL + cell * (column + 0.5)
      canvas.text("muted", x, y + 24, str(layer), "center")
  canvas.text("muted", _LABEL - 8, y + 24, "layer", "right")
  return y + _HEADS


def _label(canvas, tap, y, previous) -> str:
  group, leaf = words.readable(tap)
  if group != previous:
    canvas.text("muted", 0, y + 11, group)
  canvas.text("text", _LABEL - 8, y + 11, leaf, "right")
  return group


def _level(canvas, one, x, y) -> None:
  if one["level"] != "L4":
    canvas.text("muted", x + 5, y + 11, one["level"], size=10)


def _strength(one) -> int:
  part = one["differing"] / one["elements"] if one["elements"] else 1
  return 1 + sum(part > end for end in _SHARES)


def _cell(canvas, one, x, y, width) -> None:
  state, strength = one["verdict"], _strength(one)
  numbers = words.share(one["differing"], one["elements"])
  title = (
      f"{words.tap_name(one['layer'], one['tap'])}:"
      f" {words.VERDICTS[state][1]}; {one['differing']:,} of"
      f" {one['elements']:,} elements differ ({numbers})"
  )
  _mark(canvas, state, strength, x, y, width, title)
  if state in (verdict.WITHIN_RULE, verdict.BEYOND_RULE) and width > _NUMBERED:
    canvas.text(
        f"ink-{strength}", x + width / 2, y + 10.5,
        numbers.removesuffix(" %").replace(" ", ""), "center", size=10,
    )


def _mark(canvas, state, strength, x, y, width, title="") -> None:
  """Draws the cell of a verdict: its colour, and its shape."""
  height = _ROW - 1
  if state == verdict.SAME_BITS:
    canvas.box("same", x, y, width, height, title)
  elif state == verdict.WITHIN_RULE:
    canvas.box(f"within-{strength}", x, y, width, height, title)
  elif state == verdict.BEYOND_RULE:
    canvas.box(f"beyond-{strength}", x, y, width, height, title)
    right, side = x + width, min(5, width // 3)
    canvas.shape(
        f"ink-{strength}", [(right - side, y), (right, y), (right, y + side)]
    )
  else:
    canvas.box(
        "hollow", x + 0.5, y + 0.5, width - 1, height - 1, title
    )
    cx, cy = x + width / 2, y + height / 2
    if state == verdict.MISSING:
      canvas.line("stroke", cx - 3, cy - 3, cx + 3, cy + 3)
      canvas.line("stroke", cx - 3, cy + 3, cx + 3, cy - 3)
    else:
      canvas.line("stroke", cx - 3, cy, cx + 3, cy)


def _legend(canvas) -> None:
  size, gap, text, y = 18, 21, 94, 26
  for strength, end in enumerate((*_SHARES, 1), start=1):
    x = (strength - 1) * gap + size / 2
    canvas.text("muted", x, y + 11, f"{100 * end:.0f}", "center", size=10)
  canvas.text(
      "muted", text, y + 11, "% of the elements differ, up to this share"
  )
  for state, name in (
      (verdict.WITHIN_RULE, "other bits, within the rule"),
      (verdict.BEYOND_RULE, "other bits, beyond the rule (marked corner)"),
  ):
    y += 18
    for strength in range(1, 5):
      _mark(canvas, state, strength, (strength - 1) * gap, y, size)
    canvas.text("text", text, y + 11, name)
  y += 20
  for state, x in (
      (verdict.SAME_BITS, 0),
      (verdict.MISSING, text),
      (verdict.UNSUPPORTED, text + 84),
  ):
    _mark(canvas, state, 1, x, y, size)
    canvas.text("text", x + size + 6, y + 11, words.VERDICTS[state][1])
