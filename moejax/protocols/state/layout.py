"""Which arrays a persistent state of DeepSeek-V4 is made of, row by row.

Three layouts, each a function of the configuration and of T, the number of
tokens seen; no model and no state is needed to know them:

  raw      all that a stepwise runtime holds, dead rows included: its bytes
           depend on the path that led to them
  live     what is left when dead values are masked: the same after every
           chunking of the same tokens
  carried  live without the window row of position T - W, which the next token
           overwrites before any query sees it; a transformers cache holds
           exactly this

Arrays are ordered by component (window KV, compressed KV, compressor state,
indexer state), then by layer; kv comes before score. A row belongs to a
position: that of the token which last wrote into it.

  compressor of a CSA layer, raw rows      A half     B half
    0 .. r-1    last complete window       live       stale
    r .. 2r-1   token p in row r + p % r   live where p is in an open window
  compressor of an HCA layer, raw rows
    0 .. r-1    token p in row p % r       live where p is in an open window

Layer: protocols.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from moejax.contracts import refusal
from moejax.modules.deepseek_v4 import config as config_lib

RAW, LIVE, CARRIED = "raw", "live", "carried"
LAYOUTS = (RAW, LIVE, CARRIED)
WINDOW = "window_kv"
COMPRESSED = "compressed_kv"
COMPRESSOR = "compressor_state"
INDEXER = "indexer_state"
COMPONENTS = (WINDOW, COMPRESSED, COMPRESSOR, INDEXER)

# What a value of the raw layout is to the tokens still to come.
UNWRITTEN = "unwritten"
STALE = "stale"
LEAVING = "leaving"
IN_USE = "live"
REASONS = {
    UNWRITTEN: "no token has written this row",
    STALE: "left by an earlier token; nothing reads it again",
    LEAVING: "the next token overwrites it before a query sees it",
    IN_USE: "a later token reads it",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
  """One array of a layout: rows of one array of the raw layout.

  Attributes:
    component: One of `COMPONENTS`.
    layer: Index of the layer.
    array: Its name inside component and layer; empty where there is one.
    rows: The raw rows it consists of, in its own order.
    positions: The token position each row belongs to; -1 where unwritten. A
      compressed entry belongs to the token that completed it.
    width: Leading channels of the raw row that it keeps.
  """

  component: str
  layer: int
  array: str
  rows: Sequence[int]
  positions: Sequence[int]
  width: int

  @property
  def name(self) -> str:
    """"layers.N.COMPONENT" or "layers.N.COMPONENT.ARRAY"."""
    return _name(self.layer, self.component, self.array)

  @property
  def source(self) -> str:
    """The name of the raw array that holds these rows."""
    return _name(
        self.layer, self.component, self.array.removeprefix("previous_")
    )

  @property
  def shape(self) -> tuple[int, int]:
    """(rows, channels)."""
    return len(self.rows), self.width


def _name(layer: int, component: str, array: str) -> str:
  return ".".join(filter(None, ("layers", str(layer), component, array)))


def series(config: config_lib.DeepseekV4Config, layer: int) -> int:
  """Parts of a compressor's projection: 2 in a CSA layer, 1 in an HCA one."""
  return 2 if config.attentions[layer] == config_lib.CSA else 1


def parts(
    config: config_lib.DeepseekV4Config, length: int, layout: str
) -> tuple[Part, ...]:
  """Returns the arrays of a layout, in canonical order.

  Args:
    config: The decoder's.
    length: Tokens seen, T.
    layout: One of `LAYOUTS`.

  Raises:
    HarnessError: the layout is unknown or the length is negative.

  Source: specification of DeepSeek-V4, section 11; order of components from
    the definition of composite fingerprints.
  """
  if layout not in LAYOUTS or length < 0:
    raise refusal.HarnessError(
        f"{layout=}, {length=}: a layout is one of {LAYOUTS}, a length is not"
        " negative."
    )
  return tuple(
      part
      for component in COMPONENTS
      for layer in range(config.num_layers)
      for part in _of_layer(config, length, layout, component, layer)
  )


def _of_layer(c, length, layout, component, layer) -> list[Part]:
  rate, kind = c.rate(layer), c.attentions[layer]
  dim = c.index_dim if component == INDEXER else c.head_dim
  if component == WINDOW:
    rows, positions = _window(c.window, length, layout)
    return [Part(component, layer, "", rows, positions, dim)]
  if not rate or component == INDEXER and kind != config_lib.CSA:
    return []
  count = length // rate
  entries = (range(count), range(rate - 1, count * rate, rate), dim)
  if component == COMPRESSED:
    return [Part(component, layer, "", *entries)]
  found = [
      Part(component, layer, prefix + array, *block)
      for array in ("kv", "score")
      for prefix, block in _blocks(
          rate, series(c, layer), dim, length, layout
      ).items()
  ]
  if component == INDEXER:
    found.append(Part(component, layer, "keys", *entries))
  return found


def _latest(length: int, rows: int, row: int) -> int:
  """The last position below `length` that is `row` modulo `rows`, or -1."""
  return max(-1, length - 1 - (length - 1 - row) % rows)


def _window(window, length, layout) -> tuple[Sequence[int], Sequence[int]]:
  if layout == RAW:
    return range(window), [_latest(length, window, s) for s in range(window)]
  hidden = window - (layout == CARRIED)
  positions = range(max(0, length - hidden), length)
  return [p % window for p in positions], positions


def _blocks(rate, num_series, dim, length, layout) -> dict[str, tuple]:
  """{prefix of the array: (rows, positions, width)} of a compressor."""
  start = length - length % rate
  has_previous = num_series == 2
  offset = rate if has_previous else 0
  before = range(start - rate, start) if start else [-1] * rate
  if layout == RAW:
    current = [_latest(length, rate, row) for row in range(rate)]
    positions = [*(before if has_previous else ()), *current]
    return {"": (range(len(positions)), positions, num_series * dim)}
  blocks = {
      "": (
          range(offset, offset + length - start),
          range(start, length),
          num_series * dim,
      )
  }
  if has_previous:
    complete = (range(rate), before, dim) if start else ((), (), dim)
    blocks = {"previous_": complete, **blocks}
  return blocks


def status(
    config: config_lib.DeepseekV4Config, length: int
) -> dict[str, np.ndarray]:
  """Says of every value of the raw layout what it is to later tokens.

  Returns:
    {array name: words of `REASONS`, [row, half]}. The compressors of CSA
    layers have two halves of channels, every other row is one.
  """
  marks = {}
  for part in parts(config, length, RAW):
    halves = 1
    if part.component in (COMPRESSOR, INDEXER) and part.array != "keys":
      halves = series(config, part.layer)
    words = np.where(np.array(part.positions, int) < 0, UNWRITTEN, STALE)
    marks[part.name] = np.repeat(words[:, None], halves, axis=1)
  widths = {p.name: p.width for p in parts(config, length, RAW)}
  for layout, word in ((LIVE, LEAVING), (CARRIED, IN_USE)):
    for part in parts(config, length, layout):
      mark = marks[part.source]
      halves = part.width * mark.shape[1] // widths[part.source]
      mark[np.array(part.rows, int), :halves] = word
  return marks
