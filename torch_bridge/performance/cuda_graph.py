"""A CUDA graph of calls, and the device's clock around its replay.

Layer: torch_bridge.
"""

from collections.abc import Callable
from collections.abc import Sequence

import torch


class Captured:
  """A CUDA graph of calls, and a clock around its replay.

  Attributes:
    results: What the calls returned; a replay writes into it.
  """

  def __init__(self, calls: Sequence[Callable]):
    """Runs the calls once and captures them."""
    # A graph knows addresses alone, so what the calls read is kept with it.
    self._calls = calls
    # Once outside: a kernel's first launch may load code, which no graph can.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
      for call in calls:
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    self._graph = torch.cuda.CUDAGraph()
    # Other threads of the process (those of JAX) may use the device meanwhile.
    with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
      self.results = [call() for call in calls]
    self._start, self._end = (
        torch.cuda.Event(enable_timing=True) for _ in range(2)
    )

  def sample(self) -> int:
    """Replays the graph; returns its nanoseconds by the device's clock."""
    self._start.record()
    self._graph.replay()
    self._end.record()
    self._end.synchronize()
    return round(self._start.elapsed_time(self._end) * 1e6)  # Milliseconds.
