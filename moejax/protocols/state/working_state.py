"""Between the state a decoder works on and the canonical one.

A decoder keeps the gate of an open window without its position bias and in
its own dtype; the canonical state holds float32 scores with the bias. One way
is an addition. The way back looks for a gate that gives the same score: later
steps read nothing else of it.

Layer: protocols.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from moejax.contracts import deepseek_v4
from moejax.contracts import deepseek_v4_state as contract
from moejax.contracts import document
from moejax.contracts import refusal
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import state as rows_lib
from moejax.numerics import formats
from moejax.protocols.state import layout as layout_lib
from moejax.protocols.state import persistent_state

_FILL = {"kv": 0.0, "score": -np.inf}


def bias_name(layer: int, component: str) -> str:
  """The parameter path of a compressor's position bias."""
  inner = "indexer." if component == layout_lib.INDEXER else ""
  return f"layers.{layer}.attention.{inner}compressor.position_bias"


def capture(
    config: config_lib.DeepseekV4Config,
    working: contract.DeepseekV4State,
    parameters: Mapping[str, Any],
    prompt: Sequence[int],
    layout: str = layout_lib.RAW,
    *,
    sequence: int = 0,
    **binding: str,
) -> persistent_state.PersistentState:
  """Returns the canonical state of one sequence of a decoder's batch.

  Args:
    config: The decoder's.
    working: Its state; any arrays that NumPy can read.
    parameters: {parameter path: array} with every `position_bias`, float32.
    prompt: Token ids that the sequence started with.
    layout: One of `layout.LAYOUTS`.
    sequence: Index in the batch.
    **binding: More fields of `persistent_state.Identity`.

  Returns:
    Float32 containers: kv, window and entries widened exactly; score is
    float32(gate) + bias, rounded once. Rows that no token has written hold 0
    and, in scores, minus infinity, whatever the buffer holds.

  Raises:
    HarnessError: an array has not the shape that the configuration gives it,
      or a bias is missing.
  """
  length = int(working.lengths[sequence])
  arrays = {}
  for part in layout_lib.parts(config, length, layout_lib.RAW):
    value = _raw_value(config, working, parameters, part, sequence)
    written = np.array(part.positions, int) >= 0
    fill = np.float32(_FILL.get(part.array, 0.0))
    arrays[part.name] = np.where(written[:, None], value, fill)
  identity = persistent_state.Identity(
      config=document.digest(config),
      prompt=persistent_state.prompt_digest(prompt),
      length=length,
      layout=layout_lib.RAW,
      **binding,
  )
  state = persistent_state.PersistentState(config, identity, arrays)
  return persistent_state.narrow(state, layout)


def _raw_value(config, working, parameters, part, sequence) -> np.ndarray:
  layer = working.layers[part.layer]
  if part.component == layout_lib.WINDOW:
    return _rows(part, layer.window[sequence], config.window)
  inner = part.component == layout_lib.INDEXER
  compressor = layer.indexer if inner else layer.compressor
  if part.array not in ("kv", "score"):
    entries = np.asarray(compressor.entries)[sequence]
    return _rows(part, entries[: len(part.rows)], len(part.rows))
  rate = config.rate(part.layer)
  if part.array == "kv":
    current = _rows(part, compressor.kv[sequence], rate)
    previous = compressor.previous_kv
  else:
    gate = _rows(part, compressor.gate[sequence], rate)
    shape = (rate, part.width)
    current = gate + _bias(parameters, part.layer, part.component, shape)
    previous = compressor.previous_score
  if layout_lib.series(config, part.layer) == 1:
    return current
  return np.concatenate([_rows(part, previous[sequence], rate), current])


def _rows(part, array, rows: int) -> np.ndarray:
  """An array as exact float32, after checking its shape."""
  array = np.asarray(array)
  if array.shape != (rows, part.width):
    raise refusal.HarnessError(
        f"{part.name}: the working state holds {array.shape}, not"
        f" {(rows, part.width)}."
    )
  return array.astype(np.float32)


def _bias(parameters, layer, component, shape) -> np.ndarray:
  name = bias_name(layer, component)
  bias = np.asarray(parameters[name]) if name in parameters else None
  if bias is None or (bias.shape, bias.dtype) != (shape, np.float32):
    have = None if bias is None else (bias.shape, bias.dtype.name)
    raise refusal.HarnessError(f"{name} is {have}, not float32 {shape}.")
  return bias


