"""A progress bar for the stages of a long run, on stderr.

Layer: experiments.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib

import rich.console
import rich.progress


@contextlib.contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
  """Yields report(stage, done, of how many); each stage gets a bar.

  On a terminal the bars move; elsewhere each stage is one line when it ends.
  """
  console = rich.console.Console(stderr=True)
  if not console.is_terminal:
    yield lambda stage, done, total: done == total and console.print(
        f"{stage}: {total} forward passes", highlight=False
    )
    return
  bar = rich.progress.Progress(
      rich.progress.TextColumn("{task.description}", justify="left"),
      rich.progress.BarColumn(),
      rich.progress.MofNCompleteColumn(),
      rich.progress.TimeElapsedColumn(),
      rich.progress.TimeRemainingColumn(),
      console=console,
  )
  tasks: dict[str, rich.progress.TaskID] = {}

  def report(stage: str, done: int, total: int) -> None:
    if stage not in tasks:
      tasks[stage] = bar.add_task(stage, total=total)
    bar.update(tasks[stage], completed=done)

  with bar:
    yield report
