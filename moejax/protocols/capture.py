"""What one run of one sequence showed, in the form that is compared.

A capture holds, for prefill and for every decode step, the value of each tap
without batch axis and without padding, and the fingerprint of the whole
persistent state after the step. `BatchRecorder` makes captures from a decoder
that runs a left-padded batch; `Replay` puts another backend's values into it.

Layer: protocols.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.modules import tap as tap_lib
from moejax.numerics import fingerprint
from moejax.protocols.batch import layouts
from moejax.protocols.state import layout as layout_lib
from moejax.protocols import taps as taps_lib

StateArrays = Mapping[str, np.ndarray]
_COMPONENTS = ("keys", "values", *layout_lib.COMPONENTS)


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
    final_state: {"layers.0.keys": [key, kv_head, head_dim], ...}, or the
      components of `state.layout`.
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
  """Composite over components in canonical order, layers ascending.

  Args:
    state: {"layers.N.COMPONENT" or "layers.N.COMPONENT.ARRAY": array}.
  """
  return fingerprint.composite(
      "state",
      [
          (n, fingerprint.fingerprint(state[n], n))
          for n in sorted(state, key=_state_order)
      ],
  )


def _state_order(name: str) -> tuple[int, int, str]:
  layer, component = taps_lib.split(name)
  component, _, array = component.partition(".")
  return _COMPONENTS.index(component), layer, array


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
    values: Mapping[str, np.ndarray],
    layout: layouts.Layout,
    places: Sequence[layouts.Place],
    row: int,
) -> dict[str, np.ndarray]:
  """Returns the taps of one sequence as a run of it alone shows them.

  Args:
    values: What a batch showed, brought to the host.
    layout: Of the decoder.
    places: Each sequence in this step.
    row: Which one.

  Returns:
    {name: value}, in the order of `values`; taps without an element are left
    out, since a backend need not run an operation on nothing.
  """
  out = {}
  for name, value in values.items():
    region = layout.region(name, places[row])
    if region is not None:
      value = _with_batch(name, value, len(places))[row][region]
    if value.size:
      out[name] = np.ascontiguousarray(value)
  return out


def _with_batch(name: str, value, batch: int):
  """Gives the taps of routed layers, which are flat, their batch axis back."""
  if ".moe." in name:
    return value.reshape(batch, -1, *value.shape[1:])
  return value


class Replay(tap_lib.Tap):
  """Shows values to an inner recorder, then goes on with given ones.

  So every operation runs on the inputs that the other backend had, and what
  the recorder holds is this backend's answer to them.

  Args:
    inner: Receives this decoder's own values.
    given: {tap name: one array a sequence, None where it shows none}. A tap
      that is absent, or whose shape or dtype is another, is left alone.
    layout: Of the decoder.
    places: Each sequence in this step.
    any_dtype: Replaces values of another dtype as well, as error bounds need.
  """

  def __init__(
      self,
      inner: BatchRecorder,
      given: Mapping[str, list[np.ndarray | None]],
      layout: layouts.Layout,
      places: Sequence[layouts.Place],
      any_dtype: bool = False,
  ):
    super().__init__()
    self._inner = inner
    self._given = given
    self._layout = layout
    self._places = places
    self._any_dtype = any_dtype

  def observe(self, name, value):
    self._inner.observe(name, value)
    parts = self._given.get(name)
    if parts is None:
      return value
    shown = next(part for part in parts if part is not None)
    if shown.dtype != value.dtype and not self._any_dtype:
      return value
    regions = [self._layout.region(name, place) for place in self._places]
    if regions[0] is None:
      return jnp.asarray(shown) if shown.shape == value.shape else value
    # Dead keys stay invisible: the mask's value, or no weight.
    hidden = name.endswith((".masked", ".shifted"))
    filler = ml_dtypes.finfo(shown.dtype).min if hidden else 0
    whole = np.full(value.shape, filler, shown.dtype)
    view = _with_batch(name, whole, len(regions))
    for row, part, region in zip(view, parts, regions, strict=True):
      shape = row[region].shape
      if part is None and 0 in shape:
        continue
      if part is None or part.shape != shape:
        return value
      row[region] = part
    return jnp.asarray(whole)
