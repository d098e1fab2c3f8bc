"""Small configurations, and a literal stepwise simulator of the state.

The simulator follows the update rule token by token and knows nothing of
layouts: it is what the layouts and the ceilings are checked against. Rows are
random; an entry is a sum over its slots, so that every slot matters to it.
"""

import copy

import numpy as np

from moejax.contracts import deepseek_v4_state as contract
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.numerics import formats
from moejax.protocols.state import working_state

FLASH = config_lib.FLASH


def tiny(**changes) -> config_lib.DeepseekV4Config:
  """All layer kinds; windows and rates that a short run passes."""
  fields = dict(
      vocab_size=16, embed=8, attentions=("swa", "csa", "hca", "csa", "swa"),
      hash_layers=(0,), num_heads=2, head_dim=6, rotary_dim=2, query_rank=4,
      window=8, csa_rate=4, hca_rate=8, output_groups=2, output_rank=2,
      index_heads=2, index_dim=4, index_top_k=2, num_experts=4, top_k=2,
      expert_hidden=4, gate_scale=1.5, swiglu_limit=10.0, dtype="float32",
  )
  return config_lib.DeepseekV4Config(**{**fields, **changes})


CONFIGS = (
    tiny(),
    tiny(window=3, csa_rate=3, hca_rate=5),
    tiny(window=5, hca_rate=2, attentions=("hca", "csa", "csa")),
)
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 23, 24)
_SITES = {"swa": (), "csa": ("compressor", "indexer"), "hca": ("compressor",)}


def _sites(config, layer):
  """(name, width, series, rate) of each compressor of a layer."""
  kind = config.attentions[layer]
  widths = {"compressor": config.head_dim, "indexer": config.index_dim}
  return [
      (site, widths[site], 2 if kind == "csa" else 1, config.rate(layer))
      for site in _SITES[kind]
  ]


def biases(config, seed=0) -> dict[str, np.ndarray]:
  """Random position biases by parameter path."""
  rng = np.random.default_rng(seed)
  components = {"compressor": "compressor_state", "indexer": "indexer_state"}
  return {
      working_state.bias_name(layer, components[site]): rng.standard_normal(
          (rate, series * dim), np.float32
      )
      for layer in range(config.num_layers)
      for site, dim, series, rate in _sites(config, layer)
  }


def streams(config, length, seed=1) -> list[dict[str, np.ndarray]]:
  """What each layer projects for each token, in the config's dtype."""
  rng = np.random.default_rng(seed)
  dtype = formats.of(config.dtype).numpy

  def rows(width):
    return rng.standard_normal((length, width)).astype(dtype)

  found = []
  for layer in range(config.num_layers):
    one = {"window": rows(config.head_dim)}
    for site, dim, series, _ in _sites(config, layer):
      one[f"{site}.kv"] = rows(series * dim)
      one[f"{site}.gate"] = rows(series * dim)
    found.append(one)
  return found


def forked(given, layer):
  """The streams after a fork in a layer's experts at the last position."""
  other = copy.deepcopy(given)
  for one in other[layer + 1 :]:
    for rows in one.values():
      rows[-1] = (-2 * rows[-1].astype(np.float32)).astype(rows.dtype)
  return other


def _bias(config, given, layer, site):
  component = {"compressor": "compressor_state", "indexer": "indexer_state"}
  return given[working_state.bias_name(layer, component[site])]


def _entry(kv, score, dtype):
  """Some function of all slots, channel by channel."""
  finite = np.where(np.isneginf(score), 0, score).astype(np.float64)
  return (kv.astype(np.float64) + 0.5 * finite).sum(0).astype(dtype)


def stepwise(config, given, bias) -> dict[str, np.ndarray]:
  """The raw arrays by the update rule of the specification, section 7."""
  dtype = formats.of(config.dtype).numpy
  out = {}
  for layer, one in enumerate(given):
    window = np.zeros((config.window, config.head_dim), np.float32)
    for p, row in enumerate(one["window"]):
      window[p % config.window] = row
    out[f"layers.{layer}.window_kv"] = window
    for site, dim, f, rate in _sites(config, layer):
      kv = np.zeros((f * rate, f * dim), np.float32)
      score = np.full((f * rate, f * dim), -np.inf, np.float32)
      entries = []
      ape = _bias(config, bias, layer, site)
      pairs = zip(one[f"{site}.kv"], one[f"{site}.gate"])
      for p, (kappa, zeta) in enumerate(pairs):
        row = (rate if f == 2 else 0) + p % rate
        kv[row] = kappa
        score[row] = zeta.astype(np.float32) + ape[p % rate]
        if (p + 1) % rate:
          continue
        if f == 1:
          entries.append(_entry(kv, score, dtype))
          continue
        a, b = slice(None, dim), slice(dim, None)
        entries.append(
            _entry(
                np.concatenate([kv[:rate, a], kv[rate:, b]]),
                np.concatenate([score[:rate, a], score[rate:, b]]),
                dtype,
            )
        )
        kv[:rate], score[:rate] = kv[rate:], score[rate:]
      at = f"layers.{layer}.{site}_state"
      out[f"{at}.kv"], out[f"{at}.score"] = kv, score
      name = f"layers.{layer}.compressed_kv"
      name = f"{at}.keys" if site == "indexer" else name
      out[name] = np.array(entries, np.float32).reshape(-1, dim)
  return out


def working(config, given, bias, capacity=16) -> contract.DeepseekV4State:
  """The decoder's state, batch of one; unwritten rows hold rubbish."""
  dtype = formats.of(config.dtype).numpy
  length = len(given[0]["window"])
  raw = stepwise(config, given, bias)
  layers = []
  for layer, one in enumerate(given):
    window = np.full((config.window, config.head_dim), 7, dtype)
    for p in range(length):
      window[p % config.window] = one["window"][p]
    compressors = [None, None]
    for i, (site, dim, f, rate) in enumerate(_sites(config, layer)):
      kv = np.full((rate, f * dim), 7, dtype)
      gate = np.full((rate, f * dim), 7, dtype)
      previous_kv = np.zeros((rate, f * dim), dtype)
      previous_score = np.full((rate, f * dim), -np.inf, np.float32)
      for p in range(length):
        kv[p % rate] = one[f"{site}.kv"][p]
        gate[p % rate] = one[f"{site}.gate"][p]
        if (p + 1) % rate == 0:
          previous_kv = kv.copy()
          previous_score = gate.astype(np.float32) + _bias(
              config, bias, layer, site
          )
      name = f"layers.{layer}.compressed_kv"
      if site == "indexer":
        name = f"layers.{layer}.indexer_state.keys"
      entries = np.full((capacity, dim), 7, dtype)
      entries[: len(raw[name])] = raw[name]
      compressors[i] = contract.CompressorState(
          kv[None],
          gate[None],
          previous_kv[None] if f == 2 else None,
          previous_score[None] if f == 2 else None,
          entries[None],
      )
    layers.append(contract.LayerState(window[None], *compressors))
  return contract.DeepseekV4State(tuple(layers), np.array([length], np.int32))


def state(config=CONFIGS[0], length=13, layout="raw", fork=None, **binding):
  """A persistent state, of a forked run if `fork` names a layer."""
  given = streams(config, length)
  if fork is not None:
    given = forked(given, fork)
  bias = biases(config)
  return working_state.capture(
      config, working(config, given, bias), bias, (1, 2, 3), layout, **binding
  )
