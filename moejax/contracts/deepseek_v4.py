"""Every reduction of a DeepSeek-V4 decoder under one declared contract.

Layer: contracts. Imports contracts.
"""

import dataclasses

from moejax.contracts import combine
from moejax.contracts import document
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
  """

  name: str
  elementwise: str
  reductions: DeepseekV4Reductions
  router: route.RouterContract
  combine: combine.CombineContract

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
  )
