"""Which tensors make which parameter of DeepSeek-V4, in three dialects.

  upstream   the released checkpoint: embed.weight, layers.0.attn.wq_a.weight
  hybrid     what save_pretrained writes: the same leaves under model., five
             names as in memory, one as in neither
  memory     the keys of transformers' state_dict; experts stacked

The order of rows is that of `parameters.leaves`. A row's tensors are laid one
after another and viewed in our shape, which for experts gives gate_up from
w1 of expert 0, w3 of expert 0, w1 of expert 1, ...: the gate rows (w1) first.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Collection
import dataclasses

from moejax.contracts import document
from moejax.contracts import refusal
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import parameters

UPSTREAM, HYBRID, MEMORY = "upstream", "hybrid", "memory"
DIALECTS = (UPSTREAM, HYBRID, MEMORY)
# Blocks that predict further tokens; no part of the decoder.
IGNORED = "mtp."
FP8, FP4 = "fp8", "fp4"

# Our path -> (upstream, in memory).
_WHOLE = {
    "embedding": ("embed.weight", "model.embed_tokens.weight"),
    "final_norm": ("norm.weight", "model.norm.weight"),
    "lm_head": ("head.weight", "lm_head.weight"),
    **{f"head_hc.{p}": (f"hc_head_{p}", f"model.hc_head.hc_{p}")
       for p in ("fn", "base", "scale")},
}
_COMPRESSOR = {
    "kv_proj": ("wkv.weight", "kv_proj.weight"),
    "gate_proj": ("wgate.weight", "gate_proj.weight"),
    "position_bias": ("ape", "position_bias"),
    "norm": ("norm.weight", "kv_norm.weight"),
}
_IN_LAYER = {
    "input_norm": ("attn_norm.weight", "input_layernorm.weight"),
    "mlp_norm": ("ffn_norm.weight", "post_attention_layernorm.weight"),
    **{f"attention_hc.{p}": (f"hc_attn_{p}", f"attn_hc.{p}")
       for p in ("fn", "base", "scale")},
    **{f"moe_hc.{p}": (f"hc_ffn_{p}", f"ffn_hc.{p}")
       for p in ("fn", "base", "scale")},
    **{f"attention.{ours}": (f"attn.{up}", f"self_attn.{memory}")
       for ours, up, memory in (
           ("q_a_proj", "wq_a.weight", "q_a_proj.weight"),
           ("q_a_norm", "q_norm.weight", "q_a_norm.weight"),
           ("q_b_proj", "wq_b.weight", "q_b_proj.weight"),
           ("kv_proj", "wkv.weight", "kv_proj.weight"),
           ("kv_norm", "kv_norm.weight", "kv_norm.weight"),
           ("sinks", "attn_sink", "sinks"),
           ("o_a_proj", "wo_a.weight", "o_a_proj.weight"),
           ("o_b_proj", "wo_b.weight", "o_b_proj.weight"),
           ("indexer.q_b_proj", "indexer.wq_b.weight",
            "compressor.indexer.q_b_proj.weight"),
           ("indexer.weights_proj", "indexer.weights_proj.weight",
            "compressor.indexer.scorer.weights_proj.weight"),
       )},
    **{f"attention.compressor.{ours}":
       (f"attn.compressor.{up}", f"self_attn.compressor.{memory}")
       for ours, (up, memory) in _COMPRESSOR.items()},
    **{f"attention.indexer.compressor.{ours}":
       (f"attn.indexer.compressor.{up}",
        f"self_attn.compressor.indexer.{memory}")
       for ours, (up, memory) in _COMPRESSOR.items()},
    "moe.router": ("ffn.gate.weight", "mlp.gate.weight"),
    "moe.table": ("ffn.gate.tid2eid", "mlp.gate.tid2eid"),
    "moe.bias": ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    **{f"moe.shared.{ours}":
       (f"ffn.shared_experts.{up}.weight", f"mlp.shared_experts.{ours}.weight")
       for ours, up in (
           ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))},
}
_EXPERTS = {
    "moe.gate_up": (("w1", "w3"), "mlp.experts.gate_up_proj"),
    "moe.down": (("w2",), "mlp.experts.down_proj"),
}
# What the released checkpoint stores in eight bits.
_EIGHT_BITS = frozenset((
    *(f"attention.{p}"
      for p in ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj")),
    "attention.indexer.q_b_proj",
    *(f"moe.shared.{p}" for p in ("gate_proj", "up_proj", "down_proj")),
))
_SHOWN = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
  """One parameter and where it comes from.

  Attributes:
    path: Our dotted path.
    shape: Our shape.
    dtype: Our dtype.
    names: The tensors that make it, in order.
    source_shape: The shape of each of them, once unpacked.
    packed: The block-scaled formats in which they may be stored; the first is
      that of the release. Empty where there is none.
  """

  path: str
  shape: tuple[int, ...]
  dtype: str
  names: tuple[str, ...]
  source_shape: tuple[int, ...]
  packed: tuple[str, ...]

  def __post_init__(self):
    if not {*self.packed} <= {FP8, FP4}:
      raise ValueError(f"{self.path}: packed={self.packed} names no format.")


def scale_of(name: str) -> str:
  """The name of the scales of a packed tensor."""
  return name.removesuffix(".weight") + ".scale"


def table(
    config: config_lib.DeepseekV4Config, dialect: str
) -> tuple[Row, ...]:
  """Returns the rows of a decoder, in the order of `parameters.leaves`.

  Only upstream names have packed formats: what transformers writes of a packed
  model has other names for its scales, and is not read here.

  Raises:
    ValueError: the dialect is not one of `DIALECTS`.
  """
  document.check_choice("names", "dialect", dialect, DIALECTS)
  leaves = parameters.leaves(config)
  return tuple(
      _row(path, shape, dtype, dialect)
      for path, (shape, dtype) in leaves.items()
  )


def find_dialect(
    held: Collection[str], config: config_lib.DeepseekV4Config, origin: str
) -> str:
  """Returns the one dialect that a checkpoint's names speak.

  Args:
    held: Its names.
    config: The decoder.
    origin: Names the checkpoint in messages.

  Raises:
    refusal.HarnessError: names of several dialects, or of none.
  """
  names = {
      dialect: {n for row in table(config, dialect) for n in row.names}
      for dialect in DIALECTS
  }
  known = set().union(*names.values()).intersection(held)
  if not known:
    raise refusal.HarnessError(
        f"{origin}: the names of its tensors are of no known dialect."
    )
  best = max(DIALECTS, key=lambda dialect: len(known & names[dialect]))
  strange = sorted(known - names[best])
  if strange:
    raise refusal.HarnessError(
        f"{origin} mixes dialects: {len(known) - len(strange)} tensors have"
        f" names of {best}, {len(strange)} have not:"
        f" {', '.join(strange[:_SHOWN])}."
    )
  return best


def _row(path: str, shape: tuple[int, ...], dtype: str, dialect: str) -> Row:
  """Returns the row of one parameter."""
  in_memory = dialect == MEMORY
  if path in _WHOLE:
    upstream, memory = _WHOLE[path]
    # The hybrid keeps the upstream name of the head alone.
    plain = dialect == UPSTREAM or (dialect == HYBRID and path == "lm_head")
    name = upstream if plain else memory
    return Row(path, shape, dtype, (name,), shape, ())
  _, layer, part = path.split(".", 2)
  at = f"layers.{layer}" if dialect == UPSTREAM else f"model.layers.{layer}"
  if part in _IN_LAYER:
    name = _IN_LAYER[part][in_memory]
    if dialect == HYBRID and part == "attention.kv_norm":
      name = "attn.norm.weight"
    packed = (FP8,) if dialect == UPSTREAM and part in _EIGHT_BITS else ()
    return Row(path, shape, dtype, (f"{at}.{name}",), shape, packed)
  projections, stacked = _EXPERTS[part]
  if in_memory:
    return Row(path, shape, dtype, (f"{at}.{stacked}",), shape, ())
  names = tuple(
      f"{at}.ffn.experts.{expert}.{projection}.weight"
      for expert in range(shape[0])
      for projection in projections
  )
  packed = (FP4, FP8) if dialect == UPSTREAM else ()
  source_shape = (shape[1] // len(projections), shape[2])
  return Row(path, shape, dtype, names, source_shape, packed)
