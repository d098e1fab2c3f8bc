"""What the codes of a report mean, in words.

A report is data: verdict words, level numbers, names of taps. A page, a table
and a terminal must say the same about them, to readers who know neither the
project nor its names, so the phrases live here once. Nothing here decides
anything, and every text from outside goes through `plain` before it reaches a
terminal.

Layer: reports. Imports contracts.
"""

from collections.abc import Mapping
import math

from moejax.contracts import verdict

# {level: (what is compared, the question it answers)}.
LEVELS = {
    "L0": ("token ids and text", "visible behaviour"),
    "L1": ("logits", "decision before the token"),
    "L2": ("persistent state", "does the difference cross tokens"),
    "L3": ("residual stream", "first layer"),
    "L4": ("single operations", "first operator and contract clause"),
}

# {verdict: (mark, words)}. The mark tells them apart without colour.
VERDICTS = {
    verdict.SAME_BITS: ("=", "same bits"),
    verdict.WITHIN_RULE: ("≈", "within rule"),
    verdict.BEYOND_RULE: ("≠", "beyond rule"),
    verdict.MISSING: ("?", "missing"),
    verdict.UNSUPPORTED: ("–", "unsupported"),
}

MEANINGS = {
    verdict.SAME_BITS: "every element is equal, bit by bit",
    verdict.WITHIN_RULE: "some bits differ, by no more than the rule allows",
    verdict.BEYOND_RULE: "the difference is larger than the rule allows",
    verdict.MISSING: "not there on both sides, so it could not be compared",
    verdict.UNSUPPORTED: "legal, but not known to this project",
}

OVERALL = {
    verdict.CONFORMANT: ("=", "Conformant"),
    verdict.NOT_CONFORMANT: ("≠", "Not conformant"),
    verdict.INCOMPLETE: ("?", "Incomplete"),
    verdict.UNSUPPORTED: ("–", "Unsupported"),
}

ARITHMETICS = {
    "portable": (
        "every operation has one right answer, so the bits must be equal"
    ),
    "native": (
        "what the machines really compute; bits may differ within a rule that"
        " names its source"
    ),
}

KINDS = {
    "values": "the values differ",
    "dtype": "the dtypes differ",
    "shape": "the shapes differ",
    "boundary_tie": (
        "a tie: the last selected and the first rejected score are equal, and"
        " the two sides kept different ones"
    ),
    "order_tie": (
        "a tie: equal scores inside the selection, listed in another order"
    ),
}

# {field of a combine contract: what it fixes}.
CLAUSES = {
    "gate_site": "where the gate multiplies",
    "gate_dtype": "dtype to which the gate is rounded first",
    "operand": "dtype of each gated term",
    "accumulator": "dtype of each partial sum",
    "order": "which term is added first",
    "permutations": "the explicit order of the terms",
    "start": "what the sum starts from",
    "round_before_shared": "rounding before the shared expert is added",
    "output": "dtype of the result",
    "contraction": "product and sum rounded apart, or once together",
    "subnormals": "whether subnormal numbers are kept",
    "rounding": "how float32 becomes bfloat16",
    "nan": "the bits of a NaN result",
}

# {name of a contract of packed experts: what it does}.
PACKED = {
    "dequantized": (
        "the words of a layer are made wide for each call, with one rounding a"
        " weight"
    ),
    "marlin_moe_hopper": (
        "vLLM's Marlin: each weight is made wide where it multiplies, along"
        " K-streams and slices of a plan; the routes of all prompts of a step"
        " are planned together"
    ),
}

