"""The operations of attention, and of what compresses for it.

Layer: torch_bridge.
"""

import numpy as np

from torch_bridge.graphs.deepseek_v4 import compressor
from torch_bridge.graphs.deepseek_v4 import indexer
from torch_bridge.graphs.deepseek_v4 import steps

_CSA = "compressed_sparse_attention"
_SLIDING = "sliding_attention"


def places(
    at: str, prefix: str, config, layer: int, positions: np.ndarray
) -> dict[str, steps.Steps]:
  """Returns {module: its steps} of one layer's attention.

  Args:
    at: The attention's module.
    prefix: The prefix of its taps.
    config: The model's config.
    layer: Which layer.
    positions: Of the step's tokens, [token].
  """
  kind = config.layer_types[layer]
  append = ("append", f"{prefix}.state_kv", False)
  found = {
      f"{at}.q_a_proj": steps.projection(f"{prefix}.q_a_proj"),
      f"{at}.q_a_norm": steps.norm(f"{prefix}.q_a_norm"),
      f"{at}.q_b_proj": steps.projection(f"{prefix}.q_b_proj"),
      f"{at}.q_b_norm": steps.bare_norm(f"{prefix}.q_b_norm"),
      f"{at}.kv_proj": steps.projection(f"{prefix}.kv_proj"),
      f"{at}.kv_norm": steps.norm(f"{prefix}.kv_norm"),
      at: (
          *steps.turn(f"{prefix}.q_turn"),
          *steps.turn(f"{prefix}.kv_turn"),
          # Keys and values are one; a sliding layer appends them apart.
          *(append,) * (2 if kind == _SLIDING else 1),
          *steps.named(
              prefix,
              ("bmm", "scores"),
              ("mul", "scaled"),
              ("add", "masked"),
              ("sub", "shifted"),
              ("_softmax", "softmax_with_sink"),
              ("cast", "probabilities"),
              ("bmm", "values"),
          ),
          *steps.turn(f"{prefix}.output_turn"),
      ),
      f"{at}.o_a_proj": (("bmm", f"{prefix}.o_a_proj", False),),
      f"{at}.o_b_proj": steps.projection(f"{prefix}.o_b_proj"),
  }
  if kind == _SLIDING:
    return found
  inner = f"{at}.compressor"
  complete = compressor.completes(config, layer, positions)
  found |= compressor.places(inner, f"{prefix}.compressor", complete)
  if kind == _CSA:
    found |= indexer.places(f"{inner}.indexer", f"{prefix}.indexer", complete)
  return found
