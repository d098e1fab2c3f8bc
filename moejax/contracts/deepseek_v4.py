"""Every reduction of a DeepSeek-V4 decoder under one declared contract.

Layer: contracts. Imports contracts.
"""

import dataclasses

from moejax.contracts import combine
from moejax.contracts import document
from moejax.contracts import named_combines
from moejax.contracts import reduction
from moejax.contracts import route

_Chain = reduction.ReductionContract


@dataclasses.dataclass(frozen=True, slots=True)
class DeepseekV4Reductions:
  """One contract for each reduction site.

  The combine and the addition of the shared expert are not here: they are
  `CombineContract`.

  Attributes:
    hyper_norm_mean: Mean square over all streams of a token.
    hyper_projection: Streams to the weights of a hyper-connection.
    hyper_softmax: Rows of the mixing matrix before it is normalised.
    sinkhorn: Row and column sums of the mixing matrix.
    hyper_collapse: Streams to the input of a block.
    hyper_mix: Streams to streams, through the mixing matrix.
    norm_mean: Mean square of every norm with a weight.
    query_norm_mean: Mean square of one head of a query.
    projection: Every other GEMM outside the experts.
    attention_scores: Query times key.
    attention_softmax: Over visible keys, entries and the sink.
    attention_values: Weights times values.
    compressor_softmax: Over the tokens that become one entry.
    compressor_sum: The weighted sum of them.
    indexer_scores: Indexer query times indexer key.
    indexer_sum: Over the indexer's heads.
    indexer_hadamard: Channels of the indexer's queries and keys, mixed before
      they are quantised.
    router_logits: The router's GEMM.
    router_normalization: Sum of the gates of a route.
    expert_gemm: The GEMMs of the routed experts.
    lm_head: The output projection.
  """

  hyper_norm_mean: _Chain
  hyper_projection: _Chain
  hyper_softmax: _Chain
  sinkhorn: _Chain
  hyper_collapse: _Chain
  hyper_mix: _Chain
  norm_mean: _Chain
  query_norm_mean: _Chain
  projection: _Chain
  attention_scores: _Chain
  attention_softmax: _Chain
  attention_values: _Chain
  compressor_softmax: _Chain
  compressor_sum: _Chain
  indexer_scores: _Chain
  indexer_sum: _Chain
  indexer_hadamard: _Chain
  router_logits: _Chain
  router_normalization: _Chain
  expert_gemm: _Chain
  lm_head: _Chain

  @classmethod
  def all(cls, chain: str) -> "DeepseekV4Reductions":
    """Puts every site under the same chain."""
    contract = _Chain(chain)
    return cls(**{field.name: contract for field in dataclasses.fields(cls)})


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizationContract:
  """Which values pass through eight or four bits on their way.

  A quantised value is made wide again at once, so nothing but its value
  changes. The release's own code computes with all three; transformers, with
  its weights made wide, with none.

  Attributes:
    name: A label for people; no part of the digest.
    activations: The input of every GEMM whose weight the release keeps in FP8
      or FP4, but for the first output projection: E4M3, in blocks along K.
    entries: The channels that do not turn, of window rows and of compressed
      entries: E4M3.
    indexer: The indexer's queries and compressed keys: a Hadamard transform,
      then E2M1.
    activation_block: Neighbours that share a scale.
    entry_block: The same.
    indexer_block: The same.
  """

  name: str
  activations: bool = False
  entries: bool = False
  indexer: bool = False
  activation_block: int = 128
  entry_block: int = 64
  indexer_block: int = 32

  def __post_init__(self):
    document.check_types(self)
    for field in ("activation_block", "entry_block", "indexer_block"):
      if getattr(self, field) < 1:
        raise ValueError(
            f"QuantizationContract: {field}={getattr(self, field)} must be"
            " positive."
        )


@dataclasses.dataclass(frozen=True, slots=True)
class DeepseekV4Graph:
  """Where a decoder rounds, and what it multiplies first.

  "model" is the model's dtype, to which every operation of that part rounds;
  "float32" keeps the part in float32 with one rounding behind it. Where the
  gate of an expert multiplies and what a router rounds are fields of
  `CombineContract` and `RouterContract`.

  Attributes:
    name: A label for people; no part of the digest.
    hyper_scale: What the reciprocal root mean square of a hyper-connection
      multiplies: the "streams" in front of the projection, or its "mixes".
    hyper_mix: The streams behind a block: "model" rounds post and the mixing
      matrix first, then product, matmul and sum; "float32" rounds the sum.
    rotary_tables: cos and sin.
    query_norm: Square, mean and root of a query head. Here "float32" rounds
      the factor, "model" each of the steps.
    attention: "softmax" over all keys and the sink, probabilities rounded; or
      "online_softmax", block by block without the sink, exponentials rounded
      and divided last.
    attention_block: Keys of a block; 0 under "softmax".
    compressor: Projections, softmax and weighted sum of every compressor, and
      its persistent state.
    indexer: Scores, weights and their sum over heads. In float32 both factors
      are scaled apart; in the model's dtype the weights alone, by both.
    gate_epsilon: Added to the sum of a route's gates; 0 adds nothing.
    expert_activation: silu(gate) * up of every expert, and the gate where it
      multiplies there.
    logits: The output projection and its operands.
    quantization: Values that pass through fewer bits.
  """

  name: str
  hyper_scale: str
  hyper_mix: str
  rotary_tables: str
  query_norm: str
  attention: str
  attention_block: int
  compressor: str
  indexer: str
  gate_epsilon: float
  expert_activation: str
  logits: str
  quantization: QuantizationContract

  def __post_init__(self):
    document.check_types(self)
    dtypes = ("model", "float32")
    for field, choices in (
        ("hyper_scale", ("streams", "mixes")),
        ("hyper_mix", dtypes),
        ("rotary_tables", dtypes),
        ("query_norm", dtypes),
        ("attention", ("softmax", "online_softmax")),
        ("compressor", dtypes),
        ("indexer", dtypes),
        ("expert_activation", dtypes),
        ("logits", dtypes),
    ):
      document.check_choice(
          "DeepseekV4Graph", field, getattr(self, field), choices
      )
    if not isinstance(self.quantization, QuantizationContract):
      raise ValueError(
          f"DeepseekV4Graph: quantization={self.quantization!r} is no"
          " QuantizationContract."
      )
    online = self.attention == "online_softmax"
    if self.attention_block < online or self.attention_block > 0 and not online:
      raise ValueError(
          f"DeepseekV4Graph: attention={self.attention!r} does not go with"
          f" attention_block={self.attention_block}."
      )
    if self.gate_epsilon < 0:
      raise ValueError(
          f"DeepseekV4Graph: gate_epsilon={self.gate_epsilon} is negative."
      )


