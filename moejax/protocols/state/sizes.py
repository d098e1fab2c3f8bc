"""How many values a state has and how many of them a fork can reach.

Nothing is allocated: everything follows from the configuration and T.

Layer: protocols.
"""

import numpy as np

from moejax.contracts import refusal
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.protocols.state import layout as layout_lib


def num_values(
    config: config_lib.DeepseekV4Config, length: int, layout: str
) -> int:
  """Values of a state, by summing the shapes of its layout."""
  return sum(
      rows * width
      for rows, width in (
          part.shape for part in layout_lib.parts(config, length, layout)
      )
  )


def raw_formula(config: config_lib.DeepseekV4Config, length: int) -> int:
  """N(T), in closed form.

  A layer has W * D values; a CSA layer also 2 * (2r * 2(D + D_I)) and
  (D + D_I) * floor(T / r); an HCA layer 2 * r * D and D * floor(T / r).

  Source: specification of DeepSeek-V4, section 11.
  """
  c = config
  wide = c.head_dim + c.index_dim
  of_kind = {
      config_lib.SWA: 0,
      config_lib.CSA: 8 * c.csa_rate * wide + wide * (length // c.csa_rate),
      config_lib.HCA: (
          2 * c.hca_rate * c.head_dim + c.head_dim * (length // c.hca_rate)
      ),
  }
  return sum(c.window * c.head_dim + of_kind[kind] for kind in c.attentions)


def live_formula(config: config_lib.DeepseekV4Config, length: int) -> int:
  """live(T), in closed form.

  A layer has min(T, W) * D values; a CSA layer also, with w = D + D_I,
  floor(T / r) * w, 2 * r * w once T >= r, and 2 * (T mod r) * 2w; an HCA layer
  floor(T / r) * D and 2 * (T mod r) * D.

  Source: specification of DeepSeek-V4, section 11.
  """
  c = config
  wide = c.head_dim + c.index_dim
  csa_full, csa_open = divmod(length, c.csa_rate)
  hca_full, hca_open = divmod(length, c.hca_rate)
  of_kind = {
      config_lib.SWA: 0,
      config_lib.CSA: (
          csa_full * wide
          + 2 * c.csa_rate * wide * (csa_full > 0)
          + 4 * csa_open * wide
      ),
      config_lib.HCA: (hca_full + 2 * hca_open) * c.head_dim,
  }
  return sum(
      min(length, c.window) * c.head_dim + of_kind[kind]
      for kind in c.attentions
  )


def reach(
    config: config_lib.DeepseekV4Config,
    length: int,
    fork_layer: int,
    *,
    with_stale: bool = True,
) -> int:
  """Values of the raw state that a fork at the last position can change.

  A layer commits its attention state before its experts run, so a fork in the
  experts of `fork_layer` reaches the layers after it; in them, the rows that
  belong to position T - 1: its window row, its compressor rows and their copy
  if it completed a window, and the entry that it completed.

  Args:
    config: The decoder's.
    length: Tokens seen, T, the forked one included.
    fork_layer: Layer whose experts differ.
    with_stale: Whether rows count of which nothing is read again.

  Raises:
    HarnessError: no token was seen, or there is no such layer.
  """
  if length < 1 or not 0 <= fork_layer < config.num_layers:
    raise refusal.HarnessError(
        f"{length=}, {fork_layer=}: a fork needs a token and one of"
        f" {config.num_layers} layers."
    )
  marks = layout_lib.status(config, length)
  total = 0
  for part in layout_lib.parts(config, length, layout_lib.RAW):
    if part.layer > fork_layer:
      touched = np.array(part.positions, int) == length - 1
      if not with_stale:
        touched &= marks[part.name][:, 0] != layout_lib.STALE
      total += int(touched.sum()) * part.width
  return total