# Longest prefix of a tap's name -> what the operation does.
_OPERATIONS = {
    "positions": "the position of each token",
    "embed": "the embedding of the token",
    "rotary": "the table of rotary positions",
    "input_norm": "the norm before attention",
    "attention.q_proj": "the projection to queries",
    "attention.k_proj": "the projection to keys",
    "attention.v_proj": "the projection to values",
    "attention.q_norm": "the norm of the queries",
    "attention.k_norm": "the norm of the keys",
    "attention.q_rotary": "the rotation of the queries",
    "attention.k_rotary": "the rotation of the keys",
    "attention.state_keys": "the keys kept for later tokens",
    "attention.state_values": "the values kept for later tokens",
    "attention.scores": "queries times keys",
    "attention.scaled": "the scaling of the attention scores",
    "attention.masked": "the mask of the attention scores",
    "attention.softmax": "the softmax of attention",
    "attention.probabilities": "the attention weights",
    "attention.values": "the weighted sum of the values",
    "attention.o_proj": "the output projection of attention",
    "attention_hc": "the hyper-connection before attention",
    "attention_hc.sinkhorn": "the Sinkhorn normalisation before attention",
    "attention.q_a_proj": "the down-projection of the queries",
    "attention.q_a_norm": "the norm of the query latent",
    "attention.q_b_proj": "the up-projection of the queries",
    "attention.q_b_norm": "the norm of each query head",
    "attention.q_turn": "the rotary embedding of the queries",
    "attention.kv_proj": "the projection to keys that are values",
    "attention.kv_norm": "the norm of the keys that are values",
    "attention.kv_turn": "the rotary embedding of the keys",
    "attention.state_kv": "the keys kept for later tokens, values at once",
    "attention.compressor": "the compression of windows of keys",
    "attention.indexer.compressor": "the compression of the indexer's keys",
    "attention.indexer": "the indexer's scores of compressed entries",
    "attention.indexer.q_b_proj": "the projection to the indexer's queries",
    "attention.indexer.q_turn": "the rotary embedding of the indexer's queries",
    "attention.indexer.q_simulation": "quantised queries of the indexer",
    "attention.input_quantized": "the quantised input of attention",
    "attention.q_a_quantized": "the quantised query latent",
    "attention.kv_quantized": "the quantised keys that are values",
    "attention.online": "the softmax of attention, block by block",
    "attention.o_a_quantized": "the quantised input of the up-projection",
    "attention.indexer.visible": "the choice of compressed entries",
    "attention.shifted": "attention scores and sink minus their maximum",
    "attention.softmax_with_sink": "the softmax of attention with its sink",
    "attention.output_turn": "the inverse rotary embedding of the output",
    "attention.o_a_proj": "the grouped down-projection of the output",
    "attention.o_b_proj": "the up-projection of the output",
    "attention_mix": "the mixing of the residual streams after attention",
    "streams_after_attention": "the residual streams after attention",
    "moe_hc": "the hyper-connection before the experts",
    "moe_hc.sinkhorn": "the Sinkhorn normalisation before the experts",
    "moe.router.softplus": "the softplus of the router's projection",
    "moe.router.biased": "the router's scores with the balancing bias",
    "moe.shared": "the shared expert",
    "moe.sum": "routed experts plus shared expert",
    "moe_mix": "the mixing of the residual streams after the experts",
    "streams": "the residual streams after the layer",
    "head_hc": "the collapse of the residual streams before the head",
    "after_attention": "the residual stream after attention",
    "mlp_norm": "the norm before the experts",
    "moe.router.logits": "the router's projection",
    "moe.router.scores": "the router's scores",
    "moe.router.ids": "the choice of experts",
    "moe.router": "the gates of the chosen experts",
    "moe.experts.gate_up": "the experts' first projection",
    "moe.experts.down": "the experts' second projection",
    "moe.experts.terms": "gate times expert output",
    "moe.experts.combine": "the sum of the experts' outputs",
    "moe.experts.packed_elements": "the count of packed GEMM outputs",
    "moe.experts": "the experts' activation",
    "mlp": "the dense feed-forward part",
    "output": "the residual stream after the layer",
    "final_norm": "the norm before the logits",
    "logits": "the logits",
    "state": "the state after the last step",
    "state.keys": "the keys kept for later tokens",
    "state.values": "the values kept for later tokens",
    "state.window_kv": "the keys kept in the sliding window",
    "state.compressed_kv": "the compressed entries",
    "state.compressor_state": "the tokens of the window not yet compressed",
    "state.indexer_state": "the indexer's entries and open window",
}
# Taps without a group in their name: (group, name).
_ALONE = {
    "positions": ("input", "positions"),
    "embed": ("input", "embedding"),
    "after_attention": ("residual stream", "after attention"),
    "output": ("residual stream", "after the layer"),
    "streams_after_attention": ("residual streams", "after attention"),
    "streams": ("residual streams", "after the layer"),
    "moe.sum": ("MoE", "routed plus shared"),
    "logits": ("head", "logits"),
}
_GROUPS = {
    "q_norm": "query norm",
    "k_norm": "key norm",
    "q_rotary": "query rotary",
    "k_rotary": "key rotary",
    "q_proj": "query projection",
    "k_proj": "key projection",
    "v_proj": "value projection",
    "o_proj": "output projection",
    "mlp_norm": "feed-forward norm",
    "mlp": "feed-forward",
    "ids": "chosen experts",
    # mHC: manifold-constrained hyper-connections.
    "attention_hc": "attention mHC",
    "moe_hc": "MoE mHC",
    "head_hc": "head mHC",
    "attention_mix": "attention mixing",
    "moe_mix": "MoE mixing",
    "q_a_proj": "query down-projection",
    "q_a_norm": "query latent norm",
    "q_b_proj": "query up-projection",
    "q_b_norm": "query head norm",
    "q_turn": "query RoPE",
    "kv_proj": "KV projection",
    "kv_norm": "KV norm",
    "kv_turn": "KV RoPE",
    "turn": "RoPE",
    "output_turn": "output inverse RoPE",
    "state_kv": "state KV",
    "o_a_proj": "output down-projection",
    "o_b_proj": "output up-projection",
    "visible": "chosen entries",
    "state": "final state",
    "window_kv": "window KV",
    "compressed_kv": "compressed KV",
    "compressor_state": "compressor",
    "indexer_state": "indexer",
    "kv": "KV",
    "previous_kv": "previous KV",
}