def restore(
    state: persistent_state.PersistentState,
    parameters: Mapping[str, Any],
    capacity: int,
    graph: deepseek_v4.DeepseekV4Graph = deepseek_v4.TRANSFORMERS,
) -> contract.DeepseekV4State:
  """Returns the working state, with a batch of one, that a state describes.

  A decoder that goes on from it computes what it would have computed from the
  original: entries are narrowed exactly to the config's dtype, kv to that of
  the graph's compressors, and each gate gives its score again when the bias is
  added. Rows that the layout does not hold are 0 and, in previous scores, minus
  infinity.

  Args:
    state: In any layout.
    parameters: {parameter path: array} with every `position_bias`, float32.
    capacity: Rows of the buffers of entries.
    graph: Of the decoder; its compressor matters here.

  Raises:
    HarnessError: a value is not one of its dtype, no gate gives a
      score, a bias is missing, or the capacity is below the entries.
  """
  c, length = state.config, state.identity.length
  dtype = formats.of(c.dtype).numpy
  row_dtype = formats.of(rows_lib.row_dtype(c, graph)).numpy
  raw = {
      part.name: np.full(part.shape, _FILL.get(part.array, 0.0), np.float32)
      for part in layout_lib.parts(c, length, layout_lib.RAW)
  }
  held = {name: np.zeros(len(array), bool) for name, array in raw.items()}
  for part in state.parts():
    rows = np.array(part.rows, int)
    raw[part.source][rows, : part.width] = state.arrays[part.name]
    held[part.source][rows] = np.array(part.positions, int) >= 0

  def compressor(layer, component):
    at = f"layers.{layer}.{component}"
    rate = c.rate(layer)
    kv = _narrow(f"{at}.kv", raw[f"{at}.kv"], row_dtype)
    score = raw[f"{at}.score"]
    split = len(kv) - rate
    bias = _bias(parameters, layer, component, (rate, kv.shape[1]))
    inner = component == layout_lib.INDEXER
    keys = f"{at}.keys" if inner else f"layers.{layer}.compressed_kv"
    if len(raw[keys]) > capacity:
      raise refusal.HarnessError(
          f"{keys}: {len(raw[keys])} entries do not fit {capacity=}."
      )
    entries = np.zeros((1, capacity, raw[keys].shape[1]), dtype)
    entries[0, : len(raw[keys])] = _narrow(keys, raw[keys], dtype)
    gate = _gate(
        f"{at}.score",
        score[split:],
        bias,
        row_dtype,
        held[f"{at}.score"][split:],
    )
    return contract.CompressorState(
        kv=kv[None, split:],
        gate=gate[None],
        previous_kv=kv[None, :split] if split else None,
        previous_score=score[None, :split] if split else None,
        entries=entries,
    )

  layers = []
  for layer, kind in enumerate(c.attentions):
    name = f"layers.{layer}.{layout_lib.WINDOW}"
    layers.append(
        contract.LayerState(
            window=_narrow(name, raw[name], dtype)[None],
            compressor=(
                None
                if kind == config_lib.SWA
                else compressor(layer, layout_lib.COMPRESSOR)
            ),
            indexer=(
                compressor(layer, layout_lib.INDEXER)
                if kind == config_lib.CSA
                else None
            ),
        )
    )
  return contract.DeepseekV4State(tuple(layers), np.array([length], np.int32))


def _narrow(name: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
  narrowed = values.astype(dtype)
  wrong = persistent_state.differing(narrowed.astype(np.float32), values)
  if wrong.any():
    raise refusal.HarnessError(
        f"{name}: {int(wrong.sum())} values are not of {dtype.name}; first"
        f" {values[wrong][0]}."
    )
  return narrowed


def _gate(
    name: str,
    score: np.ndarray,
    bias: np.ndarray,
    dtype: np.dtype,
    held: np.ndarray,
) -> np.ndarray:
  """Gates of a dtype with float32(gate) + bias = score; 0 where not held.

  The nearest value to score - bias lies at most as far from it as the gate
  that made the score, so it or, at a tie of rounding, a neighbour does it.
  """
  with np.errstate(invalid="ignore", over="ignore"):
    nearest = (score.astype(np.float64) - bias).astype(dtype)
    infinity = np.array(np.inf, dtype)
    candidates = (
        nearest,
        np.nextafter(nearest, infinity),
        np.nextafter(nearest, -infinity),
        score.astype(dtype),  # A bias of zero, signs and NaNs included.
    )
    gate = np.zeros(score.shape, dtype)
    open_places = np.repeat(held[:, None], score.shape[1], axis=1)
    for candidate in candidates:
      total = candidate.astype(np.float32) + bias
      fits = open_places & ~persistent_state.differing(total, score)
      gate[fits] = candidate[fits]
      open_places &= ~fits
  if open_places.any():
    raise refusal.HarnessError(
        f"{name}: no {dtype.name} gate gives {int(open_places.sum())} of the"
        f" scores; first {score[open_places][0]}."
    )
  return gate
