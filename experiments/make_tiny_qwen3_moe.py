"""Makes the tiny Qwen3-MoE checkpoint that ships with the project.

Why this file exists: whoever doubts the shipped weights can remake them with
one command and compare the digests, and whoever changes the text or the spread
of the weights has one place to turn: experiments/tiny/qwen3_moe.py.

  python -m experiments.make_tiny_qwen3_moe

The last line of standard output is one JSON document, "make_checkpoint/1".
"""

from collections.abc import Sequence
import json
import pathlib

from absl import app
from absl import flags

from experiments.tiny import qwen3_moe as tiny_qwen3_moe

_OUT = flags.DEFINE_string(
  "out",
  str(tiny_qwen3_moe.SHIPPED),
  "Folder to make. It may be absent, empty, or an earlier result; a folder "
  "that holds anything else is refused.",
)
_SEED = flags.DEFINE_integer(
  "seed", tiny_qwen3_moe.SEED, "Seed of the weights.", lower_bound=0
)


def main(argv: Sequence[str]) -> None:
  """Makes the checkpoint and prints its summary."""
  if len(argv) > 1:
    raise app.UsageError(f"no positional arguments are taken: {argv[1:]}")
  summary = tiny_qwen3_moe.make(pathlib.Path(_OUT.value), _SEED.value)
  print(json.dumps(summary, ensure_ascii=False))


if __name__ == "__main__":
  app.run(main)
