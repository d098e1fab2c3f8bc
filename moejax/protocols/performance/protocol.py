"""What a measurement of packed expert layers declares before it begins.

A time is worth what was written down before it was taken: at which operating
points, of what, in which order, how often, between which two instants, what
becomes of the numbers, and which answer would count as which verdict. A
`Protocol` holds all of it, its document has one digest, and nothing is chosen
after the first sample.

Layer: protocols.
"""

from collections.abc import Collection
from collections.abc import Iterator
import dataclasses
from typing import Any, NamedTuple

from moejax.contracts import document
from moejax.contracts import packed_moe
from moejax.contracts import refusal
from moejax.numerics.packed import alignment
from moejax.protocols import packed_fixture
from moejax.protocols.performance import interval

SCHEMA = "packed_performance_protocol/1"

_GRAPH = (
    "device events on the stream just before and just behind one replay of a"
    " CUDA graph that holds the calls of all requests, one after another"
)
_DISPATCH = (
    "host clock from in front of the first dispatch until the results of all"
    " requests are ready; one dispatch a request, so host time is in it where"
    " the device is faster"
)
_LAYER = "W13, activation, W2 with gates, combine"
# Arm -> which instants its clock takes, and what lies between them. The device
# is idle before, and weights, activations and gates are on it.
ARMS: dict[str, dict[str, str]] = {
    "vllm_native": {
        "clock": _GRAPH,
        "covers": f"vLLM's moe_align_block_size, then its {_LAYER}",
    },
    "vllm_stable": {
        "clock": _GRAPH,
        "covers": (
            "vLLM's moe_align_block_size, one kernel that puts the routes of"
            f" each expert in order, then its {_LAYER}"
        ),
    },
    "vllm_stable_sort": {
        "clock": _GRAPH,
        "covers": (
            "vLLM's moe_align_block_size, a sort by torch that puts the routes"
            f" of each expert in order, then its {_LAYER}"
        ),
    },
    "vllm_layer": {
        "clock": _GRAPH,
        "covers": f"vLLM's {_LAYER}; the stable plan is on the device",
    },
    "vllm_w13": {
        "clock": _GRAPH,
        "covers": "vLLM's W13; the stable plan is on the device",
    },
    "pallas_layer": {
        "clock": _DISPATCH,
        "covers": (
            f"the Pallas kernels' {_LAYER}; the work lists of the stable plan"
            " are on the device"
        ),
    },
    "pallas_w13": {
        "clock": _DISPATCH,
        "covers": (
            "the Pallas kernels' W13 (pieces, then their sum); the work list of"
            " the stable plan is on the device"
        ),
    },
    "oracle_layer": {
        "clock": "host clock around the NumPy oracle, request by request",
        "covers": f"{_LAYER} on one core; the stable plan is made",
    },
}
RULES: dict[str, str] = {
    "sample": "nanoseconds of one pass over all requests of a point",
    "order": (
        "point by point; at a point round by round; in a round each supported"
        " arm once, as listed here, in odd rounds backwards; collection of"
        " garbage is off"
    ),
    "warm_up": "the first `warmups` rounds are noted and not judged",
    "median": "the middle one of the judged samples, an odd number",
    "ratio": (
        "the middle one of the ratios of the two arms' samples of a round"
    ),
    "interval": (
        "order statistics of those ratios, l-th least to l-th largest, with"
        " the largest l for which 2 P(Binomial(rounds, 1/2) < l) <= 1 -"
        " confidence; distribution-free for the median of independent rounds"
    ),
    "verdict": (
        "non_inferior if the upper end is at most the margin, inferior if the"
        " lower end is above it, else inconclusive; described without a margin;"
        " different_bits where both arms owe the same bits and differ;"
        " unsupported where an arm has no backend. Over all points a"
        " comparison has the worst of its verdicts: it is non_inferior if it is"
        " at each point, so the level of one is the level of all"
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
  """An operating point.

  Attributes:
    tokens: M.
    dtype: Of the layer.
    block_rows: Rows of a route block.
    thread_k: K rows of a tile.
    thread_n: Columns of a tile.
    grid: Thread blocks; for vLLM's kernels a multiple of the processors.
  """

  tokens: int
  dtype: str
  block_rows: int
  thread_k: int
  thread_n: int
  grid: int

  def __post_init__(self):
    document.check_types(self)
    if min(self.tokens, self.block_rows) < 1:
      raise ValueError(f"{self} is no operating point.")
    self.contract(packed_fixture.LayerShape())

  @property
  def name(self) -> str:
    """The point's id, which is also the name of its file."""
    return (
        f"m{self.tokens}_{self.dtype}_b{self.block_rows}"
        f"_{self.thread_k}x{self.thread_n}_g{self.grid}"
    )

  def contract(
      self, shape: packed_fixture.LayerShape
  ) -> packed_moe.PackedMoeContract:
    """Returns the layer's contract."""
    return packed_moe.marlin(
        dtype=self.dtype, thread_k=self.thread_k, thread_n=self.thread_n,
        grid=self.grid, group_size=shape.group_size,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
  """Two arms whose samples are divided, round by round.

  Attributes:
    arm: The numerator.
    against: The denominator.
    margin: The largest ratio that is not inferior; None only describes.
    same_bits: Whether the two must give the same outputs, without which their
      times are not compared.
  """

  arm: str
  against: str
  margin: float | None
  same_bits: bool

  def __post_init__(self):
    document.check_types(self)
    for field in ("arm", "against"):
      document.check_choice("Comparison", field, getattr(self, field),
                            tuple(ARMS))
    if self.arm == self.against:
      raise ValueError(f"{self} compares an arm with itself.")
    if self.margin is not None and (
        type(self.margin) is not float or not 0 < self.margin < float("inf")
    ):
      raise ValueError(f"Comparison: margin={self.margin!r} is no ratio.")


class Slot(NamedTuple):
  """One sample that the protocol asks for.

  Attributes:
    point: Its point's name.
    round: From 0; the warm-ups come first.
    arm: One of ARMS.
  """

  point: str
  round: int
  arm: str


@dataclasses.dataclass(frozen=True, slots=True)
class Protocol:
  """All that is declared; a run is a function of it and of the machine.

  Attributes:
    points: Operating points, in their order.
    comparisons: What is divided by what. Their arms are measured.
    shape: Sizes of the layer.
    top_k: Experts of a token.
    requests: Different requests of a point, so that weights come from memory
      and not from a cache.
    warmups: Rounds that are not judged.
    rounds: Rounds that are; odd.
    confidence: Of the interval.
    seed: Of layer and requests.
    interpret: Whether the Pallas kernels run in JAX's interpreter. Its times
      are no performance.
  """

  points: tuple[Point, ...]
  comparisons: tuple[Comparison, ...]
  shape: packed_fixture.LayerShape = packed_fixture.LayerShape()
  top_k: int = 8
  requests: int = 16
  warmups: int = 10
  rounds: int = 101
  confidence: float = 0.95
  seed: int = 20260722
  interpret: bool = False

  def __post_init__(self):
    document.check_types(self)
    document.check_types(self.shape)
    names = [point.name for point in self.points]
    pairs = [(c.arm, c.against) for c in self.comparisons]
    for values in (names, pairs):
      if not values or len(set(values)) != len(values):
        raise ValueError(f"no protocol has {values}: none, or one twice.")
    sizes = dataclasses.asdict(self.shape) | {
        "top_k": self.top_k, "requests": self.requests, "rounds": self.rounds,
    }
    for name, value in sizes.items():
      if value < 1:
        raise ValueError(f"no protocol has {name}={value}.")
    if self.warmups < 0 or self.seed < 0 or self.top_k > self.shape.experts:
      raise ValueError(
          f"no protocol has warmups={self.warmups}, seed={self.seed},"
          f" top_k={self.top_k} of {self.shape.experts} experts."
      )
    if self.rounds % 2 == 0:
      raise ValueError(f"rounds={self.rounds} is even and has no middle one.")
    for c in self.comparisons:
      pallas = any(a.startswith("pallas_") for a in (c.arm, c.against))
      if self.interpret and pallas and c.margin is not None:
        raise ValueError(
            f"interpret=True and margin={c.margin} of {c.arm}: times of the"
            " interpreter are no performance; use null."
        )
    interval.rank(self.rounds, self.confidence)

  @property
  def arms(self) -> tuple[str, ...]:
    """The arms of the comparisons, in the order of ARMS."""
    named = {a for c in self.comparisons for a in (c.arm, c.against)}
    return tuple(arm for arm in ARMS if arm in named)

  def slots(self, supported: Collection[str]) -> Iterator[Slot]:
    """Yields the samples in their order, of the arms that can run."""
    arms = [arm for arm in self.arms if arm in supported]
    for point in self.points:
      for number in range(self.warmups + self.rounds):
        for arm in arms[:: -1 if number % 2 else 1]:
          yield Slot(point.name, number, arm)


def to_document(protocol: Protocol) -> dict[str, Any]:
  """Returns the protocol as JSON values, with what its words mean."""
  values = {
      "schema": SCHEMA,
      "protocol": document.to_dict(protocol),
      "arms": {arm: ARMS[arm] for arm in protocol.arms},
      "rules": RULES,
  }
  return values | {"digest": digest(values)}


def digest(values: dict[str, Any]) -> str:
  """Returns the digest that a protocol's document should carry."""
  parts = {k: v for k, v in values.items() if k != "digest"}
  return document.sha256(document.canonical_json(parts))


def from_fields(values: Any) -> Protocol:
  """Builds a protocol from its fields as JSON values.

  Raises:
    HarnessError: a field is unknown, missing, or names nothing.
  """
  try:
    wanted = {field.name for field in dataclasses.fields(Protocol)}
    if not isinstance(values, dict) or set(values) != wanted:
      raise ValueError(f"its fields are {sorted(wanted)}.")
    lists = {
        name: tuple(document.from_dict(kind, v) for v in values[name])
        for name, kind in (("points", Point), ("comparisons", Comparison))
    }
    shape = document.from_dict(packed_fixture.LayerShape, values["shape"])
    return Protocol(**values | lists | {"shape": shape})
  except (ValueError, TypeError) as error:
    raise refusal.HarnessError(f"no protocol: {error}") from error


# What vLLM's kernel chooses by itself on an H200, by rows of a block:
# `numerics/packed/selector.py`, and for 32 rows the specification it follows.
_H200 = {8: (128, 64, 528), 32: (64, 128, 264)}


def default() -> Protocol:
  """Returns the protocol for an H200 in the published shape."""
  shape, top_k = packed_fixture.LayerShape(), 8
  points = []
  for tokens in (1, 8, 21, 64, 256):
    rows = alignment.block_rows_for(tokens * top_k, shape.experts)
    points.append(Point(tokens, "float16", rows, *_H200[rows]))
  return Protocol(
      points=tuple(points),
      comparisons=(
          Comparison("vllm_stable", "vllm_native", 1.05, False),
          Comparison("vllm_stable_sort", "vllm_native", 1.05, False),
          Comparison("pallas_layer", "vllm_layer", None, True),
          Comparison("pallas_w13", "vllm_w13", None, True),
      ),
      shape=shape,
      top_k=top_k,
  )
