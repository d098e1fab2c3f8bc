"""The training loop: from a corpus and a recipe to weights.

Layer: experiments.
"""

from collections.abc import Callable
import dataclasses
import json
import math
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np

from experiments.support import environment
from experiments.training import corpus as corpus_lib
from moejax.contracts import document
from moejax.contracts import refusal
from moejax.training import balance
from moejax.training import batches as batches_lib
from moejax.training import checkpoints
from moejax.training import models
from moejax.training import recipe as recipe_lib
from moejax.training import step as step_lib

METRICS = "metrics.jsonl"
# A second run, or a resumed one, has the bits of the first only if the compiler
# may neither choose by measuring nor add in an order that changes.
XLA_FLAGS = (
    "--xla_gpu_deterministic_ops=true",
    "--xla_gpu_autotune_level=0",
    "--xla_gpu_enable_triton_gemm=false",
)


class NotFinite(Exception):
  """A loss or gradient that is not finite; the message names the leaves."""


@dataclasses.dataclass(slots=True)
class Result:
  """What a run ended with.

  Attributes:
    state: After the last step.
    steps: Of the recipe that are done.
    compile_seconds: Of this process in the compiler.
    complete: Whether all steps of the recipe are done.
  """

  state: step_lib.State
  steps: int
  compile_seconds: float
  complete: bool


def set_compiler_flags() -> None:
  """Adds `XLA_FLAGS` to the environment; call it before anything computes."""
  given = os.environ.get("XLA_FLAGS", "")
  missing = [f for f in XLA_FLAGS if f.split("=")[0] not in given]
  os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()


def identity(
    model: models.Model, recipe: recipe_lib.Recipe, corpus: corpus_lib.Corpus
) -> dict[str, Any]:
  """What decides the bits of a run, as JSON values."""
  where = environment.describe()
  made = {
      "model": type(model).__name__,
      "config": document.to_dict(model.config),
      "recipe": document.to_dict(recipe),
      "corpus": corpus.digest,
      "devices": [device.device_kind for device in jax.devices()],
      "jax": where["packages"]["jax"],
      "xla_flags": where["xla_flags"],
  }
  return json.loads(json.dumps(made))


def train(
    model: models.Model,
    recipe: recipe_lib.Recipe,
    corpus: corpus_lib.Corpus,
    folder: pathlib.Path,
    time_limit: float = math.inf,
    checkpoint_every: int = 10,
    progress: Callable[[dict], None] = lambda _: None,
) -> Result:
  """Trains, or goes on with, the run in a folder.

  Args:
    model: The architecture.
    recipe: How.
    corpus: The text.
    folder: Of the run: checkpoints and metrics.jsonl.
    time_limit: Seconds after which no further call begins that would not end
      within them; compilation counts.
    checkpoint_every: Calls between two checkpoints.
    progress: Called with each line of metrics.jsonl.

  Raises:
    NotFinite: the last checkpoint stays as it is.
    refusal.HarnessError: the folder holds another run or a damaged one, the
      text is too short, or the disk is full.
  """
  start = time.monotonic()
  try:
    batches = batches_lib.Batches(
        corpus.train, recipe.seed, recipe.batch, recipe.length
    )
    trainer = step_lib.Trainer(model, recipe)
  except ValueError as error:
    raise refusal.HarnessError(str(error)) from error
  who = identity(model, recipe, corpus)
  state = trainer.initial()
  restored = checkpoints.restore(folder, state, who)
  if restored is not None:
    state = trainer.place(restored)
  done = int(state.step)
  _cut(folder, done)
  before = time.monotonic()
  if done < recipe.steps:
    trainer.compile(state)
  compile_seconds = time.monotonic() - before
  first, begun, slowest = done, time.monotonic(), 0.0
  saved = restored is not None
  while done < recipe.steps:
    now = time.monotonic()
    if now + 1.5 * slowest - start > time_limit:
      break
    tokens = np.stack([batches.at(done + i) for i in range(recipe.chunk)])
    fresh, report = trainer.run(state, tokens)
    report = jax.device_get(report)
    state = fresh
    if not report.done.all():
      _refuse(report, trainer.paths, done)
    done += recipe.chunk
    taken = time.monotonic() - now
    slowest = max(slowest, taken)
    line = _line(report, recipe, done, taken, len(corpus.train))
    _append(folder, line)
    spent = time.monotonic() - begun
    left = (recipe.steps - done) * spent / (done - first)
    progress({**line, "seconds_left": left})
    saved = done % (recipe.chunk * checkpoint_every) == 0
    if saved:
      checkpoints.save(folder, state, who, batches.position(done))
  if not saved:
    checkpoints.save(folder, state, who, batches.position(done))
  return Result(state, done, compile_seconds, done == recipe.steps)


def _line(report, recipe, done, seconds, corpus_tokens) -> dict:
  """One line of metrics.jsonl; losses are exact, as float32 in decimal."""
  tokens = recipe.chunk * recipe.batch * recipe.length
  return {
      "step": done,
      "passes": round(done * recipe.batch * recipe.length / corpus_tokens, 3),
      "loss": [float(x) for x in report.loss],
      "gradient_norm": [float(x) for x in report.gradient_norm],
      "auxiliary": {
          name: float(values[-1]) for name, values in report.auxiliary.items()
      },
      "seconds": round(seconds, 4),
      "tokens_per_second": round(tokens / seconds),
      "experts": balance.statistics(
          {layer: c.sum(0) for layer, c in report.counts.items()}
      ),
  }


def _refuse(report, paths, done) -> None:
  bad = int(np.flatnonzero(~report.done)[0])
  names = [p for p, ok in zip(paths, report.finite[bad], strict=True) if not ok]
  what = f"gradients of {', '.join(names)}" if names else "the loss"
  raise NotFinite(
      f"step {done + bad + 1}: not finite: {what} (loss {report.loss[bad]})."
      " The last checkpoint is kept."
  )


def _append(folder: pathlib.Path, line: dict) -> None:
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / METRICS).open("a", encoding="utf-8") as file:
      file.write(json.dumps(line) + "\n")
  except OSError as error:
    raise refusal.HarnessError(
        f"{folder / METRICS} cannot be written: {error}"
    ) from error


def read_metrics(folder: pathlib.Path) -> list[dict]:
  """The lines of metrics.jsonl; a last line that was cut short is left out."""
  path = folder / METRICS
  lines = []
  for text in path.read_text("utf-8").splitlines() if path.is_file() else ():
    try:
      lines.append(json.loads(text))
    except ValueError:
      break
  return lines


def _cut(folder: pathlib.Path, steps: int) -> None:
  """Drops the lines behind the checkpoint that a run goes on from."""
  if (folder / METRICS).is_file():
    kept = [line for line in read_metrics(folder) if line["step"] <= steps]
    text = "".join(json.dumps(line) + "\n" for line in kept)
    (folder / METRICS).write_text(text, "utf-8")
