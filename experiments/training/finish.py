"""What a trained model ships as: folder, evaluation, samples and record.

Layer: experiments.
"""

import pathlib
from typing import Any

import numpy as np
import tokenizers

from experiments.support import environment
from experiments.training import corpus as corpus_lib
from experiments.training import evaluation
from experiments.training import export
from experiments.training import loop
from experiments.training import model_card
from moejax.contracts import document
from moejax.reports import loss_curve
from moejax.training import balance
from moejax.training import models
from moejax.training import recipe as recipe_lib

SCHEMA = "training/1"
# Beginnings of which the training text knows something, short and long; they
# ship with the model, for samples and for comparisons.
PROMPTS = {
    "en_open": "To open the file",
    "en_option": "If this option is not given, the program",
    "en_kernel": (
        "The kernel reads the device tree when it starts, and every driver that"
        " finds its device there"
    ),
    "zh_menu": "选择菜单中的",
    "zh_package": "如果您需要安装其他软件包，请先",
    "mixed_command": "运行 apt-get update 之后, the package list",
}
_SAMPLE_TOKENS = 48
_TEMPERATURE = 0.7


def finish(
    model: models.Model,
    recipe: recipe_lib.Recipe,
    corpus: corpus_lib.Corpus,
    run: pathlib.Path,
    result: loop.Result,
    out: pathlib.Path | None,
) -> dict[str, Any]:
  """Evaluates trained weights, draws the loss, and exports them if asked to.

  Args:
    model: The architecture.
    recipe: How it was trained.
    corpus: On what.
    run: Folder of the run; the loss curve is written there.
    result: Of the loop.
    out: Folder to export to, or None.

  Returns:
    The record, schema "training/1".

  Raises:
    refusal.HarnessError: the folder to export to holds something, or cannot
      be written.
  """
  trained = result.state.params | result.state.fixed
  shipped = export.weights(model, trained)
  metrics = loop.read_metrics(run)
  losses = [loss for line in metrics for loss in line["loss"]]
  # Of all processes that had a part in the run.
  seconds = sum(line["seconds"] for line in metrics)
  tokens = result.steps * recipe.batch * recipe.length
  validation = _validate(model, recipe, corpus, shipped)
  record = {
      "schema": SCHEMA,
      "name": recipe.name,
      "model": type(model).__name__,
      "parameters": sum(
          a.size for a in shipped.values() if a.dtype.kind not in "iu"
      ),
      "config": document.to_dict(model.config),
      "recipe": document.to_dict(recipe),
      "corpus": {
          "digest": corpus.digest,
          "train_tokens": len(corpus.train),
          "validation_tokens": len(corpus.validation),
      },
      "steps": result.steps,
      "complete": result.complete,
      "seconds": round(seconds, 2),
      "compile_seconds": round(result.compile_seconds, 2),
      "tokens_per_second": round(tokens / seconds) if seconds else 0,
      "train_loss": {
          "first": losses[0] if losses else None,
          "last": float(np.mean(losses[-recipe.chunk :])) if losses else None,
      },
      **validation,
      "samples": _samples(model, recipe, corpus, shipped),
      "environment": environment.describe(),
  }
  _draw(run, record, losses)
  if out is not None:
    record["sha256"] = _export(model, corpus, shipped, record, out, run)
  (run / "record.json").write_bytes(export.to_json(record))
  return record


def _validate(model, recipe, corpus, params) -> dict[str, Any]:
  nats, routes = evaluation.token_nats(
      model,
      params,
      corpus.validation,
      min(recipe.length, len(corpus.validation) - 1),
      min(recipe.batch, 64),
  )
  found = evaluation.summary(nats, corpus.validation_parts)
  return {
      "validation": found,
      "baselines": _baselines(found, corpus.baselines),
      "experts": balance.statistics(routes),
  }


def _baselines(found, by_language) -> dict[str, dict[str, float]]:
  """Adds "all": the mean over languages, weighted by their tokens."""
  sizes = {n: part["tokens"] for n, part in found.items() if n in by_language}
  names = next(iter(by_language.values()))
  mean = {
      name: sum(by_language[n][name] * size for n, size in sizes.items())
      / sum(sizes.values())
      for name in names
  }
  return {"all": mean, **by_language}


def _samples(model, recipe, corpus, params) -> list[dict[str, str]]:
  words = tokenizers.Tokenizer.from_file(
      str(corpus.folder / corpus_lib.TOKENIZER)
  )
  prompts = [words.encode(text).ids for text in PROMPTS.values()]
  room = model.config.max_positions - max(map(len, prompts))
  if room < 1:
    return []
  drawn = evaluation.generate(
      model, params, prompts, min(_SAMPLE_TOKENS, room), _TEMPERATURE,
      recipe.seed,
  )
  return [
      {"prompt": prompt, "text": words.decode(ids)}
      for prompt, ids in zip(PROMPTS.values(), drawn, strict=True)
  ]


def _draw(run, record, losses) -> None:
  levels = {"validation": record["validation"]["all"]["nats"]}
  for name, nats in record["baselines"]["all"].items():
    levels[name] = nats
  for kind in ("png", "svg"):
    picture = loss_curve.draw(losses, levels, record["name"], kind)
    (run / f"loss.{kind}").write_bytes(picture)


def _export(model, corpus, params, record, out, run) -> dict[str, str]:
  words, special = export.tokenizer_files(
      corpus.folder, model.config.max_positions
  )
  content = {
      **export.config_files(model, special),
      **export.model_files(model, params),
      **words,
      "loss.svg": (run / "loss.svg").read_bytes(),
  }
  record = {**record, "sha256": export.digests(content)}
  content["training.json"] = export.to_json(record)
  content["prompts.json"] = export.to_json({
      "schema": "prompts/1",
      "prompts": [
          {"id": name, "text": text} for name, text in PROMPTS.items()
      ],
  })
  licences = corpus.folder / corpus_lib.LICENCES
  content["LICENSES.md"] = licences.read_bytes()
  content["README.md"] = model_card.write(record).encode()
  export.write(out, content)
  return record["sha256"]
