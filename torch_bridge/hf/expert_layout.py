"""How the stacked weights of all experts of a layer lie in a file.

Two things differ between files and leave no trace in most shapes:

  layout   gate_up                          down
  v5       [expert, 2 * expert_hidden, embed]   [expert, embed, expert_hidden]
  legacy   [expert, embed, 2 * expert_hidden]   [expert, expert_hidden, embed]

  rows           order of the 2 * expert_hidden gate and up rows
  halves         g0, g1, ..., u0, u1, ...
  interleaved    g0, u0, g1, u1, ...

The shape of gate_up fits both layouts where 2 * expert_hidden == embed, that
of down where expert_hidden == embed. Both cannot hold, so the pair always
settles the layout; one tensor alone does not. The rows never show in a shape:
they are declared, not guessed.

Layer: torch_bridge. Pure NumPy.
"""

from collections.abc import Mapping

import numpy as np

from moejax.contracts import document
from moejax.contracts import refusal

LAYOUTS = ("v5", "legacy")
ROWS = ("halves", "interleaved")

Shape = tuple[int, ...]


def pair_shapes(
    layout: str, num_experts: int, embed: int, expert_hidden: int
) -> tuple[Shape, Shape]:
  """Returns the shapes of (gate_up, down) in a layout."""
  document.check_choice("expert weights", "layout", layout, LAYOUTS)
  gate_up = (num_experts, 2 * expert_hidden, embed)
  down = (num_experts, embed, expert_hidden)
  if layout == "v5":
    return gate_up, down
  return tuple(_transposed(s) for s in (gate_up, down))


def find_layout(
    pairs: Mapping[str, tuple[Shape, Shape]],
    num_experts: int,
    embed: int,
    expert_hidden: int,
) -> str:
  """Returns the one layout in which a checkpoint's expert weights lie.

  Args:
    pairs: {layer: (shape of gate_up, shape of down)}, at least one layer.
    num_experts: Experts of each layer.
    embed: Width of an expert's input and output.
    expert_hidden: Width inside an expert.

  Returns:
    "v5" or "legacy".

  Raises:
    ValueError: there is no layer to decide from.
    refusal.HarnessError: a pair fits no layout, or two layers fit two.
  """
  if not pairs:
    raise ValueError("no expert weights to find the layout of.")
  sizes = (num_experts, embed, expert_hidden)
  layouts = {}
  for layer, pair in pairs.items():
    fitting = [x for x in LAYOUTS if tuple(pair) == pair_shapes(x, *sizes)]
    if not fitting:
      expected = ", or ".join(
          "{} and {} ({})".format(*pair_shapes(x, *sizes), x) for x in LAYOUTS
      )
      raise refusal.HarnessError(
          f"{layer}: expert weights gate_up {tuple(pair[0])} and down"
          f" {tuple(pair[1])} are not {expected}."
      )
    layouts[layer] = fitting[0]
  if len(set(layouts.values())) > 1:
    listing = ", ".join(f"{layer} is {x}" for layer, x in layouts.items())
    raise refusal.HarnessError(
        f"the layers contradict each other on the expert layout: {listing}."
    )
  return next(iter(layouts.values()))


def to_v5(
    gate_up: np.ndarray, down: np.ndarray, layout: str, rows: str
) -> tuple[np.ndarray, np.ndarray]:
  """Returns a layer's expert weights in layout v5, gate rows first.

  Bits are moved, never computed with.

  Args:
    gate_up: In the given layout and row order.
    down: In the given layout.
    layout: "v5" or "legacy".
    rows: "halves" or "interleaved".

  Returns:
    (gate_up [expert, 2 * expert_hidden, embed],
    down [expert, embed, expert_hidden]), C-contiguous, dtypes kept.

  Raises:
    ValueError: layout or rows are unknown, or the two shapes do not fit each
      other in that layout.
  """
  document.check_choice("expert weights", "layout", layout, LAYOUTS)
  document.check_choice("expert weights", "rows", rows, ROWS)
  given = gate_up.shape, down.shape
  if layout == "legacy" and gate_up.ndim == down.ndim == 3:
    gate_up, down = (np.swapaxes(w, 1, 2) for w in (gate_up, down))
  if down.ndim != 3 or gate_up.shape != pair_shapes("v5", *down.shape)[0]:
    raise ValueError(
        f"gate_up {given[0]} and down {given[1]} do not fit each other in"
        f" layout {layout!r}."
    )
  if rows == "interleaved":
    gate_up = np.concatenate([gate_up[:, 0::2], gate_up[:, 1::2]], axis=1)
  return np.ascontiguousarray(gate_up), np.ascontiguousarray(down)


def _transposed(shape: Shape) -> Shape:
  return shape[0], shape[2], shape[1]
