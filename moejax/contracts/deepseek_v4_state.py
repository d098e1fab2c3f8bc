"""What outlives one decode step of a DeepSeek-V4 decoder.

Every layer keeps a window of keys that are values at once; layers that
compress also keep their compressed entries and the tokens of the window that
is not yet complete. All buffers have a fixed size, so that a step compiles
once; `lengths` says what of them is alive.

Layer: contracts. Imports nothing from this project.
"""

from typing import Any, NamedTuple


class CompressorState(NamedTuple):
  """One compressor, of the attention or of its indexer; rate r, width d.

  A token at position p projects to f * d channels: f = 2 in a CSA layer (the
  first half goes into the next window's entry, the second into its own), f = 1
  in an HCA layer. Row j of a window is the token with p mod r = j.

  Attributes:
    kv: [batch, r, f * d]: the latest token of each row. Rows of a window that
      is not complete are alive, the others are stale.
    gate: The same for the gate projection, without the position bias.
    previous_kv: [batch, r, f * d]: kv of the last complete window; None where
      f = 1. Only the first half is ever read again.
    previous_score: The same for gate plus position bias, float32; minus
      infinity before the first window is complete.
    entries: [batch, capacity, d]: compressed entries, oldest first; after T
      tokens T // r of them are alive.
  """

  kv: Any
  gate: Any
  previous_kv: Any | None
  previous_score: Any | None
  entries: Any


class LayerState(NamedTuple):
  """One layer.

  Attributes:
    window: [batch, window, head_dim]: position p lies in row p mod window.
    compressor: None in an SWA layer.
    indexer: None but in a CSA layer.
  """

  window: Any
  compressor: CompressorState | None
  indexer: CompressorState | None


class DeepseekV4State(NamedTuple):
  """All layers.

  Attributes:
    layers: One `LayerState` a layer.
    lengths: [batch] int32: tokens seen by each sequence.
  """

  layers: tuple[LayerState, ...]
  lengths: Any
