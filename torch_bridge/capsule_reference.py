"""A capsule in the place of a reference that runs.

Layer: torch_bridge. Needs no torch.
"""

from moejax.contracts import refusal
from moejax.protocols import capsule
from moejax.protocols import taps as taps_lib
from moejax.protocols import trajectory
from torch_bridge import subject as subject_lib


class CapsuleReference:
  """Answers for the machine that made the capsule.

  The capsule must be of the same weights and the same tokenizer.
  """

  def __init__(self, folder: str, subject: subject_lib.Subject):
    self._folder = folder
    self._manifest = capsule.read_manifest(folder)
    for identity in self._manifest["identities"].values():
      for field, mine in (
          ("checkpoint", subject.checkpoint_digest),
          ("tokenizer", subject.tokenizer.digest),
      ):
        if identity[field] != mine:
          raise refusal.HarnessError(
              f"{folder} was captured from another {field}:"
              f" {identity[field][:12]}, not {mine[:12]}."
          )

  def describe(self) -> dict:
    """What decided the captured bits, as JSON values."""
    about = self._manifest["about"]
    return {**about["backend"], "capsule": True}

  def contract(self, arithmetic: str) -> dict | None:
    """The contract of a captured run of ours; None if it was another's.

    Where our run was itself a reference from a capsule, the manifest holds the
    contracts of the other side.
    """
    about = self._manifest["about"]
    backend = about["backend"]
    if backend.get("backend") != "moejax" or backend.get("capsule"):
      return None
    return about["contracts"].get(arithmetic)

  def prompts(
      self, arithmetic: str, decode_steps: int
  ) -> list[trajectory.Prompt]:
    """The captured prompts.

    Raises:
      HarnessError: that arithmetic or number of steps was not captured.
    """
    runs = self._manifest["runs"]
    if arithmetic not in runs:
      raise refusal.HarnessError(
          f"{self._folder} holds {sorted(runs)}, not {arithmetic!r}."
      )
    steps = {len(entry["steps"]) - 1 for entry in runs[arithmetic]}
    self._check_steps(steps, decode_steps)
    return [
        trajectory.Prompt(entry["id"], tuple(entry["prompt"]))
        for entry in runs[arithmetic]
    ]

  def run(self, prompts, num_steps, *, arithmetic, wanted, progress, **_):
    """Returns the captures, each value verified, as a reference would.

    Raises:
      HarnessError: the capsule is damaged or holds other prompts.
    """
    captures = capsule.read(self._folder, arithmetic)
    asked = [(p.id, tuple(p.tokens)) for p in prompts]
    held = [(c.prompt_id, c.prompt) for c in captures]
    if asked != held:
      raise refusal.HarnessError(
          f"{self._folder} holds the prompts {[h[0] for h in held]} with other"
          f" tokens or ids than {[a[0] for a in asked]}."
      )
    for one in captures:
      self._check_steps({len(one.steps) - 1}, num_steps)
      for step in one.steps:
        step.taps = {
            n: v for n, v in step.taps.items() if wanted(n) or n == "logits"
        }
        progress()
    return captures

  def _check_steps(self, held: set[int], asked: int) -> None:
    if held != {asked}:
      raise refusal.HarnessError(
          f"{self._folder} holds {sorted(held)} decode steps, not {asked}."
      )

  def certificate(self) -> dict:
    """The certificate of the captured portable run.

    Raises:
      HarnessError: it has none.
    """
    certificate = self._manifest["about"].get("certificate")
    if not certificate:
      raise refusal.HarnessError(
          f"{self._folder} holds no certificate of its portable run."
      )
    return certificate

  def limits(self) -> dict[tuple[int | None, str], float]:
    """The envelope that was measured where the capsule was made.

    Raises:
      HarnessError: none was measured.
    """
    about = self._manifest["about"]
    if not about.get("envelope"):
      raise refusal.HarnessError(
          f"{self._folder} holds no envelope, so native runs cannot be judged"
          " against it; ask for portable arithmetic alone."
      )
    return {
        taps_lib.split(name): limit
        for name, limit in about["envelope"].items()
    }
