"""The names of observed activations, their axes and their level.

Both sides of a comparison use these names by value, so a capsule needs no
code of ours to be read. A name is the tap's path in the decoder; the table
lists each once, without the layer. Order of execution is the order in which
the decoder shows its taps.

Levels: L0 token ids and text; L1 logits; L2 the persistent state; L3 the
residual stream after attention and after each layer; L4 single operations.

Layer: protocols. Axes: contracts/axes.py.
"""

import re

from moejax.protocols import deepseek_v4_taps

_NORM = {
    "square": "token,embed",
    "mean": "token,one",
    "plus_epsilon": "token,one",
    "rsqrt": "token,one",
    "normalized": "token,embed",
    "rounded": "token,embed",
    "output": "token,embed",
}


def _norm(prefix: str, heads: str = "") -> dict[str, str]:
  """The taps of a norm; per-head norms have a head axis and head_dim."""
  out = {}
  for name, axes in _NORM.items():
    if heads:
      axes = axes.replace("token,", f"token,{heads},").replace(
          "embed", "head_dim"
      )
    out[f"{prefix}.{name}"] = axes
  return out


def _rotary(prefix: str, heads: str) -> dict[str, str]:
  axes = f"token,{heads},head_dim"
  return {f"{prefix}.{n}": axes for n in ("times_cos", "times_sin", "rotated")}


_QWEN3_MOE: dict[str, str] = {
    "positions": "token",
    "embed": "token,embed",
    "rotary.inverse_frequencies": "half_dim",
    "rotary.angle": "token,half_dim",
    **{
        f"rotary.{name}": "token,head_dim"
        for name in (
            "cosine",
            "cosine_scaled",
            "sine",
            "sine_scaled",
            "cos",
            "sin",
        )
    },
    **_norm("input_norm"),
    "attention.q_proj": "token,hidden",
    "attention.k_proj": "token,hidden",
    "attention.v_proj": "token,hidden",
    **_norm("attention.q_norm", "head"),
    **_norm("attention.k_norm", "kv_head"),
    **_rotary("attention.q_rotary", "head"),
    **_rotary("attention.k_rotary", "kv_head"),
    "attention.state_keys": "token,kv_head,head_dim",
    "attention.state_values": "token,kv_head,head_dim",
    **{
        f"attention.{name}": "head,token,key"
        for name in ("scores", "scaled", "masked", "softmax", "probabilities")
    },
    "attention.values": "token,head,head_dim",
    "attention.o_proj": "token,embed",
    "after_attention": "token,embed",
    **_norm("mlp_norm"),
    "moe.router.logits": "token,expert",
    "moe.router.scores": "token,expert",
    "moe.router.ids": "token,slot",
    "moe.router.gate_sum": "token,one",
    "moe.router.normalized": "token,slot",
    "moe.router.gates": "token,slot",
    "moe.experts.gated_input": "token,slot,embed",
    "moe.experts.gate_up": "token,slot,two_hidden",
    "moe.experts.silu": "token,slot,hidden",
    "moe.experts.activation": "token,slot,hidden",
    "moe.experts.gated_activation": "token,slot,hidden",
    "moe.experts.down": "token,slot,embed",
    "moe.experts.terms": "token,slot,embed",
    "moe.experts.combine": "token,embed",
    "moe.experts.packed_elements": "token,slot,gemm",
    "mlp.gate_proj": "token,hidden",
    "mlp.silu": "token,hidden",
    "mlp.up_proj": "token,hidden",
    "mlp.activation": "token,hidden",
    "mlp.down_proj": "token,embed",
    "output": "token,embed",
    **_norm("final_norm"),
    "logits": "token,vocab",
}
# {name without the layer: axes}, of all architectures.
TAPS: dict[str, str] = (
    _QWEN3_MOE | deepseek_v4_taps.TAPS | deepseek_v4_taps.VARIANT_TAPS
)
ROUTE_IDS = "moe.router.ids"
# How a run was done and no value of the model: a side that does not show it
# misses nothing. `packed/proof.py` holds it against what the run demands.
PACKED_ELEMENTS = "moe.experts.packed_elements"
VISIBLE = "attention.indexer.visible"
# What is left after a run, by component; no tap shows it as a whole.
FINAL_STATE = "state."
_FINAL_STATE = {
    "state.keys": "key,kv_head,head_dim",
    "state.values": "key,kv_head,head_dim",
}
_STATE = (
    "attention.state_keys",
    "attention.state_values",
    "attention.state_kv",
)
_RESIDUAL = ("after_attention", "output", "streams_after_attention", "streams")
_LAYER = re.compile(r"layers\.(\d+)\.(.*)")


def split(name: str) -> tuple[int | None, str]:
  """Returns (layer or None, name without the layer)."""
  match = _LAYER.fullmatch(name)
  return (int(match[1]), match[2]) if match else (None, name)


def join(layer: int | None, tap: str) -> str:
  """The inverse of `split`."""
  return tap if layer is None else f"layers.{layer}.{tap}"


def final_state(name: str) -> str:
  """"layers.N.COMPONENT" of a final state as the name of a tap."""
  layer, component = split(name)
  return join(layer, FINAL_STATE + component)


def axes(name: str) -> tuple[str, ...]:
  """Returns the axis names of a tap.

  Raises:
    ValueError: the tap is not in the table.
  """
  tap = split(name)[1]
  if tap.startswith(FINAL_STATE):
    return tuple(_FINAL_STATE.get(tap, "row,channel").split(","))
  if tap not in TAPS:
    raise ValueError(f"tap {name!r} is not in the table of taps.")
  return tuple(TAPS[tap].split(","))


def level(name: str) -> str:
  """Returns "L1", "L2", "L3" or "L4"."""
  tap = split(name)[1]
  if tap == "logits":
    return "L1"
  if tap in _STATE or tap.startswith(FINAL_STATE):
    return "L2"
  return "L3" if tap in _RESIDUAL else "L4"
