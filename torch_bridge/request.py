"""What a conformance run is asked to compare; checked when it is made.

Layer: torch_bridge. Needs no torch.
"""

import dataclasses

ARITHMETICS = ("portable", "native")
TAPS = ("all", "boundaries")
_CAPSULE = "capsule:"


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
  """

  checkpoint: str
  prompts: str | None = None
  reference: str = "transformers"
  experts_implementation: str = "grouped_mm"
  combine: str = "transformers_grouped_mm"
  graph: str = "transformers"
  decode_steps: int = 16
  arithmetics: tuple[str, ...] = ARITHMETICS
  taps: str = "all"

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

  @property
  def capsule(self) -> str | None:
    """Folder of the capsule that is the reference, if one is."""
    if not self.reference.startswith(_CAPSULE):
      return None
    return self.reference.removeprefix(_CAPSULE)
