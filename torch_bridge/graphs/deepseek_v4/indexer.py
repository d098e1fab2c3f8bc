"""The operations of an indexer: its own compressor, queries, scores, choice.

Layer: torch_bridge.
"""

from torch_bridge.graphs.deepseek_v4 import compressor
from torch_bridge.graphs.deepseek_v4 import steps


def places(at: str, prefix: str, complete: bool) -> dict[str, steps.Steps]:
  """Returns {module: its steps} of one indexer.

  Args:
    at: The indexer's module, which is a compressor as well.
    prefix: The prefix of its taps.
    complete: Whether the step completes a window.
  """
  found = compressor.places(at, f"{prefix}.compressor", complete)
  # The queries turn by tables of their own, which are the model's.
  found[f"{at}.rotary_emb"] += (
      ("from_int", "positions", False),
      *steps.tables("rotary.compress"),
  )
  found[at] += (
      *steps.turn(f"{prefix}.q_turn"),
      ("topk", f"{prefix}.visible", False),
  )
  return found | {
      f"{at}.q_b_proj": steps.projection(f"{prefix}.q_b_proj"),
      f"{at}.scorer.weights_proj": steps.projection(f"{prefix}.weights_proj"),
      f"{at}.scorer": steps.named(
          prefix,
          ("bmm", "scores"),
          ("mul", "scaled"),
          ("mul", "weights"),
          ("mul", "weighted"),
          ("sum", "index_scores"),
      ),
  }
