"""What one run of one sequence showed, in the form that is compared.

A capture holds, for prefill and for every decode step, the value of each tap
without batch axis and without padding, and the fingerprint of the whole
persistent state after the step. `BatchRecorder` makes captures from a decoder
that runs a left-padded batch; `Replay` puts another backend's values into it.

Layer: protocols.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.modules import tap as tap_lib
from moejax.numerics import fingerprint
from moejax.protocols import taps as taps_lib

StateArrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(slots=True)
class Step:
  """One forward pass of one sequence.

  Attributes:
    start: Position of its first token.
    tokens: Token ids fed.
    chosen: Token id that greedy decoding takes after it.
    taps: {name: value}, in order of execution.
    state: Fingerprint of the whole persistent state after the step.
  """

  start: int
  tokens: tuple[int, ...]
  chosen: int
  taps: dict[str, np.ndarray]
  state: str


@dataclasses.dataclass(slots=True)
class Capture:
  """One sequence: its prompt, its steps, the state at the end.

  Attributes:
    prompt_id: Identifies the prompt.
    prompt: Its token ids.
    steps: Prefill first, then one for each decoded token.
    final_state: {"layers.0.keys": [key, kv_head, head_dim], ...}.
  """

  prompt_id: str
  prompt: tuple[int, ...]
  steps: list[Step]
  final_state: dict[str, np.ndarray]

  @property
  def generated(self) -> tuple[int, ...]:
    """The token ids that greedy decoding chose."""
    return tuple(step.chosen for step in self.steps)


def state_fingerprint(state: StateArrays) -> str:
  """Composite over components in order: keys, then values, layers ascending."""
  ordered = sorted(
      state, key=lambda name: (name.rsplit(".", 1)[-1], _layer(name))
  )
  return fingerprint.composite(
      "kv_state", [(n, fingerprint.fingerprint(state[n], n)) for n in ordered]
  )


def _layer(name: str) -> int:
  return int(name.split(".")[1])


class BatchRecorder(tap_lib.Tap):
  """Keeps what a left-padded batch shows; `rows` cuts out one sequence.

  Args:
    wanted: Which taps to keep, by name.
  """

  def __init__(self, wanted: Callable[[str], bool]):
    super().__init__()
    self._wanted = wanted
    self.seen: dict[str, jax.Array] = {}

  def observe(self, name, value):
    if self._wanted(name):
      self.seen[name] = value
    return value

  def rows(
      self, values: Mapping[str, np.ndarray], sequence: int, batch: int,
      padding: int, first_key: int, last_key: int
  ) -> dict[str, np.ndarray]:
    """Returns the taps of one sequence, without its padding.

    Args:
      values: `seen`, brought to the host.
      sequence: Index in the batch.
      batch: Sequences in the batch.
      padding: Padded tokens of this step, on the left.
      first_key: First state row that belongs to the sequence.
      last_key: One past the last row written.
    """
    return {
        name: _cut(name, value, sequence, batch, padding, first_key, last_key)
        for name, value in values.items()
    }


def _with_batch(name: str, value, batch: int):
  """Gives the taps of routed layers, which are flat, their batch axis back."""
  if ".moe." in name:
    return value.reshape(batch, -1, *value.shape[1:])
  return value


def _region(name: str, padding: int, first_key: int, last_key: int) -> tuple:
  """The index of a sequence's own part, after the batch axis."""
  region = []
  for axis in taps_lib.axes(name):
    if axis == "token":
      region.append(slice(padding, None))
    elif axis == "key":
      region.append(slice(first_key, last_key))
    else:
      region.append(slice(None))
  return tuple(region)


def _cut(name, value, sequence, batch, padding, first_key, last_key):
  if "token" not in taps_lib.axes(name):
    return value
  region = _region(name, padding, first_key, last_key)
  return np.ascontiguousarray(
      _with_batch(name, value, batch)[sequence][region]
  )


class Replay(tap_lib.Tap):
  """Shows values to an inner recorder, then goes on with given ones.

  So every operation runs on the inputs that the other backend had, and what
  the recorder holds is this backend's answer to them.

  Args:
    inner: Receives this decoder's own values.
    given: {tap name: one array a sequence}. A tap that is absent, or whose
      shape or dtype is another, is left alone.
    layout: (padding, first_key, last_key) of each sequence.
    any_dtype: Replaces values of another dtype as well, as error bounds need.
  """

  def __init__(
      self,
      inner: BatchRecorder,
      given: Mapping[str, list[np.ndarray]],
      layout: list[tuple[int, int, int]],
      any_dtype: bool = False,
  ):
    super().__init__()
    self._inner = inner
    self._given = given
    self._layout = layout
    self._any_dtype = any_dtype

  def observe(self, name, value):
    self._inner.observe(name, value)
    parts = self._given.get(name)
    if parts is None:
      return value
    dtype = parts[0].dtype
    if dtype != value.dtype and not self._any_dtype:
      return value
    if "token" not in taps_lib.axes(name):
      same_shape = parts[0].shape == value.shape
      return jnp.asarray(parts[0]) if same_shape else value
    # Dead keys stay invisible: the mask's value, or no weight.
    filler = ml_dtypes.finfo(dtype).min if name.endswith(".masked") else 0
    whole = np.full(value.shape, filler, dtype)
    view = _with_batch(name, whole, len(self._layout))
    for row, part, place in zip(view, parts, self._layout, strict=True):
      region = _region(name, *place)
      if part.shape != row[region].shape:
        return value
      row[region] = part
    return jnp.asarray(whole)
