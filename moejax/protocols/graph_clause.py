"""Which clause of a DeepSeek-V4 graph a difference falls under.

Layer: protocols. Contract: contracts/deepseek_v4.py.
"""

from moejax.contracts import deepseek_v4 as contract_lib

# Beginning of a tap's name -> the field that decides its roundings; the longest
# beginning counts.
_FIELDS = {
    "rotary": "rotary_tables",
    "attention_hc": "hyper_scale",
    "moe_hc": "hyper_scale",
    "head_hc": "hyper_scale",
    "attention_mix": "hyper_mix",
    "moe_mix": "hyper_mix",
    "streams": "hyper_mix",
    "attention": "attention",
    "attention.q_b_norm": "query_norm",
    "attention.compressor": "compressor",
    "attention.indexer": "indexer",
    "attention.indexer.compressor": "compressor",
    "moe.router.gate_sum": "gate_epsilon",
    "moe.experts": "expert_activation",
    "moe.shared": "expert_activation",
    "logits": "logits",
}
_ROUTER = "moe.router"


def clause(
    tap: str,
    ours: contract_lib.DeepseekV4Contract,
    reference: contract_lib.DeepseekV4Contract,
) -> str:
  """Names the field in which two contracts differ at a tap.

  Args:
    tap: Name without the layer.
    ours: Our decoder's contract.
    reference: The reference's.

  Returns:
    "graph.FIELD: ours X, reference Y"; for a router its differing fields; empty
    where the contracts agree on what decides this tap.
  """
  found = [name for name in _FIELDS if tap.startswith(name)]
  if found:
    field = _FIELDS[max(found, key=len)]
    pair = [getattr(one.graph, field) for one in (ours, reference)]
    return _text("graph", field, *pair) if pair[0] != pair[1] else ""
  if not tap.startswith(_ROUTER):
    return ""
  return "; ".join(
      _text("router", field, *pair)
      for field in ("logits_dtype", "score_dtype", "gate_dtype", "score")
      if len({
          *(pair := [getattr(c.router, field) for c in (ours, reference)])
      }) > 1
  )


def _text(owner: str, field: str, ours, reference) -> str:
  return f"{owner}.{field}: ours {ours}, reference {reference}"
