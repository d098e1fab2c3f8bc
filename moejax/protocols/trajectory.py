"""Greedy runs of a decoder over several prompts at once.

The prompts stand left-padded in one batch. In portable and in contract
arithmetic a token's bits do not depend on its batch, so this costs nothing in
meaning and saves most of the time.

Layer: protocols.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import state as state_lib
from moejax.modules import decoder as decoder_lib
from moejax.modules import tap as tap_lib
from moejax.protocols import capture as capture_lib
from moejax.protocols import taps as taps_lib


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
  """A prompt as token ids; the text is only shown."""

  id: str
  tokens: tuple[int, ...]
  text: str = ""


def keep_all(name: str) -> bool:
  """Keeps every tap."""
  del name
  return True


def keep_none(name: str) -> bool:
  """Keeps the logits only, which greedy decoding reads."""
  return name == "logits"


def keep_boundaries(name: str) -> bool:
  """Keeps logits, state, residual stream, routers and what indexers show."""
  return (
      taps_lib.level(name) != "L4"
      or ".router." in name
      or taps_lib.split(name)[1] == taps_lib.VISIBLE
  )


def run(
    decoder: decoder_lib.Decoder,
    prompts: Sequence[Prompt],
    num_steps: int,
    *,
    wanted: Callable[[str], bool] = keep_all,
    tokens: Sequence[Sequence[int]] | None = None,
    given: Sequence[capture_lib.Capture] | None = None,
    given_taps: Callable[[str], bool] = keep_all,
    any_dtype: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> list[capture_lib.Capture]:
  """Prefills and decodes; returns one capture a prompt.

  Args:
    decoder: The model under some arithmetic.
    prompts: At least one.
    num_steps: Decode steps after prefill.
    wanted: Which taps to keep.
    tokens: [prompt][step] ids to feed instead of the decoder's own choice.
    given: Captures whose tap values replace the decoder's (see
      `capture.Replay`); their tokens are fed as well.
    given_taps: Which of the given taps replace.
    any_dtype: Whether they also replace values of another dtype.
    progress: Called after every forward pass.

  Returns:
    Captures in the order of the prompts. `chosen` is always the decoder's own
    choice: the first of the largest logits.
  """
  if not prompts:
    raise ValueError("no prompts to run.")
  if given is not None:
    tokens = [c.generated for c in given]
  width = max(len(p.tokens) for p in prompts)
  padding = [width - len(p.tokens) for p in prompts]
  feed = np.zeros((len(prompts), width), np.int32)
  valid = np.zeros((len(prompts), width), bool)
  for row, prompt in enumerate(prompts):
    feed[row, padding[row] :] = prompt.tokens
    valid[row, padding[row] :] = True
  state = decoder_lib.empty_state(
      decoder.config, len(prompts), width + num_steps,
      dtype=decoder.layers[0].attention.state_dtype,
  )
  steps: list[list[capture_lib.Step]] = [[] for _ in prompts]
  window = decoder.config.sliding_window
  for index in range(num_steps + 1):
    recorder = capture_lib.BatchRecorder(
        lambda name: wanted(name) or name == "logits"
    )
    start, end = state.length, state.length + feed.shape[1]
    pads = padding if index == 0 else [0] * len(prompts)
    keys = [_first_key(first, start, window) for first in padding]
    tap: tap_lib.Tap = recorder
    if given is not None:
      tap = capture_lib.Replay(
          recorder,
          _given_values(given, index, given_taps),
          [(pads[i], keys[i], end) for i in range(len(prompts))],
          any_dtype,
      )
    _, state = decoder(
        jnp.asarray(feed), state, jnp.asarray(valid), tap=tap
    )
    # As a list: a tree would sort the names and lose the order of execution.
    values = jax.device_get(list(recorder.seen.values()))
    seen = dict(zip(recorder.seen, values, strict=True))
    arrays = _state_arrays(state)
    for row in range(len(prompts)):
      taps = recorder.rows(
          seen, row, len(prompts), pads[row], keys[row], end
      )
      steps[row].append(
          capture_lib.Step(
              start=start + pads[row] - padding[row],
              tokens=tuple(feed[row, pads[row] :].tolist()),
              chosen=first_largest(taps["logits"][-1]),
              taps=taps,
              state=capture_lib.state_fingerprint(
                  live_state(arrays, row, padding[row], end, window)
              ),
          )
      )
    progress()
    feed = np.array(
        [[s[-1].chosen if tokens is None else tokens[i][index]]
         for i, s in enumerate(steps)],
        np.int32,
    )
    valid = np.ones_like(feed, bool)
  return [
      capture_lib.Capture(
          prompt.id,
          tuple(prompt.tokens),
          steps[row],
          live_state(arrays, row, padding[row], end, window),
      )
      for row, prompt in enumerate(prompts)
  ]


def _first_key(first: int, start: int, window: int | None) -> int:
  """The first state row that any query of a step can see."""
  return first if window is None else max(first, start - (window - 1))


def first_largest(logits: np.ndarray) -> int:
  """The lowest index among the largest values of [vocab]."""
  return int(np.argmax(logits.astype(np.float64)))


def live_state(
    arrays: dict[str, np.ndarray],
    row: int,
    first: int,
    end: int,
    window: int | None = None,
) -> dict[str, np.ndarray]:
  """Cuts one sequence's state rows out of the buffers, padding excluded.

  Under a sliding window of W only the last W - 1 rows can be read again; the
  others are dead and no part of the state.
  """
  if window is not None:
    first = max(first, end - (window - 1))
  return {
      name: np.ascontiguousarray(a[row, first:end])
      for name, a in arrays.items()
  }


def _state_arrays(state: state_lib.KVState) -> dict[str, np.ndarray]:
  keys, values = jax.device_get((state.keys, state.values))
  out = {}
  for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
    out[f"layers.{layer}.keys"] = k
    out[f"layers.{layer}.values"] = v
  return out


def _given_values(given, index, given_taps):
  names = [n for n in given[0].steps[index].taps if given_taps(n)]
  return {n: [c.steps[index].taps[n] for c in given] for n in names}
