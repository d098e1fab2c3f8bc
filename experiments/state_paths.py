"""Does the state depend on how a text was cut into forward passes?

  python -m experiments.state_paths
  python -m experiments.state_paths --chunks=3,5,1,7,2,16,11

Feeds the same tokens to our DeepSeek-V4 decoder at once, in chunks and one by
one, and compares the three states bit by bit: what is alive must be the same,
what is dead may differ and is listed by row with the reason. The last line is
one JSON document. Exit codes: 0 the live states are the same, 1 they are not, 2
usage or harness error.
"""

import collections
import pathlib

from absl import flags
import numpy as np

from experiments.support import binary
from experiments.support import environment
from experiments.support import progress
from experiments.support import shipped
from moejax.contracts import deepseek_v4 as contract_lib
from moejax.contracts import document
from moejax.contracts import named_combines
from moejax.contracts import reduction
from moejax.contracts import refusal
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.numerics import reference_ops
from moejax.protocols.state import difference
from moejax.protocols.state import layout
from moejax.protocols.state import paths
from moejax.protocols.state import persistent_state
from torch_bridge import subject as subject_lib

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint",
    None,
    "Hugging Face folder of a DeepSeek-V4 model. Default: the small one that"
    " ships with the project.",
)
_ARITHMETIC = flags.DEFINE_enum(
    "arithmetic",
    "portable",
    reduction.CHAINS,
    "Native arithmetic promises no equality; the others do.",
)
_CHUNKS = flags.DEFINE_list(
    "chunks", ["3", "5", "1", "7", "2", "16", "11"], "Tokens of each chunk."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the token ids.")
_COMBINE = flags.DEFINE_enum(
    "combine",
    "transformers_grouped_mm",
    named_combines.NAMES,
    "Combine contract.",
)
_SHOWN = 20


def main() -> int:
  """Feeds, compares, prints."""
  chunks = _chunks()
  folder = _CHECKPOINT.value or shipped.TINY_DEEPSEEK_V4
  subject = subject_lib.load(pathlib.Path(folder))
  config = subject.config
  if not isinstance(config, config_lib.DeepseekV4Config):
    raise refusal.HarnessError(f"{folder} is no DeepSeek-V4 model.")
  combine = named_combines.at_dtype(
      named_combines.named(_COMBINE.value), config.dtype
  )
  contract = contract_lib.of(
      _ARITHMETIC.value, config_lib.router_contract(config), combine
  )
  decoder = subject.decoder(contract, reference_ops.operations(contract))
  rng = np.random.default_rng(_SEED.value)
  tokens = rng.integers(0, config.vocab_size, sum(chunks)).tolist()
  ways = {
      "at_once": [len(tokens)],
      "in_chunks": chunks,
      "one_by_one": [1] * len(tokens),
  }
  states = {}
  with progress.stages() as report:
    for index, (name, sizes) in enumerate(ways.items()):
      report("ways of feeding", index, len(ways))
      states[name] = paths.feed(decoder, tokens, sizes, subject.params)
    report("ways of feeding", len(ways), len(ways))
  whole = states.pop("at_once")
  found = {name: _compare(name, whole, state) for name, state in states.items()}
  equal = all(part["live_differing_rows"] == 0 for part in found.values())
  binary.last_line({
      "schema": "state_paths/1",
      "same_live_bits": equal,
      "tokens": len(tokens),
      "chunks": chunks,
      "arithmetic": _ARITHMETIC.value,
      "contract": document.digest(contract),
      "live_digest": persistent_state.payload_digest(
          persistent_state.narrow(whole, layout.LIVE)
      ),
      "against_at_once": found,
      "environment": environment.describe(),
  })
  return int(not equal)


def _chunks() -> list[int]:
  try:
    return [int(text) for text in _CHUNKS.value]
  except ValueError as error:
    raise refusal.HarnessError(f"--chunks: {error}") from error


def _compare(name, whole, state) -> dict:
  """Prints and counts the rows in which a state differs from the whole."""
  raw = list(difference.rows(state, whole))
  live = [
      persistent_state.narrow(one, layout.LIVE) for one in (state, whole)
  ]
  alive = list(difference.rows(*live))
  values = sum(array.size for array in live[0].arrays.values())
  print(
      f"{name}: {len(alive)} live rows differ among {values:,} live values,"
      f" {len(raw)} raw rows differ"
  )
  for row in (alive or raw)[:_SHOWN]:
    print(
        f"  layer {row.layer} {row.component} {row.array} row {row.row},"
        f" position {row.position}: {row.why}"
    )
  return {
      "live_values": values,
      "live_differing_rows": len(alive),
      "raw_differing_rows": len(raw),
      "raw_reasons": dict(
          sorted(collections.Counter(row.status for row in raw).items())
      ),
  }


if __name__ == "__main__":
  binary.run(main)
