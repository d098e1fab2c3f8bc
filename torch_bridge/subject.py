"""Our side of a comparison: a Hugging Face folder as a Flax decoder.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from moejax.contracts import combine
from moejax.contracts import document
from moejax.contracts import ops
from moejax.contracts import refusal
from moejax.protocols import trajectory
from torch_bridge.architectures import ours
from torch_bridge.architectures import packed_qwen3_moe
from torch_bridge.hf.awq import config as awq_config
from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf import tokenizer as tokenizer_lib
from torch_bridge import request as request_lib


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

  @property
  def is_packed(self) -> bool:
    """Whether the experts lie packed in the checkpoint."""
    return bool(self.architecture.packed_layer)

  def reference_weights(
      self,
  ) -> contextlib.AbstractContextManager[tuple[pathlib.Path, dict]]:
    """Gives (the folder for a reference, what its weights are if others)."""
    return self.architecture.reference(self.folder)

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


def load(
    folder: str | pathlib.Path,
    packed: request_lib.PackedExperts | None = None,
    layer: ops.PackedLayer | None = None,
) -> Subject:
  """Loads a checkpoint.

  Args:
    folder: In Hugging Face form; its experts may be packed.
    packed: How packed experts run; None is dequantised.
    layer: Runs a packed layer; None is the oracle.

  Raises:
    HarnessError: the folder lacks something, holds something that this decoder
      does not compute, or is damaged; the message names file and values. Or it
      says how packed experts run, and there are none.
    UnsupportedError: it is packed in a way that is not known here.
  """
  folder = pathlib.Path(folder)
  checkpoint = checkpoint_lib.Checkpoint(folder)
  if awq_config.is_packed(folder):
    architecture = packed_qwen3_moe.architecture(
        folder, packed or request_lib.PackedExperts(), layer
    )
  elif packed is not None or layer is not None:
    raise refusal.HarnessError(
        f"{folder} has no packed experts, so nothing can be said of how they"
        " run."
    )
  else:
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
