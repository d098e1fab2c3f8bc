"""Takes the samples of a protocol and writes them down.

Everything that costs time once (packing, compilation, capture) is done for all
points before the first sample, and each arm's outputs are noted by then.

Layer: protocols.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import gc
import pathlib
import time
from typing import Any, NamedTuple, Protocol

from moejax.contracts import packed_moe
from moejax.contracts import refusal
from moejax.numerics.packed import alignment
from moejax.protocols import packed_fixture
from moejax.protocols.performance import judge
from moejax.protocols.performance import protocol as protocol_lib
from moejax.protocols.performance import store


class Work(NamedTuple):
  """The requests of a point.

  Attributes:
    inputs: Activations, routes, gates of each request.
    plans: The stable plan of each.
    contract: Of the layer.
    experts: Of the layer.
  """

  inputs: Sequence[packed_fixture.Request]
  plans: Sequence[alignment.RouteBlocks]
  contract: packed_moe.PackedMoeContract
  experts: int


class Prepared(NamedTuple):
  """An arm at a point, ready to be measured.

  Attributes:
    sample: Runs all requests once, from an idle device to an idle device, and
      returns the nanoseconds that its clock took.
    output: SHA-256 of its results of all requests.
  """

  sample: Callable[[], int]
  output: str


class Backend(Protocol):
  """Who can measure some of the arms.

  Attributes:
    arms: Which, of `protocol_lib.ARMS`.
    refused: {arm: why it cannot}, for others of its family.
  """

  arms: tuple[str, ...]
  refused: Mapping[str, str]

  def load(self, w13: Sequence, w2: Sequence, dtype: str) -> None:
    """Takes the AWQ operands of all experts, for the points that follow."""

  def prepare(self, arm: str, work: Work) -> Prepared:
    """Makes an arm ready.

    Raises:
      UnsupportedError: the backend does not run this here. The arm is then
        unsupported at every point.
      HarnessError: what it computed is wrong.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Maker:
  """Who measures.

  Attributes:
    backends: Each with the arms that it measures.
    refused: {arm: why it cannot be measured}, for arms without a backend.
    source: Returns the digest of the source files that run.
    binary: The identity of the native code, from `route_block.identity`.
    environment: As JSON values.
  """

  backends: Sequence[Backend]
  refused: Mapping[str, str]
  source: Callable[[], str]
  binary: Mapping[str, Any]
  environment: Mapping[str, Any]


def run(
    protocol: protocol_lib.Protocol,
    maker: Maker,
    out: str | pathlib.Path,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    now: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, Any]:
  """Measures, judges and seals.

  Args:
    protocol: What is measured.
    maker: By whom.
    out: An absent or empty folder.
    progress: Told (stage, done, of how many).
    now: The run's clock in nanoseconds, that notes when a sample began.

  Returns:
    The result with "seal", the digest that names this run.

  Raises:
    HarnessError: the folder holds something, an arm computed something wrong,
      or a source file changed meanwhile.
    UnsupportedError: no arm can run.
  """
  arms = _arms(protocol, maker)
  declared = protocol_lib.to_document(protocol)
  place = store.begin(out, declared)
  source = maker.source()
  ready, arms = _prepared(protocol, maker, arms, progress)
  _check_any(arms)
  outputs = {point.name: {} for point in protocol.points}
  for (point, arm), prepared in ready.items():
    outputs[point][arm] = prepared.output
  store.write(place / store.RUN, {
      "schema": store.RUN_SCHEMA,
      "protocol": declared["digest"],
      "arms": arms,
      "outputs": outputs,
      "source": source,
      "binary": dict(maker.binary),
      "environment": dict(maker.environment),
  })
  samples = _measured(protocol, arms, ready, place, progress, now)
  if maker.source() != source:
    raise refusal.HarnessError(
        f"a source file changed while the run took samples; {place} is not"
        " sealed."
    )
  result = judge.judge(protocol, arms, outputs, samples)
  store.write(place / store.RESULT, result)
  return result | {"seal": store.seal(place, protocol)}


def _arms(protocol, maker) -> dict[str, str]:
  able = {arm for backend in maker.backends for arm in backend.arms}
  arms = {
      arm: judge.SUPPORTED
      if arm in able
      else maker.refused.get(arm, "no backend measures it.")
      for arm in protocol.arms
  }
  _check_any(arms)
  return arms


def _check_any(arms: Mapping[str, str]) -> None:
  if judge.SUPPORTED not in arms.values():
    reasons = "; ".join(f"{arm}: {why}" for arm, why in arms.items())
    raise refusal.UnsupportedError(f"no arm can run here. {reasons}")


def _prepared(
    protocol, maker, arms, progress
) -> tuple[dict[tuple[str, str], Prepared], dict[str, str]]:
  """Makes all arms ready, dtype by dtype; returns those that are, and why."""
  ready, arms = {}, dict(arms)
  for dtype in sorted({point.dtype for point in protocol.points}):
    layer = packed_fixture.layer(protocol.seed, protocol.shape, dtype)
    used = [b for b in maker.backends if set(b.arms) & set(arms)]
    for backend in used:
      backend.load(*layer, dtype)
    for point in protocol.points:
      if point.dtype != dtype:
        continue
      work = requests(protocol, point)
      for backend in used:
        for arm in backend.arms:
          if arms.get(arm) != judge.SUPPORTED:
            continue
          try:
            ready[point.name, arm] = backend.prepare(arm, work)
          except refusal.UnsupportedError as error:
            arms[arm] = f"{point.name}: {error}"
      progress("points ready", len({p for p, _ in ready}), len(protocol.points))
  kept = {k: v for k, v in ready.items() if arms[k[1]] == judge.SUPPORTED}
  return kept, arms


def requests(
    protocol: protocol_lib.Protocol, point: protocol_lib.Point
) -> Work:
  """Returns the requests of a point with their stable plans."""
  inputs = [
      packed_fixture.request(
          protocol.seed + 1 + number, point.tokens, protocol.top_k,
          protocol.shape, point.dtype,
      )
      for number in range(protocol.requests)
  ]
  experts = protocol.shape.experts
  plans = [
      alignment.route_blocks(i.expert_ids, experts, point.block_rows)
      for i in inputs
  ]
  return Work(inputs, plans, point.contract(protocol.shape), experts)


def _measured(
    protocol, arms, ready, place, progress, now
) -> dict[protocol_lib.Slot, int]:
  supported = [a for a in arms if arms[a] == judge.SUPPORTED]
  slots = list(protocol.slots(supported))
  samples, appender, begun = {}, None, now()
  collecting = gc.isenabled()
  gc.collect()
  gc.disable()
  try:
    for number, slot in enumerate(slots):
      if number == 0 or slot.point != slots[number - 1].point:
        if appender is not None:
          appender.close()
        appender = store.Appender(place, slot.point)
      start = now() - begun
      samples[slot] = ready[slot.point, slot.arm].sample()
      appender.append(slot, start, samples[slot])
      progress("samples", number + 1, len(slots))
    appender.close()
  finally:
    if collecting:
      gc.enable()
  return samples
