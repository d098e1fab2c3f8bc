"""What a person sees of a training run, on stderr.

Layer: experiments.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
from typing import Any

import rich.console
import rich.progress


@contextlib.contextmanager
def steps(total: int) -> Iterator[Callable[[dict], None]]:
  """Yields report(line of metrics.jsonl with "seconds_left").

  On a terminal a bar moves; elsewhere every report is one line.
  """
  console = rich.console.Console(stderr=True)
  if not console.is_terminal:
    yield lambda line: console.print(
        f"step {line['step']}/{total}  {_figures(line)}"
        f"  about {line['seconds_left']:.0f} s left",
        highlight=False,
        soft_wrap=True,
    )
    return
  bar = rich.progress.Progress(
      rich.progress.TextColumn("step"),
      rich.progress.BarColumn(),
      rich.progress.MofNCompleteColumn(),
      rich.progress.TextColumn("{task.description}"),
      console=console,
  )
  task = bar.add_task("compiling", total=total)

  def report(line: dict) -> None:
    left = f"about {line['seconds_left']:.0f} s left"
    bar.update(
        task, completed=line["step"], description=f"{_figures(line)}  {left}"
    )

  with bar:
    yield report


def summary(record: dict[str, Any]) -> None:
  """Prints a few lines on how the run ended."""
  console = rich.console.Console(stderr=True)

  def say(text):
    console.print(text, highlight=False, markup=False, soft_wrap=True)

  say(
      f"{record['name']}: {record['steps']} of {record['recipe']['steps']}"
      f" steps, {record['seconds']:.0f} s after {record['compile_seconds']:.0f}"
      f" s of compilation, {record['tokens_per_second']} tokens/s"
  )
  for name, part in record["validation"].items():
    beside = ", ".join(
        f"{baseline} {nats:.3f}"
        for baseline, nats in record["baselines"].get(name, {}).items()
    )
    say(f"  validation {name}: {part['nats']:.4f} nats/token ({beside})")
  dead = {
      layer: row["dead"]
      for layer, row in record["experts"].items()
      if row["dead"]
  }
  say(f"  dead experts: {dead or 'none'}")
  for sample in record["samples"]:
    say(f"  > {' '.join(sample['text'].split())[:100]}")


def _figures(line: dict) -> str:
  least = min(row["entropy"] for row in line["experts"].values())
  dead = sum(len(row["dead"]) for row in line["experts"].values())
  return (
      f"loss {line['loss'][-1]:.4f}  |g| {line['gradient_norm'][-1]:.3f}"
      f"  entropy >= {least:.3f}  dead {dead}"
      f"  {line['tokens_per_second']} tokens/s"
  )
