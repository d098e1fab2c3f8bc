"""Trains a tiny model in a process of its own, for tests that kill one.

  python -m tests.experiments.training.run_tiny CORPUS RUN STEPS DTYPE
"""

import dataclasses
import pathlib
import sys

import jax

from experiments.training import corpus as corpus_lib
from experiments.training import loop
from moejax.training import models
from tests.training import tiny


def main(corpus: str, run: str, steps: str, dtype: str) -> None:
  """Trains, with a line on standard output for every call."""
  jax.config.update("jax_enable_x64", True)
  text = corpus_lib.load(corpus)
  config = dataclasses.replace(
      tiny.QWEN3_MOE, vocab_size=text.vocab_size, dtype=dtype
  )
  loop.train(
      models.of(config),
      dataclasses.replace(tiny.RECIPE, steps=int(steps)),
      text,
      pathlib.Path(run),
      checkpoint_every=5,
      progress=lambda line: print(line["step"], flush=True),
  )


if __name__ == "__main__":
  main(*sys.argv[1:])