# transformers >= 5.8.1, weights made wide.
TRANSFORMERS = DeepseekV4Graph(
    "transformers",
    hyper_scale="streams",
    hyper_mix="model",
    rotary_tables="model",
    query_norm="float32",
    attention="softmax",
    attention_block=0,
    compressor="model",
    indexer="float32",
    gate_epsilon=1e-20,
    expert_activation="model",
    logits="model",
    quantization=QuantizationContract("none"),
)
# The inference code of the release, without what it quantises on the way.
DEEPSEEK_REFERENCE = DeepseekV4Graph(
    "deepseek_reference",
    hyper_scale="mixes",
    hyper_mix="float32",
    rotary_tables="float32",
    query_norm="model",
    attention="online_softmax",
    attention_block=64,
    compressor="float32",
    indexer="model",
    gate_epsilon=0.0,
    expert_activation="float32",
    logits="float32",
    quantization=QuantizationContract("none"),
)
DEEPSEEK_REFERENCE_QUANTIZED = dataclasses.replace(
    DEEPSEEK_REFERENCE,
    name="deepseek_reference_quantized",
    quantization=QuantizationContract(
        "release", activations=True, entries=True, indexer=True
    ),
)
_GRAPHS = (TRANSFORMERS, DEEPSEEK_REFERENCE, DEEPSEEK_REFERENCE_QUANTIZED)
GRAPH_NAMES = tuple(graph.name for graph in _GRAPHS)


def graph_named(name: str) -> DeepseekV4Graph:
  """Returns a graph that has a name.

  Raises:
    ValueError: the name is unknown; the message lists the known ones.
  """
  document.check_choice("graph", "name", name, GRAPH_NAMES)
  return _GRAPHS[GRAPH_NAMES.index(name)]


@dataclasses.dataclass(frozen=True, slots=True)
class DeepseekV4Contract:
  """What decides the bits of a decoder, beside its weights and its config.

  Attributes:
    name: A label for people; no part of the digest.
    elementwise: "native", or "portable": each operation that reduces nothing
      in float64 with one rounding.
    reductions: The contract of each reduction site.
    router: The contract of every router.
    combine: The contract of every combine, and of the addition of the shared
      expert's output.
    graph: Where everything else rounds.
  """

  name: str
  elementwise: str
  reductions: DeepseekV4Reductions
  router: route.RouterContract
  combine: combine.CombineContract
  graph: DeepseekV4Graph

  def __post_init__(self):
    document.check_types(self)
    document.check_choice(
        "DeepseekV4Contract",
        "elementwise",
        self.elementwise,
        ("native", "portable"),
    )


def of(
    arithmetic: str,
    router: route.RouterContract,
    combine_contract: combine.CombineContract,
    graph: DeepseekV4Graph = TRANSFORMERS,
) -> DeepseekV4Contract:
  """Returns the contract of an arithmetic: native, portable or sequential.

  Sequential adds every reduction in float32 in ascending order and is portable
  elsewhere.
  """
  document.check_choice("contract", "arithmetic", arithmetic, reduction.CHAINS)
  return DeepseekV4Contract(
      arithmetic,
      "native" if arithmetic == "native" else "portable",
      DeepseekV4Reductions.all(arithmetic),
      router,
      combine_contract,
      graph,
  )


def deepseek_reference(
    arithmetic: str, top_k: int, scale: float, quantized: bool = False
) -> DeepseekV4Contract:
  """Returns the contract of the release's own inference code.

  Router and gates in float32, each gate multiplied in front of W2, experts
  added in float32 by ascending id, the shared one before the only rounding.

  Args:
    arithmetic: As in `of`.
    top_k: Slots of a route.
    scale: Factor on its gates.
    quantized: Whether values pass through FP8 and FP4 as they do there.
  """
  router = route.RouterContract(
      "deepseek_reference",
      top_k=top_k,
      normalize=True,
      score="sqrt_softplus",
      logits_dtype="float32",
      score_dtype="float32",
      gate_dtype="float32",
      scale=scale,
  )
  return of(
      arithmetic,
      router,
      named_combines.named("deepseek_reference"),
      DEEPSEEK_REFERENCE_QUANTIZED if quantized else DEEPSEEK_REFERENCE,
  )
