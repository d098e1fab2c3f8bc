"""The operations of hyper-connections: before a block, behind it, at the end.

Layer: torch_bridge.
"""

from torch_bridge.graphs.deepseek_v4 import steps


def before_block(prefix: str, config) -> steps.Steps:
  """In front of a block: weights, the mixing matrix, the block's input."""
  rounds = 2 * config.hc_sinkhorn_iters - 1
  normalisation = (
      ("sum", None, False),
      ("add", None, False),
      ("div", f"{prefix}.sinkhorn", False),
  )
  return (
      ("mm", f"{prefix}.mixes", False),
      *_weights(f"{prefix}.pre", "add", f"{prefix}.pre"),
      *_weights(f"{prefix}.post", "mul", f"{prefix}.post"),
      *steps.named(
          prefix,
          ("mul", "comb_scaled"),
          ("add", "comb_shifted"),
          ("_softmax", "comb_softmax"),
          ("add", "comb_plus_epsilon"),
      ),
      *normalisation * rounds,
      *_collapse(prefix),
  )


def after_block(prefix: str) -> steps.Steps:
  """Behind a block, but for the sum: its output and the mixed streams."""
  return steps.named(
      prefix,
      ("cast", "post"),
      ("mul", "expanded"),
      ("cast", "comb"),
      ("bmm", "mixed"),
  )


def head(prefix: str) -> steps.Steps:
  """At the end: one weight a stream, and their sum."""
  return (
      ("mm", f"{prefix}.mixes", False),
      *_weights(f"{prefix}.pre", "add", f"{prefix}.pre"),
      *_collapse(prefix),
  )


def _weights(prefix: str, last: str, result: str) -> steps.Steps:
  """One layer of a perceptron: scale, shift, sigmoid, and one more."""
  return (
      ("mul", f"{prefix}_scaled", False),
      ("add", f"{prefix}_shifted", False),
      ("sigmoid", f"{prefix}_sigmoid", False),
      (last, result, False),
  )


def _collapse(prefix: str) -> steps.Steps:
  """The weighted sum of the streams."""
  return steps.named(
      prefix, ("mul", "weighted"), ("sum", "summed"), ("cast", "collapsed")
  )
