"""Our side of a comparison: a Hugging Face folder as a Flax decoder.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Sequence
import dataclasses
import pathlib

import jax
import jax.numpy as jnp

from moejax.contracts import combine
from moejax.contracts import decoder as decoder_contract
from moejax.contracts import document
from moejax.contracts import ops
from moejax.modules import config as config_lib
from moejax.modules import decoder as decoder_lib
from moejax.protocols import trajectory
from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf import hf_config
from torch_bridge.hf import parameter_map
from torch_bridge.hf import tokenizer as tokenizer_lib


@dataclasses.dataclass(slots=True)
class Subject:
  """Weights, config and tokenizer of one checkpoint.

  Attributes:
    folder: Where they come from.
    config: The decoder's shape.
    params: {dotted path: array}.
    tokenizer: Its tokenizer.
    checkpoint_digest: Of the weights, see `fingerprint.checkpoint_digest`.
  """

  folder: pathlib.Path
  config: config_lib.DecoderConfig
  params: dict[str, jax.Array]
  tokenizer: tokenizer_lib.Tokenizer
  checkpoint_digest: str

  def decoder(
      self,
      contract: decoder_contract.DecoderContract,
      operations: ops.Operations,
  ) -> decoder_lib.Decoder:
    """Builds a decoder over these weights; nothing is copied."""
    nested = decoder_lib.nest(self.params)
    return decoder_lib.Decoder(self.config, nested, contract, operations)

  def contracts(
      self, combine_contract: combine.CombineContract
  ) -> dict[str, decoder_contract.DecoderContract]:
    """The decoder's contract in each arithmetic, under one combine."""
    router = config_lib.router_contract(self.config)
    return {
        "native": decoder_contract.native(router, combine_contract),
        "portable": decoder_contract.portable(router, combine_contract),
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

  def identity(
      self, contract: decoder_contract.DecoderContract, decode_steps: int
  ) -> dict:
    """What captured values belong to, without the prompt; JSON values."""
    return {
        "model": hf_config.MODEL_TYPE,
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
  config = hf_config.read(folder)
  tokenizer = tokenizer_lib.Tokenizer(folder)
  params = parameter_map.load_parameters(checkpoint, config)
  return Subject(
      folder,
      config,
      {path: jnp.asarray(array) for path, array in params.items()},
      tokenizer,
      checkpoint.digest(),
  )
