"""How much memory and time does loading a packed DeepSeek-V4 layer take?

  python -m experiments.measure_loading --num_experts=32

Writes a checkpoint of one layer with the widths of the Flash configuration and
random bits into a temporary folder, loads it and prints a table. Another
process writes, so that only loading is measured. Files are mapped into memory
while they are read; their pages count as resident but can be dropped, so
anonymous memory is shown beside the resident. The last line is one JSON
document.
"""

import dataclasses
import math
import multiprocessing
import pathlib
import resource
import tempfile
import threading
import time

from absl import flags

from experiments.support import binary
from experiments.support import environment
from experiments.tiny import synthetic_deepseek_v4
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import parameters
from torch_bridge.hf.deepseek_v4 import names
from torch_bridge.hf.deepseek_v4 import parameter_map

_NUM_EXPERTS = flags.DEFINE_integer(
    "num_experts", 32, "Routed experts; the release has 256.", lower_bound=6
)
_VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", 129280, "Rows of embedding and head.", lower_bound=1
)
_ATTENTION = flags.DEFINE_enum(
    "attention", "csa", config_lib.ATTENTIONS, "Kind of the layer."
)
_EXPERTS = flags.DEFINE_enum(
    "experts", names.FP4, (names.FP4, names.FP8), "Format of routed experts."
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", ("bfloat16", "float32"), "Of loaded matrices."
)
_STATUS = pathlib.Path("/proc/self/status")
_MIB = 1 << 20


def main() -> int:
  """Writes, loads, prints."""
  config = dataclasses.replace(
      config_lib.FLASH,
      vocab_size=_VOCAB_SIZE.value,
      attentions=(_ATTENTION.value,),
      hash_layers=(),
      num_experts=_NUM_EXPERTS.value,
      dtype=_DTYPE.value,
  )
  result = _measure(config)
  for name, value in result.items():
    shown = f"{value:10.3f}" if isinstance(value, float) else f"{value!s:>14}"
    print(f"{name:32}{shown}")
  binary.last_line({
      "schema": "measure_loading/1",
      "request": {
          "config": dataclasses.asdict(config), "experts": _EXPERTS.value
      },
      "environment": environment.describe(),
      "result": result,
  })
  return 0


def _measure(config: config_lib.DeepseekV4Config) -> dict:
  """Returns the figures, units in their names."""
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    started = time.perf_counter()
    # A pool of one fresh process; an error in it is raised here.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
      disk_bytes = pool.apply(
          synthetic_deepseek_v4.write, (folder, config, 0, _EXPERTS.value)
      )
    written = time.perf_counter()
    before, peak, done = _anonymous(), [0], threading.Event()
    watch = threading.Thread(target=_watch, args=(peak, done))
    watch.start()
    try:
      _, params = parameter_map.load(folder)
    finally:
      loaded = time.perf_counter()
      done.set()
      watch.join()
  sizes = {path: array.nbytes for path, array in params.items()}
  result_bytes = sum(sizes.values())
  layer = sum(n for path, n in sizes.items() if path.startswith("layers.0."))
  anonymous = max(peak[0] - before, 0) if before is not None else None
  return {
      "parameters": sum(
          math.prod(s) for s, _ in parameters.leaves(config).values()
      ),
      "disk_mib": disk_bytes / _MIB,
      "result_mib": result_bytes / _MIB,
      "layer_mib": layer / _MIB,
      "largest_parameter_mib": max(sizes.values()) / _MIB,
      "peak_anonymous_mib": anonymous and anonymous / _MIB,
      "peak_above_result_mib": anonymous and (anonymous - result_bytes) / _MIB,
      # Linux counts kibibytes.
      "peak_resident_mib": (
          resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
      ),
      "write_seconds": written - started,
      "load_seconds": loaded - written,
  }


def _anonymous() -> int | None:
  """Bytes of this process that no file backs; None where Linux is not."""
  if not _STATUS.is_file():
    return None
  for line in _STATUS.read_text("utf-8").splitlines():
    if line.startswith("RssAnon:"):
      return int(line.split()[1]) * 1024
  return None


def _watch(peak: list[int], done: threading.Event) -> None:
  """Keeps the largest value, looked at two hundred times a second."""
  while not done.wait(0.005):
    peak[0] = max(peak[0], _anonymous() or 0)


if __name__ == "__main__":
  binary.run(main)
