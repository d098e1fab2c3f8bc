"""The observed activations that a training step needs, and no others.

Layer: training.
"""

import jax

from moejax.modules import tap as tap_lib

# The ends of the names of what is kept.
_KEPT = (
    "moe.router.logits",
    "moe.router.ids",
    "attention.softmax_with_sink",
    "attention.indexer.index_scores",
    "attention.indexer.visible",
)


class Watch(tap_lib.Tap):
  """Keeps what losses, balance and statistics are computed from.

  Attributes:
    seen: {full name: value}, filled as the decoder runs.
  """

  def __init__(self):
    super().__init__()
    self.seen: dict[str, jax.Array] = {}

  def observe(self, name, value):
    if name.endswith(_KEPT):
      self.seen[name] = value
    return value

  def by_layer(self, name: str) -> dict[int, jax.Array]:
    """{layer: value} of the taps "layers.<layer>.<name>"."""
    found = {}
    for full, value in self.seen.items():
      _, layer, rest = full.split(".", 2)
      if rest == name:
        found[int(layer)] = value
    return found
