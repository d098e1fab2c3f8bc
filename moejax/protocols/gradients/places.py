"""Where two backward passes are compared, from the loss down.

A place is the loss, the cotangent of an observed activation, the gradient of a
parameter, or a parameter after the step. The places of a decoder have an order
in which each depends, apart from what the forward pass left, on earlier ones
only, and each names the operations whose rules lie between. So the first place
that differs names the rule at fault, or one of a few.

Layer: protocols.
"""

import dataclasses

from moejax.modules import config as config_lib

LOSS, COTANGENT, GRADIENT, UPDATED = "loss", "cotangent", "gradient", "updated"

_NORM = "multiply, cast, rsqrt, mean, square, share"
_ROTARY = "multiply, half_turn, share, add"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
  """One place.

  Attributes:
    kind: "loss", "cotangent", "gradient" or "updated".
    name: Of the tap, or of the parameter by its dotted path.
    rules: The operations of `backward.RULES` between it and the places before
      it, in the order of execution; "operation: operand" where one operand's
      cotangent is meant.
  """

  kind: str
  name: str
  rules: str

  @property
  def layer(self) -> int | None:
    """The layer, or None outside of them."""
    parts = self.name.split(".")
    return int(parts[1]) if parts[0] == "layers" else None


def of(config: config_lib.DecoderConfig) -> tuple[Place, ...]:
  """Returns the places of a decoder's backward pass, from the loss down."""
  out = [
      Place(LOSS, "loss", "log_softmax, nll_loss (forward)"),
      Place(COTANGENT, "logits", "nll_loss, log_softmax, cast"),
  ]
  if not config.tied_embeddings:
    out.append(Place(GRADIENT, "lm_head", "linear: weight"))
  out += [
      Place(COTANGENT, "final_norm.output", "linear: x"),
      Place(GRADIENT, "final_norm", "multiply: x"),
  ]
  for index in reversed(range(config.num_layers)):
    out += [
        Place(place.kind, f"layers.{index}.{place.name}", place.rules)
        for place in _layer(config, index)
    ]
  head = "" if not config.tied_embeddings else ", linear: weight, share"
  return (
      *out,
      Place(COTANGENT, "embed", _NORM),
      Place(GRADIENT, "embedding", f"lookup: table{head}"),
  )


def _layer(config, index):
  yield Place(COTANGENT, "output", _NORM)
  yield from _sparse(config) if index in config.sparse_layers else _dense()
  yield Place(GRADIENT, "mlp_norm", "multiply: x")
  yield Place(COTANGENT, "after_attention", _NORM)
  yield from _attention(config)
  yield Place(GRADIENT, "input_norm", "multiply: x")


def _sparse(config):
  normalized = config.normalize_gates
  wide = config.dtype == "float32"
  yield Place(COTANGENT, "moe.experts.combine", "add")
  yield Place(
      GRADIENT, "moe.down", "combine, gate_terms: expert_out,"
      " expert_linear: weight",
  )
  yield Place(
      COTANGENT, "moe.experts.silu", "expert_linear: rows, multiply: x"
  )
  yield Place(COTANGENT, "moe.experts.gate", "silu")
  yield Place(
      GRADIENT, "moe.gate_up", "multiply: y, halves, expert_linear: weight"
  )
  if normalized or not wide:
    gates = "normalized" if wide else "gates"
    yield Place(COTANGENT, f"moe.router.{gates}", "gate_terms: gate")
  yield Place(
      COTANGENT,
      "moe.router.logits",
      ("" if wide else "cast, ")
      + ("divide, sum, share, " if normalized else "")
      + "pick, softmax, cast",
  )
  yield Place(GRADIENT, "moe.router", "linear: weight")
  yield Place(
      COTANGENT,
      "mlp_norm.output",
      "expert_linear: rows, dispatch, linear: x, share",
  )


def _dense():
  yield Place(COTANGENT, "mlp.down_proj", "add")
  yield Place(GRADIENT, "mlp.down_proj", "linear: weight")
  yield Place(COTANGENT, "mlp.up_proj", "linear: x, multiply: y")
  yield Place(GRADIENT, "mlp.up_proj", "linear: weight")
  yield Place(COTANGENT, "mlp.gate_proj", "multiply: x, silu")
  yield Place(GRADIENT, "mlp.gate_proj", "linear: weight")
  yield Place(COTANGENT, "mlp_norm.output", "linear: x, share")


def _attention(config):
  def weight(name):
    yield Place(GRADIENT, f"attention.{name}", "linear: weight")
    if config.attention_bias:
      yield Place(GRADIENT, f"attention.{name}_bias", "linear: weight")

  yield Place(COTANGENT, "attention.o_proj", "add")
  yield from weight("o_proj")
  yield Place(COTANGENT, "attention.values", "linear: x")
  yield Place(COTANGENT, "attention.v_proj", "matmul: b")
  yield from weight("v_proj")
  scores = "matmul: a, cast, softmax, cast, scale, matmul"
  for name, operand in (("k", "b"), ("q", "a")):
    yield Place(
        COTANGENT,
        f"attention.{name}_norm.output",
        f"{scores}: {operand}, {_ROTARY}",
    )
    yield Place(GRADIENT, f"attention.{name}_norm", "multiply: x")
    yield Place(COTANGENT, f"attention.{name}_proj", _NORM)
    yield from weight(f"{name}_proj")
  yield Place(COTANGENT, "input_norm.output", "linear: x, share")
