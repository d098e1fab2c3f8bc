"""Which tokens a step sees: a function of the seed and the step, and no state.

A text is cut into windows of length + 1 tokens that share their border token.
Each pass over the text shifts the cuts and draws a new order of the windows,
both from (seed, pass). Step s takes the windows s * batch ... of all passes
laid end to end, so a resumed run reads on where the other stopped.

Layer: training.
"""

import numpy as np


class Batches:
  """The batches of one text."""

  def __init__(self, tokens: np.ndarray, seed: int, batch: int, length: int):
    """Takes [token] of unsigned integers.

    Raises:
      ValueError: the text is shorter than two windows.
    """
    if len(tokens) < 2 * length + 2:
      raise ValueError(
          f"{len(tokens)} tokens are too few for windows of {length}."
      )
    self._tokens = tokens
    self._seed = seed
    self._batch = batch
    self._length = length
    # One window less than fit leaves room for every shift.
    self.windows_of_pass = (len(tokens) - 1) // length - 1
    self._orders: dict[int, tuple[int, np.ndarray]] = {}

  def at(self, step: int) -> np.ndarray:
    """Returns [batch, length + 1] int32 of a step."""
    first = step * self._batch
    starts = [self._start(w) for w in range(first, first + self._batch)]
    rows = np.asarray(starts)[:, None] + np.arange(self._length + 1)
    return self._tokens[rows].astype(np.int32)

  def position(self, step: int) -> dict[str, int]:
    """Where a step begins: {"pass", "window"}."""
    done, window = divmod(step * self._batch, self.windows_of_pass)
    return {"pass": done, "window": window}

  def _start(self, window: int) -> int:
    turn, place = divmod(window, self.windows_of_pass)
    if turn not in self._orders:
      rng = np.random.default_rng([self._seed, turn])
      shift = int(rng.integers(self._length))
      self._orders = {turn: (shift, rng.permutation(self.windows_of_pass))}
    shift, order = self._orders[turn]
    return shift + int(order[place]) * self._length
