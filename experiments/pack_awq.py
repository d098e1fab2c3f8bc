"""Packs a Qwen3-MoE checkpoint to 4 bits, as AWQ stores it.

  python -m experiments.pack_awq --checkpoint=DIR --out=DIR [--group_size=128]

Rounds to nearest with zero points; no calibration. Prints one JSON document,
"pack_awq/1", as its last line. Exit codes: 0 done, 2 usage or harness error, 4
unsupported. The library call behind it is `torch_bridge.hf.awq.packer.pack`.
"""

import pathlib

from absl import flags

from experiments.support import binary
from torch_bridge.hf.awq import packer

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Folder to pack, in a 16-bit dtype.", required=True
)
_OUT = flags.DEFINE_string(
    "out", None, "Folder to make; absent or empty.", required=True
)
_GROUP_SIZE = flags.DEFINE_integer(
    "group_size", 128, "Inputs of a scale; -1 means all inputs."
)
_SKIP = flags.DEFINE_list(
    "modules_to_not_convert",
    list(packer.SKIPPED),
    "Modules to leave as they are, by whole dotted segments.",
)
_SCALES = flags.DEFINE_enum(
    "scales", "", ["", "float16", "bfloat16"],
    "Dtype of the scales; the checkpoint's own if empty.",
)


def main() -> int:
  """Packs, prints the summary, returns the exit code."""
  request = packer.Request(
      group_size=_GROUP_SIZE.value,
      modules_to_not_convert=tuple(_SKIP.value),
      scales=_SCALES.value,
  )
  out = pathlib.Path(_OUT.value)
  binary.last_line(packer.pack(_CHECKPOINT.value, out, request))
  return 0


if __name__ == "__main__":
  binary.run(main)
