"""The operations of a compressor, and when it has any.

In a step that completes no window only the projections run.

Layer: torch_bridge.
"""

import numpy as np

from torch_bridge.graphs.deepseek_v4 import steps


def rate(config, layer: int) -> int:
  """Tokens that become one entry in a layer that compresses."""
  return config.compress_rates[config.layer_types[layer]]


def completes(config, layer: int, positions: np.ndarray) -> bool:
  """Whether a step over these positions completes a window of a layer."""
  tokens = rate(config, layer)
  start, end = int(positions[0]), int(positions[-1]) + 1
  return end // tokens > start // tokens


def places(at: str, prefix: str, complete: bool) -> dict[str, steps.Steps]:
  """Returns {module: its steps} of one compressor.

  Args:
    at: The compressor's module.
    prefix: The prefix of its taps.
    complete: Whether the step completes a window.
  """
  found: dict[str, steps.Steps] = {
      f"{at}.kv_proj": steps.projection(f"{prefix}.kv_proj"),
      f"{at}.gate_proj": steps.projection(f"{prefix}.gate_proj"),
      f"{at}.kv_norm": (),
      f"{at}.rotary_emb": (),
      at: (),
  }
  if complete:
    found[f"{at}.kv_norm"] = steps.norm(f"{prefix}.norm")
    found[f"{at}.rotary_emb"] = (
        ("from_int", None, False),
        *steps.tables(f"{prefix}.rotary"),
    )
    found[at] = (
        *steps.named(
            prefix,
            ("add", "scores"),
            ("_softmax", "softmax"),
            ("cast", "weights"),
            ("mul", "products"),
            ("sum", "pooled"),
        ),
        *steps.turn(f"{prefix}.turn"),
    )
  return found
