"""What a conformance run is asked to compare; checked when it is made.

Layer: torch_bridge. Needs no torch.
"""

import dataclasses

from moejax.contracts import document

ARITHMETICS = ("portable", "native")
TAPS = ("all", "boundaries")
_CAPSULE = "capsule:"
_GROUPED = "transformers_grouped_mm"
_MARLIN_COMBINE = "vllm_marlin"


@dataclasses.dataclass(frozen=True, slots=True)
class PackedExperts:
  """How the experts of a packed checkpoint run.

  Attributes:
    experts: "dequantized": made wide with one rounding, then as the decoder's
      contract says. "marlin": the expert layer of vLLM's Marlin.
    thread_k: K rows of a tile, for "marlin" alone; None is 128.
    thread_n: Columns of a tile; None is 64.
    grid: Thread blocks; None is 528. These three are part of a contract and
      never derived from a device: the defaults are what vLLM 0.25.1 is expected
      to select on an H200 for few tokens. Its selector is not reproduced.
  """

  experts: str = "dequantized"
  thread_k: int | None = None
  thread_n: int | None = None
  grid: int | None = None

  def __post_init__(self):
    document.check_choice(
        "PackedExperts", "experts", self.experts, ("dequantized", "marlin")
    )
    defaults = {"thread_k": 128, "thread_n": 64, "grid": 528}
    given = {n: getattr(self, n) for n in defaults}
    if self.experts == "dequantized":
      said = {n: v for n, v in given.items() if v is not None}
      if said:
        raise ValueError(
            f"PackedExperts: {said} are choices of experts='marlin', and"
            " experts is 'dequantized'."
        )
      return
    for name, value in given.items():
      if value is None:
        object.__setattr__(self, name, defaults[name])


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
  """What to compare.

  Attributes:
    checkpoint: A Hugging Face folder.
    prompts: A prompt file (.json or .txt); None takes the checkpoint's own
      prompts.json, or the capsule's prompts.
    reference: "transformers", or "capsule:FOLDER".
    experts_implementation: Of transformers: "grouped_mm", "eager" or
      "batched_mm".
    combine: Name of a combine contract, or a JSON file with one.
    graph: Where our decoder rounds apart from its combine: "transformers", or
      another graph that the architecture has a name for.
    decode_steps: Tokens decoded after each prompt.
    arithmetics: Which of "portable" and "native" to run.
    taps: "all", or "boundaries" (logits, state, residual stream, routers),
      which needs less memory and leaves L4 incomplete.
    packed: How packed experts run; None is dequantised, and right for a
      checkpoint without any.
  """

  checkpoint: str
  prompts: str | None = None
  reference: str = "transformers"
  experts_implementation: str = "grouped_mm"
  combine: str = _GROUPED
  graph: str = "transformers"
  decode_steps: int = 16
  arithmetics: tuple[str, ...] = ARITHMETICS
  taps: str = "all"
  packed: PackedExperts | None = None

  def __post_init__(self):
    if self.reference != "transformers" and not self.reference.startswith(
        _CAPSULE
    ):
      raise ValueError(
          f"reference={self.reference!r} is neither 'transformers' nor"
          " 'capsule:FOLDER'."
      )
    if not self.arithmetics or not set(self.arithmetics) <= set(ARITHMETICS):
      raise ValueError(
          f"arithmetics={self.arithmetics} is not a choice of {ARITHMETICS}."
      )
    if self.taps not in TAPS:
      raise ValueError(f"taps={self.taps!r} is not one of {TAPS}.")
    if self.decode_steps < 0:
      raise ValueError(f"decode_steps={self.decode_steps} is negative.")
    marlin = self.packed is not None and self.packed.experts == "marlin"
    if marlin and self.combine not in (_GROUPED, _MARLIN_COMBINE):
      raise ValueError(
          f"combine={self.combine!r}; Marlin's experts bring their own combine,"
          f" {_MARLIN_COMBINE!r}."
      )

  @property
  def capsule(self) -> str | None:
    """Folder of the capsule that is the reference, if one is."""
    if not self.reference.startswith(_CAPSULE):
      return None
    return self.reference.removeprefix(_CAPSULE)
