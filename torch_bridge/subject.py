"""Our side of a comparison: a Hugging Face folder as a Flax decoder.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from moejax.contracts import combine
from moejax.contracts import document
from moejax.contracts import ops
from moejax.protocols import trajectory
from torch_bridge.architectures import ours
from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf import tokenizer as tokenizer_lib


@dataclasses.dataclass(slots=True)
class Subject:
  """Weights, config and tokenizer of one checkpoint.

  Attributes:
    folder: Where they come from.
    architecture: Builds its decoder.
    config: The decoder's shape.
    params: {dotted path: array}.
    tokenizer: Its tokenizer.
    checkpoint_digest: Of the weights, see `fingerprint.checkpoint_digest`.
  """

  folder: pathlib.Path
  architecture: ours.Architecture
  config: Any
  params: dict[str, jax.Array]
  tokenizer: tokenizer_lib.Tokenizer
  checkpoint_digest: str

  def decoder(self, contract: Any, operations: ops.Operations) -> Any:
    """Builds a decoder over these weights; nothing is copied."""
    return self.architecture.decoder(
        self.config, self.params, contract, operations
    )

  def contracts(
      self,
      combine_contract: combine.CombineContract,
      graph: str = "transformers",
  ) -> dict[str, Any]:
    """{arithmetic: the decoder's contract in it}, under one combine.

    Raises:
      HarnessError: the architecture has no graph of that name.
    """
    return {
        arithmetic: self.architecture.contract(
            arithmetic, self.config, combine_contract, graph
        )
        for arithmetic in ("native", "portable")
    }

  def prompts(
      self, texts: Sequence[tokenizer_lib.Prompt], decode_steps: int
  ) -> list[trajectory.Prompt]:
    """Encodes prompts; see `tokenizer.encode_prompts` for what is refused."""
    encoded = tokenizer_lib.encode_prompts(
        texts,
        self.tokenizer,
        self.config.max_positions,
        decode_steps,
        self.config.vocab_size,
    )
    return [
        trajectory.Prompt(text.id, ids, text.text)
        for text, ids in zip(texts, encoded, strict=True)
    ]

  def identity(self, contract: Any, decode_steps: int) -> dict:
    """What captured values belong to, without the prompt; JSON values."""
    return {
        "model": self.architecture.model_type,
        "checkpoint": self.checkpoint_digest,
        "tokenizer": self.tokenizer.digest,
        "decoding": {"strategy": "greedy", "steps": decode_steps},
        "contract": document.digest(contract),
    }


def load(folder: str | pathlib.Path) -> Subject:
  """Loads a checkpoint.

  Raises:
    HarnessError: the folder lacks something, holds something that this decoder
      does not compute, or is damaged; the message names file and values.
  """
  folder = pathlib.Path(folder)
  checkpoint = checkpoint_lib.Checkpoint(folder)
  architecture = ours.of(folder)
  config, params = architecture.load(checkpoint)
  return Subject(
      folder,
      architecture,
      config,
      {path: jnp.asarray(array) for path, array in params.items()},
      tokenizer_lib.Tokenizer(folder),
      checkpoint.digest(),
  )
