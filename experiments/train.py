"""Trains a small decoder of ours with our own routed expert MLP.

  python -m experiments.train --model=small_qwen3_moe --corpus=DIR \\
      --run=DIR --export=DIR
  python -m experiments.train --model=small_deepseek_v4 --corpus=DIR \\
      --run=DIR --export=DIR --time_limit=400

The run folder holds checkpoints, metrics.jsonl, the loss curve and record.json.
The same command goes on where it stopped, with the bits of a run that never
stopped. The learning rate is a function of the step alone: a time limit ends a
run early and leaves its schedule as declared.

The last line of standard output is one JSON document, "training/1". Exit codes:
0 all steps done, 1 a loss or gradient was not finite, 2 usage or harness error,
3 stopped by the time limit; the same command goes on.
"""

import dataclasses
import math
import pathlib
import sys

from absl import flags

from experiments.support import binary
from experiments.training import corpus as corpus_lib
from experiments.training import export
from experiments.training import finish
from experiments.training import loop
from experiments.training import show
from experiments.training import small_deepseek_v4
from experiments.training import small_qwen3_moe
from moejax.contracts import refusal
from moejax.training import models

_MODELS = {m.NAME: m for m in (small_qwen3_moe, small_deepseek_v4)}

_MODEL = flags.DEFINE_enum(
    "model", None, sorted(_MODELS), "Shape and recipe; one file each."
)
_CORPUS = flags.DEFINE_string("corpus", None, "Folder of the text.")
_RUN = flags.DEFINE_string(
    "run", None, "Folder of the run; absent, empty, or of the same run."
)
_EXPORT = flags.DEFINE_string(
    "export",
    None,
    "Hugging Face folder to write at the end; absent or empty. Also written"
    " when the time limit ended the run.",
)
_TIME_LIMIT = flags.DEFINE_float(
    "time_limit",
    math.inf,
    "Seconds, compilation included, within which the last call of steps ends."
    " Evaluation and export come after it.",
    lower_bound=0,
)
_CHECKPOINT_EVERY = flags.DEFINE_integer(
    "checkpoint_every", 10, "Calls between two checkpoints.", lower_bound=1
)
# These replace fields of the recipe; a run goes on under the same ones alone.
_STEPS = flags.DEFINE_integer("steps", None, "Optimiser steps.")
_BATCH = flags.DEFINE_integer("batch", None, "Sequences of a step.")
_LENGTH = flags.DEFINE_integer("length", None, "Tokens of a sequence.")
_CHUNK = flags.DEFINE_integer("chunk", None, "Steps of one call.")
_WARM_UP = flags.DEFINE_integer("warm_up", None, "Steps to the peak rate.")
_PEAK = flags.DEFINE_float("peak", None, "Highest learning rate.")
_SEED = flags.DEFINE_integer("seed", None, "Of weights and batches.")

NOT_FINITE, STOPPED = 1, 3


def _recipe(declared):
  flags_of = (_STEPS, _BATCH, _LENGTH, _CHUNK, _WARM_UP, _PEAK, _SEED)
  given = {f.name: f.value for f in flags_of if f.value is not None}
  try:
    return dataclasses.replace(declared, **given)
  except ValueError as error:
    raise refusal.HarnessError(str(error)) from error


def main() -> int:
  """Trains, evaluates, exports."""
  for flag in (_MODEL, _CORPUS, _RUN):
    if not flag.value:
      raise refusal.HarnessError(f"--{flag.name} is needed.")
  loop.set_compiler_flags()
  out = pathlib.Path(_EXPORT.value) if _EXPORT.value else None
  if out is not None:
    export.check_free(out)
  corpus = corpus_lib.load(_CORPUS.value)
  chosen = _MODELS[_MODEL.value]
  recipe = _recipe(chosen.RECIPE)
  model = models.of(chosen.config(corpus.vocab_size))
  run = pathlib.Path(_RUN.value)
  try:
    with show.steps(recipe.steps) as progress:
      result = loop.train(
          model,
          recipe,
          corpus,
          run,
          _TIME_LIMIT.value,
          _CHECKPOINT_EVERY.value,
          progress,
      )
  except loop.NotFinite as error:
    print(f"error: {error}", file=sys.stderr)
    return NOT_FINITE
  record = finish.finish(model, recipe, corpus, run, result, out)
  show.summary(record)
  binary.last_line(record)
  return 0 if result.complete else STOPPED


if __name__ == "__main__":
  binary.run(main)
