"""Runs an unmodified transformers model and captures what it computes.

The model is loaded from the same folder as ours, with the attention and the
experts implementation stated: `eager`, `grouped_mm` and `batched_mm` are
different contracts. Nothing in it is replaced; dispatch modes watch it, carry
its operations out in another arithmetic, or reverse a legal order.

Layer: torch_bridge.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import inspect
import pathlib

import numpy as np
import torch
import transformers

from moejax.contracts import refusal
from moejax.numerics.portable import certificate as certificate_lib
from moejax.numerics.portable import portable_oracle
from moejax.protocols import capture as capture_lib
from moejax.protocols import trajectory
from torch_bridge.architectures import reference as reference_lib
from torch_bridge.graphs import expert_events
from torch_bridge import legal_orders
from torch_bridge import operation_trace
from torch_bridge import portable_mode
from torch_bridge import tensor_bits

ARITHMETICS = ("native", "portable", "reversed")
# Below this many parameters a second thread waits longer than it works.
_SMALL = 20_000_000


class TransformersReference:
  """A transformers model as the reference of a comparison."""

  name = "transformers"

  def __init__(self, folder: str | pathlib.Path, experts_implementation: str):
    """Loads the model.

    Args:
      folder: A Hugging Face folder with safetensors.
      experts_implementation: "eager", "grouped_mm" or "batched_mm".

    Raises:
      UnsupportedError: the implementation or the architecture is not known
        here, or this transformers computes the architecture wrongly.
      HarnessError: transformers cannot load the folder.
    """
    known = expert_events.IMPLEMENTATIONS
    if experts_implementation not in known:
      raise refusal.UnsupportedError(
          f"experts_implementation={experts_implementation!r} is not one of"
          f" {', '.join(known)}."
      )
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
      self.model = transformers.AutoModelForCausalLM.from_pretrained(
          str(folder),
          dtype="auto",
          attn_implementation="eager",
          experts_implementation=experts_implementation,
          local_files_only=True,
          use_safetensors=True,
      ).eval()
    except (OSError, ValueError, RuntimeError) as error:
      raise refusal.HarnessError(
          f"transformers {transformers.__version__} cannot load {folder}:"
          f" {error}"
      ) from error
    self.experts_implementation = experts_implementation
    self._architecture = reference_lib.of(
        self.model.config.model_type, transformers.__version__
    )
    self._state = self._architecture.state_reader(self.model, folder)
    if sum(p.numel() for p in self.model.parameters()) < _SMALL:
      torch.set_num_threads(1)

  def describe(self) -> dict:
    """Returns what decides this reference's bits, as JSON values."""
    return {
        "backend": "transformers",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "attn_implementation": "eager",
        "experts_implementation": self.experts_implementation,
        "threads": torch.get_num_threads(),
    }

  def contract(self, arithmetic: str) -> None:
    """It declares none; see `describe` for what is known of it."""
    del arithmetic

  def run(
      self,
      prompts: Sequence[trajectory.Prompt],
      num_steps: int,
      *,
      arithmetic: str = "native",
      wanted: Callable[[str], bool] = trajectory.keep_all,
      given: Sequence[capture_lib.Capture] | None = None,
      certificate: certificate_lib.Certificate | None = None,
      progress: Callable[[], None] = lambda: None,
  ) -> list[capture_lib.Capture]:
    """Prefills and decodes each prompt on its own.

    Args:
      prompts: Token ids.
      num_steps: Decode steps after prefill.
      arithmetic: "native"; "portable"; "reversed" (native, with every
        contracting axis reversed).
      wanted: Which taps to keep.
      given: Captures whose tokens and routes this run follows.
      certificate: Collects what portable operations did.
      progress: Called after every forward pass.

    Returns:
      One capture a prompt, in order.
    """
    if arithmetic not in ARITHMETICS:
      raise ValueError(
          f"arithmetic={arithmetic!r} is not one of {', '.join(ARITHMETICS)}."
      )
    oracle = portable_oracle.PortableOracle(certificate)
    out = []
    with torch.no_grad(), self.tables(arithmetic, oracle):
      for index, prompt in enumerate(prompts):
        follow = None if given is None else given[index]
        out.append(
            self._run_one(
                prompt, num_steps, arithmetic, oracle, wanted, follow, progress
            )
        )
    return out

  def _run_one(
      self, prompt, num_steps, arithmetic, oracle, wanted, follow, progress
  ):
    cache = transformers.DynamicCache(config=self.model.config)
    trace = operation_trace.OperationTrace()
    feed, position, steps = list(prompt.tokens), 0, []
    for index in range(num_steps + 1):
      with contextlib.ExitStack() as stack:
        if arithmetic == "portable":
          stack.enter_context(portable_mode.PortableMode(oracle))
        elif arithmetic == "reversed":
          stack.enter_context(legal_orders.ReversedContraction())
        if follow is not None:
          ids = self._architecture.selections(
              follow.steps[index].taps, self.model.config
          )
          stack.enter_context(legal_orders.ForcedRoutes(iter(ids)))
        if wanted is not trajectory.keep_none:
          stack.enter_context(trace.following(self.model))
        logits = self._forward(feed, cache)
      values = {"logits": tensor_bits.to_numpy(logits[0])}
      if wanted is not trajectory.keep_none:
        values = self._frequencies() | self._architecture.taps_of(
            trace.take(), self.experts_implementation, self.model.config
        )
      state = self._state(cache)
      steps.append(
          capture_lib.Step(
              start=position,
              tokens=tuple(feed),
              chosen=trajectory.first_largest(values["logits"][-1]),
              # Without those that hold nothing, as `capture.rows`.
              taps={
                  n: v
                  for n, v in values.items()
                  if v.size and (wanted(n) or n == "logits")
              },
              state=capture_lib.state_fingerprint(state),
          )
      )
      position += len(feed)
      chosen = steps[-1].chosen if follow is None else follow.generated[index]
      feed = [chosen]
      progress()
    return capture_lib.Capture(
        prompt.id, tuple(prompt.tokens), steps, state
    )

  def _forward(self, tokens: list[int], cache) -> torch.Tensor:
    # transformers 5.24 renames the argument.
    names = inspect.signature(self.model.forward).parameters
    keyword = "cache" if "cache" in names else "past_key_values"
    try:
      return self.model(
          torch.tensor([tokens]), use_cache=True, **{keyword: cache}
      ).logits
    except RuntimeError as error:  # For example a stride that a kernel needs.
      raise refusal.UnsupportedError(
          f"transformers {transformers.__version__} cannot run this"
          " checkpoint with"
          f" experts_implementation={self.experts_implementation!r}: {error}"
      ) from error

  def _frequencies(self) -> dict[str, np.ndarray]:
    rotary = self.model.model.rotary_emb
    return {
        tap: tensor_bits.to_numpy(getattr(rotary, name))
        for tap, name in self._architecture.frequencies.items()
    }

  @contextlib.contextmanager
  def tables(self, arithmetic: str, oracle) -> Iterator[None]:
    """Lends the rotary modules frequencies of the run's own arithmetic.

    They are computed when a model is built, natively; in portable arithmetic
    they are an operation like any other.
    """
    if arithmetic != "portable":
      yield
      return
    kind = type(self.model.model.rotary_emb)
    with portable_mode.PortableMode(oracle):
      portable = dict(kind(config=self.model.config).named_buffers())
    modules = [m for m in self.model.modules() if isinstance(m, kind)]
    kept = [dict(module.named_buffers()) for module in modules]
    try:
      for module in modules:
        for name, buffer in portable.items():
          setattr(module, name, buffer)
      yield
    finally:
      for module, buffers in zip(modules, kept, strict=True):
        for name, buffer in buffers.items():
          setattr(module, name, buffer)
