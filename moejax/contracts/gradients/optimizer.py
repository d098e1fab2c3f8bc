"""One step of an optimiser: which operations it has, and so where it rounds.

Layer: contracts. Imports contracts.
"""

import dataclasses

from moejax.contracts import document

KINDS = ("sgd", "adamw")


@dataclasses.dataclass(frozen=True, slots=True)
class FirstStep:
  """The first step from a state of zeros; each line is one rounding.

  "sgd": p = R(p - rate g).

  "adamw", with m = v = 0 before:
    p = R(p (1 - rate decay)), left out for decay = 0
    m = R(m + (1 - beta1) (g - m))
    v = R(v beta2);  v = R(v + (1 - beta2) g g)
    d = R(sqrt(v));  d = R(d / sqrt(1 - beta2));  d = R(d + epsilon)
    p = R(p - (rate / (1 - beta1)) m / d)
  The scalars are float64 and are not rounded first.

  Attributes:
    kind: "sgd" (no momentum) or "adamw".
    rate: Learning rate.
    beta1: Of the first moment.
    beta2: Of the second moment.
    epsilon: Added to the root.
    decay: Weight decay, decoupled.
  """

  kind: str = "sgd"
  rate: float = 0.01
  beta1: float = 0.9
  beta2: float = 0.999
  epsilon: float = 1e-8
  decay: float = 0.01

  def __post_init__(self):
    document.check_types(self)
    document.check_choice("FirstStep", "kind", self.kind, KINDS)
    if not self.rate > 0:
      raise ValueError(f"FirstStep: rate={self.rate} must be positive.")
