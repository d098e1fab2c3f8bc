"""The operations of a sparse layer but for its routed experts.

Those are in `expert_events.py`, which all architectures share.

Layer: torch_bridge.
"""

from torch_bridge.graphs.deepseek_v4 import steps


def places(at: str, prefix: str, config, layer: int) -> dict[str, steps.Steps]:
  """Returns {module: its steps} of one sparse layer.

  Args:
    at: Its module.
    prefix: The prefix of its taps.
    config: The model's config.
    layer: Which layer.
  """
  choice = (("add", "biased"), ("topk", "ids"))
  if config.mlp_layer_types[layer] == "hash_moe":
    choice = (("lookup", "ids"),)
  shared = f"{at}.shared_experts"
  return {
      f"{at}.gate": steps.named(
          f"{prefix}.router",
          ("mm", "logits"),
          ("softplus", "softplus"),
          ("sqrt", "scores"),
          *choice,
          ("sum", "gate_sum"),
          ("add", "gate_sum_shifted"),
          ("div", "normalized"),
          ("mul", "gates"),
      ),
      f"{shared}.gate_proj": steps.projection(f"{prefix}.shared.gate_proj"),
      f"{shared}.up_proj": steps.projection(f"{prefix}.shared.up_proj"),
      shared: steps.named(
          f"{prefix}.shared", ("silu", "silu"), ("mul", "activation")
      ),
      f"{shared}.down_proj": steps.projection(f"{prefix}.shared.down_proj"),
      at: (("add", f"{prefix}.sum", False),),
  }
