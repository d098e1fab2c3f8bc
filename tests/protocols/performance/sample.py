"""A small protocol, and arms whose clocks say what a test wants."""

import hashlib
import pathlib
import tempfile

from moejax.protocols import packed_fixture
from moejax.protocols.performance import protocol as protocol_lib
from moejax.protocols.performance import run
from moejax.protocols.route_block import identity

SOURCE = "5" * 64
PROTOCOL = protocol_lib.Protocol(
    points=(
        protocol_lib.Point(2, "float16", 8, 64, 64, 5),
        protocol_lib.Point(3, "bfloat16", 16, 64, 128, 7),
    ),
    comparisons=(
        protocol_lib.Comparison("vllm_stable", "vllm_native", 1.05, False),
        protocol_lib.Comparison("pallas_layer", "oracle_layer", None, True),
        protocol_lib.Comparison("pallas_w13", "vllm_w13", 2.0, True),
    ),
    shape=packed_fixture.LayerShape(
        experts=3, embed=64, hidden=64, group_size=64
    ),
    top_k=2,
    requests=2,
    warmups=1,
    rounds=7,
    confidence=0.85,  # From the second to the sixth of seven: 7/8.
)


class Backend:
  """Arms whose samples take declared times.

  Attributes:
    calls: (arm, tokens) of every sample, in order.
  """

  refused = {}

  def __init__(self, clock, times, outputs=None):
    """Takes the run's clock and {arm: nanoseconds of its n-th sample}."""
    self._clock, self._times = clock, times
    self._outputs = outputs or {}
    self.arms = tuple(times)
    self.calls = []
    self.loaded = []

  def load(self, w13, w2, dtype):
    self.loaded.append((len(w13), len(w2), dtype))

  def prepare(self, arm, work):
    calls = []

    def sample():
      calls.append(None)
      self.calls.append((arm, len(work.inputs[0].x)))
      taken = self._times[arm](len(calls) - 1)
      self._clock.time += taken
      return taken

    output = self._outputs.get(arm, "one")
    return run.Prepared(sample, hashlib.sha256(output.encode()).hexdigest())


class Clock:
  """A clock that moves by itself a little at each look."""

  def __init__(self):
    self.time = 10**9

  def __call__(self) -> int:
    self.time += 3
    return self.time


def native(number):
  """1,000 ns, then a little more with each sample."""
  return 1000 + number


TIMES = {
    "vllm_native": native,
    # Ratios of about 1.01 but for the warm-up, which counts for nothing.
    "vllm_stable": lambda n: 9000 if n == 0 else native(n) * 101 // 100,
    "pallas_layer": lambda n: 300 + 7 * n,
    "oracle_layer": lambda n: 900,
}
REFUSED = {"vllm_w13": "no extension", "pallas_w13": "no device"}


def maker(clock, times=None, source=lambda: SOURCE, outputs=None):
  """Who measures; the last backend is `Backend`."""
  return run.Maker(
      backends=[Backend(clock, times or TIMES, outputs)],
      refused=REFUSED,
      source=source,
      binary=identity.binary(
          "test", {"numpy": "0"}, {"numpy": "7" * 64}, "cpu"
      ),
      environment={"commit": None},
  )


def make(out: pathlib.Path, protocol=PROTOCOL, **fields):
  """Makes a run in a folder; returns its result."""
  clock = Clock()
  return run.run(protocol, maker(clock, **fields), out, now=clock)


def folder(test) -> pathlib.Path:
  """An empty folder that is gone when the test ends."""
  return pathlib.Path(test.enterContext(tempfile.TemporaryDirectory()))
