"""How a model is trained: everything that decides a step's bits but the data.

Layer: training.
"""

import dataclasses

from moejax.contracts import document


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
  """A training run, declared before it starts.

  The learning rate is a function of the step: it rises from zero to `peak`
  over `warm_up` steps, then falls along a cosine to `peak * final` at `steps`.

  Attributes:
    name: A label for people; no part of the digest.
    seed: Of the first weights, of the hash tables and of the batches.
    steps: Of the optimiser; a multiple of `chunk`.
    batch: Sequences of a step, over all devices.
    length: Tokens of a sequence that are predicted.
    chunk: Steps of one call; checkpoints lie between two calls.
    peak: Highest learning rate.
    warm_up: Steps until it is reached.
    final: Fraction of it at the last step.
    weight_decay: Of AdamW, on matrices outside the hyper-connections.
    clip: Bound on the global norm of the gradient.
    beta1: Of AdamW.
    beta2: Of AdamW.
    epsilon: Of AdamW.
    balance: Factor on the load-balancing loss (Qwen3-MoE).
    bias_speed: What a step adds to or takes from an expert's selection bias
      (DeepSeek-V4).
    indexer: Factor on the indexers' divergence (DeepSeek-V4); no other
      parameter has a gradient from it.
  """

  name: str
  seed: int
  steps: int
  batch: int
  length: int
  chunk: int
  peak: float
  warm_up: int
  final: float = 0.1
  weight_decay: float = 0.1
  clip: float = 1.0
  beta1: float = 0.9
  beta2: float = 0.95
  epsilon: float = 1e-8
  balance: float = 0.001
  bias_speed: float = 0.001
  indexer: float = 1.0

  def __post_init__(self):
    document.check_types(self)
    for field in ("steps", "batch", "length", "chunk", "warm_up"):
      if getattr(self, field) < 1:
        raise ValueError(
            f"Recipe: {field}={getattr(self, field)} must be positive."
        )
    for field in ("peak", "clip", "epsilon"):
      if not getattr(self, field) > 0:
        raise ValueError(
            f"Recipe: {field}={getattr(self, field)} must be positive."
        )
    if self.steps % self.chunk:
      raise ValueError(
          f"Recipe: steps={self.steps} is no multiple of chunk={self.chunk}; a"
          " shorter last call would be another program."
      )
    if self.warm_up >= self.steps:
      raise ValueError(
          f"Recipe: warm_up={self.warm_up} leaves none of steps={self.steps}."
      )