def operation(tap: str) -> str:
  """Says what a tap's operation does, or "" for an unknown one."""
  parts = tap.split(".")
  for end in range(len(parts), 0, -1):
    found = _OPERATIONS.get(".".join(parts[:end]))
    if found:
      return found
  return ""


def readable(tap: str) -> tuple[str, str]:
  """Returns (group, name) of a tap, such as ("query norm", "mean")."""
  if tap in _ALONE:
    return _ALONE[tap]
  *group, leaf = (
      _GROUPS.get(word, word.replace("_", " ")) for word in tap.split(".")
  )
  if len(group) > 1 and group[0] in ("attention", "moe"):
    group = group[1:]
  return " ".join(group), leaf


def choice(exchange: Mapping) -> str:
  """Says what an exchange chose: "experts, layer 3" or "next token"."""
  if exchange["layer"] is None:
    return "next token"
  kind = "entries" if exchange["tap"].endswith(".visible") else "experts"
  return f"{kind}, layer {exchange['layer']}"


def tap_name(layer: int | None, tap: str) -> str:
  """Returns the full name, such as "layers.3.moe.router.ids"."""
  return tap if layer is None else f"layers.{layer}.{tap}"


def place(layer: int | None) -> str:
  """Says in which layer something lies."""
  return "outside the layers" if layer is None else f"layer {layer}"


def step(index: int) -> str:
  """Says which forward pass of a prompt is meant."""
  return "prefill" if index == 0 else f"decode step {index}"


def element(axes, index) -> str:
  """Writes coordinates with the names of their axes: "token 0, embed 8"."""
  return ", ".join(f"{a} {i}" for a, i in zip(axes, index))


def count(value: int | None) -> str:
  """Writes an integer with separators; a dash for None."""
  return "–" if value is None else f"{value:,}"


def number(value: float | None) -> str:
  """Writes three significant digits; a dash for None."""
  if value is None or math.isnan(value):
    return "–"
  if math.isinf(value):
    return "∞" if value > 0 else "−∞"
  return f"{value:.3g}"


def share(differing: int, elements: int) -> str:
  """Writes a part of a whole in percent: "43 %", "0.2 %", "< 0.1 %"."""
  if not differing or not elements:
    return "0 %"
  percent = 100 * differing / elements
  if percent < 0.1:
    return "< 0.1 %"
  if percent < 9.95:
    return f"{percent:.1f} %"
  # A hundred is for all of them.
  return f"{percent if differing == elements else min(percent, 99):.0f} %"


def plain(text: str) -> str:
  """Replaces what a terminal or XML could take for a command."""
  return "".join(
      c if c.isprintable() else " " if c in "\n\t\r" else "\ufffd"
      for c in str(text)
  )


def plural(number_of: int, noun: str) -> str:
  """Writes "1 prompt" or "6 prompts"."""
  return f"{number_of:,} {noun}{'' if number_of == 1 else 's'}"


def packed(report: Mapping) -> str:
  """Says in one phrase whether packed experts ran packed; "" without any."""
  found = report.get("packed")
  if not found:
    return ""
  state = "ran packed" if found["proven"] else "did NOT run packed"
  return (
      f"the experts {state} ({found['experts']}, {found['layer']}):"
      f" {packed_elements(report)}"
  )


def packed_elements(report: Mapping) -> str:
  """Says how many of the demanded elements came from packed weights."""
  elements, demanded = (
      sum(run[key] for run in report["packed"]["arithmetics"].values())
      for key in ("elements", "demanded")
  )
  return f"{elements:,} of {demanded:,} elements came from packed weights"


def rules(report: Mapping) -> list[str]:
  """Every rule that a tap was judged by, each once, in order."""
  return list(dict.fromkeys(
      tap["rule"]
      for part in report["arithmetics"].values()
      for tap in part["taps"]
      if tap["rule"]
  ))


def reference_name(report: Mapping) -> str:
  """Names the reference with its version, such as "transformers 5.24.0"."""
  about = report.get("reference") or {}
  backend = about.get("backend", "the reference")
  name = f"{backend} {about.get(backend, '')}".strip()
  if "wide_weights_digest" in about:
    name += " over the weights made wide"
  return f"{name}, from a capsule" if about.get("capsule") else name
