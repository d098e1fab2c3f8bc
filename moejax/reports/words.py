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
        " the two sides kept different experts"
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
    "moe.experts": "the experts' activation",
    "mlp": "the dense feed-forward part",
    "output": "the residual stream after the layer",
    "final_norm": "the norm before the logits",
    "logits": "the logits",
}
# Taps without a group in their name: (group, name).
_ALONE = {
    "positions": ("input", "positions"),
    "embed": ("input", "embedding"),
    "after_attention": ("residual stream", "after attention"),
    "output": ("residual stream", "after the layer"),
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
  *group, leaf = tap.split(".")
  if len(group) > 1:
    group = group[1:]
  return tuple(
      _GROUPS.get(word, word.replace("_", " "))
      for word in (" ".join(group), leaf)
  )


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
  return f"{name}, from a capsule" if about.get("capsule") else name
