"""Is a training step of our decoder that of transformers, bit for bit?

Both sides take one step on the same tokens in portable arithmetic; the result
is one JSON document. Where bits differ, the first place from the loss down is
named, with the rules of the backward contract that lie before it.

Layer: torch_bridge.
"""

from collections.abc import Callable
import dataclasses
import pathlib

import numpy as np

from moejax.contracts import document
from moejax.contracts.gradients import backward
from moejax.contracts.gradients import optimizer
from moejax.contracts import named_combines
from moejax.contracts import refusal
from moejax.modules import config as config_lib
from moejax.numerics.portable import certificate as certificate_lib
from moejax.numerics.portable import differentiable_ops
from moejax.protocols.gradients import compare
from moejax.protocols.gradients import our_step
from moejax.protocols.gradients import places as places_lib
from torch_bridge.gradients import backward_mode
from torch_bridge.gradients import reference_step
from torch_bridge.graphs import expert_events
from torch_bridge.hf import hf_config
from torch_bridge.hf import json_file
from torch_bridge.hf import tokenizer as tokenizer_lib
from torch_bridge import subject as subject_lib
from torch_bridge import torch_reference

SCHEMA = "gradients/1"
DTYPES = ("auto", "float32", "bfloat16")


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
  """What to compare.

  Attributes:
    checkpoint: A Hugging Face folder of a Qwen3-MoE model.
    prompts: A prompt file; its first prompts that are long enough are used.
    experts_implementation: Of transformers; each is a contract of its own.
    dtype: Of weights and activations; "auto" is the checkpoint's.
    sequences: Prompts in the batch.
    length: Tokens taken from the start of each.
    step: The optimiser.
    seed: Cotangent of the loss.
  """

  checkpoint: str
  prompts: str
  experts_implementation: str = "eager"
  dtype: str = "auto"
  sequences: int = 2
  length: int = 12
  step: optimizer.FirstStep = optimizer.FirstStep()
  seed: float = 1.0

  def __post_init__(self):
    for field, known in (
        ("experts_implementation", expert_events.IMPLEMENTATIONS),
        ("dtype", DTYPES),
    ):
      document.check_choice("Request", field, getattr(self, field), known)
    if self.sequences < 1 or self.length < 2:
      raise ValueError(
          f"Request: sequences={self.sequences}, length={self.length}; a loss"
          " needs one sequence of two tokens."
      )


def run(
    request: Request,
    operations: Callable = differentiable_ops.DifferentiableOperations,
) -> dict:
  """Takes both steps and compares them; returns the document.

  Args:
    request: What to compare.
    operations: Builds our arithmetic; tests plant faults here.

  Raises:
    HarnessError: the checkpoint or the prompts cannot be used.
    UnsupportedError: the model is no Qwen3-MoE, or runs an operation whose
      gradient is not declared.
  """
  subject = _subject(request)
  return run_tokens(request, subject, _tokens(request, subject), operations)


def run_tokens(
    request: Request,
    subject: subject_lib.Subject,
    tokens: np.ndarray,
    operations: Callable = differentiable_ops.DifferentiableOperations,
) -> dict:
  """`run`, on given [batch, token] ids and on weights of the wanted dtype."""
  reference = torch_reference.TransformersReference(
      request.checkpoint, request.experts_implementation
  )
  reference_step.cast_parameters(reference.model, subject.config.dtype)
  certificates = [certificate_lib.Certificate() for _ in range(2)]
  theirs = reference_step.run(
      reference,
      subject.config,
      tokens,
      request.step,
      backward_mode.BackwardMode(certificates[1]),
      request.seed,
  )
  name = f"transformers_{request.experts_implementation}"
  contract = backward.named(name)
  ours = _our_step(
      request, subject, tokens, operations(
          contract, certificates[0], _padding_token(request.checkpoint)
      ), name,
  )
  places = compare.with_updates(places_lib.of(subject.config))
  rows = compare.compare(ours, theirs, places)
  return _document(
      request, subject, reference, contract, certificates, rows, ours.loss,
      tokens,
  )


def _subject(request):
  subject = subject_lib.load(request.checkpoint)
  if not isinstance(subject.config, config_lib.DecoderConfig):
    raise refusal.UnsupportedError(
        f"{request.checkpoint}: gradients are compared for Qwen3-MoE only."
    )
  dtype = request.dtype if request.dtype != "auto" else subject.config.dtype
  subject.config = dataclasses.replace(subject.config, dtype=dtype)
  subject.params = {
      path: value.astype(dtype) for path, value in subject.params.items()
  }
  return subject


def _tokens(request, subject) -> np.ndarray:
  texts = tokenizer_lib.read_prompts(request.prompts)
  prompts = subject.prompts(texts, 0)
  sizes = {prompt.id: len(prompt.tokens) for prompt in prompts}
  fit = [p.tokens for p in prompts if len(p.tokens) >= request.length]
  if len(fit) < request.sequences:
    raise refusal.HarnessError(
        f"{request.prompts}: {request.sequences} prompts of at least"
        f" {request.length} tokens are wanted; its prompts have {sizes}."
    )
  fit = fit[: request.sequences]
  return np.array([tokens[: request.length] for tokens in fit], np.int64)


def _padding_token(folder) -> int | None:
  path = pathlib.Path(folder) / hf_config.FILE
  return json_file.read_object(path).get("pad_token_id")


def _our_step(request, subject, tokens, operations, name):
  combine = named_combines.at_dtype(
      named_combines.named(name), subject.config.dtype
  )
  contract = subject.contracts(combine)["portable"]
  return our_step.run(
      subject.config,
      subject.params,
      lambda params: subject.architecture.decoder(
          subject.config, params, contract, operations
      ),
      operations,
      tokens,
      request.step,
      request.seed,
  )


def _document(
    request, subject, reference, contract, certificates, rows, loss, tokens
):
  first = compare.first_difference(rows)
  complete = all(c.complete for c in certificates)
  same = first is None and complete
  return {
      "schema": SCHEMA,
      "same_bits": same,
      "exit_code": 0 if same else 1,
      "request": document.to_dict(request),
      "checkpoint": subject.checkpoint_digest,
      "dtype": subject.config.dtype,
      "tokens": tokens.tolist(),
      "backward": document.to_dict(contract),
      "reference": reference.describe(),
      "loss": {"nats": float(loss), **rows[0]},
      "first_difference": first,
      "places": rows,
      "certificates": {
          side: c.to_dict()
          for side, c in zip(("ours", "reference"), certificates, strict=True)
      },
  }
