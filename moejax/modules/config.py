"""What a Qwen3-MoE decoder is made of; no arithmetic, no weights.

Layer: modules.
"""

import dataclasses

from moejax.contracts import combine
from moejax.contracts import route


@dataclasses.dataclass(frozen=True, slots=True)
class RopeScaling:
  """How rotary frequencies stretch beyond the trained context.

  Attributes:
    kind: "default" (not at all), "linear" or "yarn".
    factor: Ratio of the new context to the trained one, at least 1.
    original_positions: The trained context; "yarn" only.
    beta_fast: Rotations above which a pair keeps its frequency; "yarn" only.
    beta_slow: Rotations below which a pair is interpolated; "yarn" only.
    mscale: Numerator's coefficient of the attention factor, 0 if unset.
    mscale_all_dim: Denominator's coefficient, 0 if unset.
    attention_factor: Factor on cos and sin; None derives it ("yarn").
    truncate: Whether the ramp's ends are rounded to whole pairs; "yarn" only.
  """

  kind: str = "default"
  factor: float = 1.0
  original_positions: int | None = None
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  mscale: float = 0.0
  mscale_all_dim: float = 0.0
  attention_factor: float | None = None
  truncate: bool = True

  def __post_init__(self):
    if self.kind not in ("default", "linear", "yarn"):
      raise NotImplementedError(f"rotary scaling {self.kind!r}.")
    if self.factor < 1:
      raise ValueError(f"rotary scaling factor={self.factor} is below 1.")


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderConfig:
  """The shape of a Qwen3-MoE decoder.

  Attributes:
    vocab_size: Rows of the embedding table.
    embed: Width of the residual stream.
    num_layers: Decoder layers.
    num_heads: Query heads.
    num_kv_heads: Key and value heads; divides num_heads.
    head_dim: Width of one head; even.
    hidden: Width inside a dense MLP.
    expert_hidden: Width inside an expert.
    num_experts: Experts of a sparse layer.
    top_k: Slots of a route.
    normalize_gates: Whether the gates of a route are divided by their sum.
    sparse_layers: Indices of the layers that have experts.
    norm_epsilon: Added to the mean square of every norm.
    rope_theta: Base of the rotary frequencies.
    rope_scaling: How they stretch.
    max_positions: Positions the model is made for.
    tied_embeddings: Whether the output projection is the embedding table.
    attention_bias: Whether the four attention projections add a bias.
    sliding_window: Keys a query sees, itself included; None means all.
    dtype: Of weights and activations.
  """

  vocab_size: int
  embed: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  hidden: int
  expert_hidden: int
  num_experts: int
  top_k: int
  normalize_gates: bool
  sparse_layers: tuple[int, ...]
  norm_epsilon: float = 1e-6
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling = RopeScaling()
  max_positions: int = 32768
  tied_embeddings: bool = False
  attention_bias: bool = False
  sliding_window: int | None = None
  dtype: str = "bfloat16"

  def __post_init__(self):
    for field in (
        "vocab_size",
        "embed",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "max_positions",
    ):
      if getattr(self, field) < 1:
        raise ValueError(f"{field}={getattr(self, field)} must be positive.")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
          f"num_heads={self.num_heads} is not a multiple of"
          f" num_kv_heads={self.num_kv_heads}."
      )
    if self.head_dim % 2:
      raise ValueError(f"head_dim={self.head_dim} must be even for rotary.")
    if self.sparse_layers and not 1 <= self.top_k <= self.num_experts:
      raise ValueError(
          f"top_k={self.top_k} does not fit num_experts={self.num_experts}."
      )
    if self.sliding_window is not None and self.sliding_window < 1:
      raise ValueError(f"sliding_window={self.sliding_window} sees no key.")
    if self.dtype not in combine.FLOATS:
      raise ValueError(f"dtype={self.dtype!r} is not a float of a contract.")


def router_contract(config: DecoderConfig) -> route.RouterContract:
  """The router of this architecture: softmax in float32 over all experts."""
  return route.RouterContract(
      "qwen3_moe",
      top_k=config.top_k,
      normalize=config.normalize_gates,
      logits_dtype=config.dtype,
      gate_dtype=config.dtype,
  )
