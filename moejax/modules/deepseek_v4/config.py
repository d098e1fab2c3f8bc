"""What a DeepSeek-V4 decoder is made of; no arithmetic, no weights.

Layer: modules.
"""

import dataclasses

from moejax.contracts import combine
from moejax.contracts import route
from moejax.modules import config as config_lib

# Sliding window alone; with compressed sparse attention; with heavily
# compressed attention.
SWA, CSA, HCA = "swa", "csa", "hca"
ATTENTIONS = (SWA, CSA, HCA)


@dataclasses.dataclass(frozen=True, slots=True)
class DeepseekV4Config:
  """The shape of a DeepSeek-V4 decoder.

  Attributes:
    vocab_size: Rows of the embedding table.
    embed: Width of one residual stream.
    attentions: One of `ATTENTIONS` for each layer.
    hash_layers: Indices of the layers whose route is looked up by token id.
    num_heads: Query heads; all read one head that is key and value at once.
    head_dim: Width of one head.
    rotary_dim: Trailing channels of a head that turn; even.
    query_rank: Width between the two query projections.
    window: Last positions that a query sees uncompressed, itself included.
    csa_rate: Tokens that become one compressed entry in a CSA layer.
    hca_rate: The same in an HCA layer.
    output_groups: Groups of heads with their own first output projection.
    output_rank: Width of one group after it.
    index_heads: Query heads of the indexer.
    index_dim: Width of one of them.
    index_top_k: Compressed entries that a query sees in a CSA layer.
    num_experts: Routed experts of a layer.
    top_k: Slots of a route.
    expert_hidden: Width inside an expert, routed or shared.
    gate_scale: Factor on the gates of a route, after normalisation.
    swiglu_limit: Bound on the gate (above) and on the up projection (both
      sides) inside an expert.
    streams: Residual streams of the hyper-connections.
    sinkhorn_iterations: Normalisations of columns; of rows, one fewer.
    hyper_epsilon: Added in the hyper-connections' weights and normalisers.
    norm_epsilon: Added to the mean square of every norm.
    rope_theta: Base of the rotary frequencies of SWA layers.
    compress_theta: Base in layers that compress.
    compress_scaling: How frequencies stretch in layers that compress.
    max_positions: Positions the model is made for.
    dtype: Of activations and of the weights that are not kept in float32.
  """

  vocab_size: int
  embed: int
  attentions: tuple[str, ...]
  hash_layers: tuple[int, ...]
  num_heads: int
  head_dim: int
  rotary_dim: int
  query_rank: int
  window: int
  csa_rate: int
  hca_rate: int
  output_groups: int
  output_rank: int
  index_heads: int
  index_dim: int
  index_top_k: int
  num_experts: int
  top_k: int
  expert_hidden: int
  gate_scale: float
  swiglu_limit: float
  streams: int = 4
  sinkhorn_iterations: int = 20
  hyper_epsilon: float = 1e-6
  norm_epsilon: float = 1e-6
  rope_theta: float = 10000.0
  compress_theta: float = 160000.0
  compress_scaling: config_lib.RopeScaling = config_lib.RopeScaling()
  max_positions: int = 1048576
  dtype: str = "bfloat16"

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type is int and value < 1:
        raise ValueError(f"{field.name}={value} must be positive.")
    unknown = sorted({*self.attentions} - {*ATTENTIONS})
    if unknown or not self.attentions:
      raise ValueError(
          f"attentions={self.attentions} must name one of {ATTENTIONS} for each"
          " layer."
      )
    if not {*self.hash_layers} <= {*range(self.num_layers)}:
      raise ValueError(
          f"hash_layers={self.hash_layers} are not layers of"
          f" {self.num_layers}."
      )
    if self.rotary_dim % 2 or self.rotary_dim > min(
        self.head_dim, self.index_dim
    ):
      raise ValueError(
          f"rotary_dim={self.rotary_dim} must be even and fit head_dim="
          f"{self.head_dim} and index_dim={self.index_dim}."
      )
    if self.num_heads % self.output_groups:
      raise ValueError(
          f"num_heads={self.num_heads} is not a multiple of output_groups="
          f"{self.output_groups}."
      )
    if self.top_k > self.num_experts:
      raise ValueError(
          f"top_k={self.top_k} does not fit num_experts={self.num_experts}."
      )
    if self.dtype not in combine.FLOATS:
      raise ValueError(f"dtype={self.dtype!r} is not a float of a contract.")

  @property
  def num_layers(self) -> int:
    """Decoder layers."""
    return len(self.attentions)

  def rate(self, layer: int) -> int:
    """Tokens that become one compressed entry; 0 where nothing compresses."""
    return {SWA: 0, CSA: self.csa_rate, HCA: self.hca_rate}[
        self.attentions[layer]
    ]


def router_contract(config: DeepseekV4Config) -> route.RouterContract:
  """The router of transformers >= 5.8.1: every step in the model's dtype."""
  return route.RouterContract(
      "deepseek_v4",
      top_k=config.top_k,
      normalize=True,
      score="sqrt_softplus",
      logits_dtype=config.dtype,
      score_dtype=config.dtype,
      gate_dtype=config.dtype,
      scale=config.gate_scale,
  )


# DeepSeek-V4-Flash, without its head for multi-token prediction.
FLASH = DeepseekV4Config(
    vocab_size=129280,
    embed=4096,
    attentions=(SWA, SWA) + (CSA, HCA) * 20 + (CSA,),
    hash_layers=(0, 1, 2),
    num_heads=64,
    head_dim=512,
    rotary_dim=64,
    query_rank=1024,
    window=128,
    csa_rate=4,
    hca_rate=128,
    output_groups=8,
    output_rank=1024,
    index_heads=64,
    index_dim=128,
    index_top_k=512,
    num_experts=256,
    top_k=6,
    expert_hidden=2048,
    gate_scale=1.5,
    swiglu_limit=10.0,
    compress_scaling=config_lib.RopeScaling(
        "yarn", factor=16.0, original_positions=65536, attention_factor=1.0
    ),
)
