"""Greedy runs of a decoder over several prompts at once.

The prompts stand left-padded in one batch. In portable and in contract
arithmetic a token's bits do not depend on its batch, so this costs nothing in
meaning and saves most of the time.

Layer: protocols.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.modules import tap as tap_lib
from moejax.protocols.batch import layouts
from moejax.protocols import capture as capture_lib
from moejax.protocols import selections
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
  """Keeps logits, state, residual stream, choices and proofs of packed runs."""
  kept = (*selections.INDEXER, taps_lib.PACKED_ELEMENTS)
  return (
      taps_lib.level(name) != "L4"
      or ".router." in name
      or taps_lib.split(name)[1] in kept
  )


def run(
    decoder: Any,
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
    decoder: The model under some arithmetic, of any architecture that
      `layouts.of` knows.
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
  first = [width - len(p.tokens) for p in prompts]
  feed = np.zeros((len(prompts), width), np.int32)
  valid = np.zeros((len(prompts), width), bool)
  for row, prompt in enumerate(prompts):
    feed[row, first[row] :] = prompt.tokens
    valid[row, first[row] :] = True
  layout = layouts.of(decoder, width + num_steps)
  state = layout.empty(len(prompts))
  steps: list[list[capture_lib.Step]] = [[] for _ in prompts]
  seen_before = [0] * len(prompts)
  for index in range(num_steps + 1):
    recorder = capture_lib.BatchRecorder(
        lambda name: wanted(name) or name == "logits"
    )
    places = [
        layouts.Place(feed.shape[1], 0 if index else pad, before, pad)
        for pad, before in zip(first, seen_before, strict=True)
    ]
    tap: tap_lib.Tap = recorder
    if given is not None:
      values = _given_values(given, index, given_taps)
      tap = capture_lib.Replay(recorder, values, layout, places, any_dtype)
    _, state = decoder(
        jnp.asarray(feed), state, jnp.asarray(valid), tap=tap
    )
    # As a list: a tree would sort the names and lose the order of execution.
    values = jax.device_get(list(recorder.seen.values()))
    shown = dict(zip(recorder.seen, values, strict=True))
    host = jax.device_get(state)
    states = [layout.state(host, row, p) for row, p in enumerate(places)]
    for row, place in enumerate(places):
      taps = capture_lib.rows(shown, layout, places, row)
      steps[row].append(
          capture_lib.Step(
              start=place.before,
              tokens=tuple(feed[row, place.padding :].tolist()),
              chosen=first_largest(taps["logits"][-1]),
              taps=taps,
              state=capture_lib.state_fingerprint(states[row]),
          )
      )
      seen_before[row] = place.after
    progress()
    feed = np.array(
        [[s[-1].chosen if tokens is None else tokens[i][index]]
         for i, s in enumerate(steps)],
        np.int32,
    )
    valid = np.ones_like(feed, bool)
  return [
      capture_lib.Capture(
          prompt.id, tuple(prompt.tokens), steps[row], states[row]
      )
      for row, prompt in enumerate(prompts)
  ]


def first_largest(logits: np.ndarray) -> int:
  """The lowest index among the largest values of [vocab]."""
  return int(np.argmax(logits.astype(np.float64)))


def _given_values(given, index, given_taps):
  """{tap: one array a sequence, None where it shows none} of one step."""
  taps = [capture.steps[index].taps for capture in given]
  names = dict.fromkeys(n for shown in taps for n in shown if given_taps(n))
  return {name: [shown.get(name) for shown in taps] for name in names}
