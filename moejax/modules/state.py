"""What outlives one decode step.

The persistent state of a decoder with plain key-value attention is its keys
and values. They go in and come out as one named tuple; nothing is hidden in a
mutable collection.

Layer: modules. Imports nothing from this project.
"""

from typing import Any, NamedTuple


class KVState(NamedTuple):
  """Keys and values of all layers, in fixed-size buffers.

  Attributes:
    keys: One [batch, capacity, kv_head, head_dim] array a layer, after rotary.
    values: The same shape, one array a layer.
    length: Rows written so far; an int, the same for every sequence.
    valid: [batch, capacity] bool. False marks rows of left padding and rows
      not yet written; no token attends to them and no fingerprint covers them.
  """

  keys: tuple[Any, ...]
  values: tuple[Any, ...]
  length: int
  valid: Any
