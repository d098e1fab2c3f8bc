"""Makes the tiny DeepSeek-V4 checkpoint that ships with the project.

Whoever doubts the shipped weights can remake them with one command and compare
the digests. All the work is in experiments/tiny/deepseek_v4.py.

  python -m experiments.make_tiny_deepseek_v4

The last line of standard output is one JSON document, "make_checkpoint/1".
"""

from collections.abc import Sequence
import json
import pathlib

from absl import app
from absl import flags

from experiments.tiny import deepseek_v4 as tiny_deepseek_v4

_OUT = flags.DEFINE_string(
    "out",
    str(tiny_deepseek_v4.SHIPPED),
    "Folder to make. It may be absent, empty, or an earlier result; a folder "
    "that holds anything else is refused.",
)
_SEED = flags.DEFINE_integer(
    "seed", tiny_deepseek_v4.SEED, "Seed of the weights.", lower_bound=0
)
_DTYPE = flags.DEFINE_enum(
    "dtype",
    "bfloat16",
    tiny_deepseek_v4.DTYPES,
    "In which the model computes; the weights are the same numbers in both.",
)


def main(argv: Sequence[str]) -> None:
  """Makes the checkpoint and prints its summary."""
  if len(argv) > 1:
    raise app.UsageError(f"no positional arguments are taken: {argv[1:]}")
  summary = tiny_deepseek_v4.make(
      pathlib.Path(_OUT.value), _SEED.value, _DTYPE.value
  )
  print(json.dumps(summary, ensure_ascii=False))


if __name__ == "__main__":
  app.run(main)
