"""The state that several ways of feeding the same tokens lead to.

Layer: protocols.
"""

from collections.abc import Mapping
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from moejax.contracts import refusal
from moejax.modules.deepseek_v4 import decoder as decoder_lib
from moejax.modules.deepseek_v4 import state as rows_lib
from moejax.protocols.state import layout as layout_lib
from moejax.protocols.state import persistent_state
from moejax.protocols.state import working_state


def feed(
    decoder: decoder_lib.Decoder,
    tokens: Sequence[int],
    chunks: Sequence[int],
    parameters: Mapping[str, jax.Array],
    width: int | None = None,
) -> persistent_state.PersistentState:
  """Feeds tokens in chunks; returns the raw state after the last of them.

  Args:
    decoder: Under any contract. Bits are the same for all chunks in portable
      and in contract arithmetic; native arithmetic promises nothing.
    tokens: T token ids.
    chunks: Tokens fed in each forward pass; they add up to T.
    parameters: {parameter path: array} with every `position_bias`.
    width: Columns to which every chunk is padded on the left, so that all of
      them are compiled once; None pads nothing.

  Raises:
    HarnessError: the chunks do not add up, or one is empty or too wide.
  """
  if min(chunks, default=0) < 1 or sum(chunks) != len(tokens):
    raise refusal.HarnessError(
        f"chunks {list(chunks)} are no way to feed {len(tokens)} tokens."
    )
  if width is not None and max(chunks) > width:
    raise refusal.HarnessError(
        f"a chunk of {max(chunks)} tokens does not fit {width} columns."
    )
  state = rows_lib.empty(decoder.config, 1, len(tokens), decoder.graph)
  start = 0
  for size in chunks:
    padding = 0 if width is None else width - size
    row = [0] * padding + list(tokens[start : start + size])
    valid = jnp.arange(len(row)) >= padding
    _, state = decoder(jnp.int32([row]), state, valid[None])
    start += size
  return working_state.capture(
      decoder.config,
      jax.device_get(state),
      parameters,
      tokens,
      layout_lib.RAW,
  )
