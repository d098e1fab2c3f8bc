"""Golden fingerprints: the bits of a portable run, in a few kilobytes.

Portable arithmetic gives the same bits on every machine, so a run is pinned by
its fingerprints: for each step the chosen token, the state, the logits, and one
composite over all taps in order of execution. A machine that computes other
bits fails, and says in which step.

Layer: protocols.
"""

from collections.abc import Sequence

from moejax.numerics import fingerprint
from moejax.protocols import capture as capture_lib

SCHEMA = "golden/1"


def document(
    captures: Sequence[capture_lib.Capture], checkpoint: str, contract: str
) -> dict:
  """Returns the golden document of a run.

  Args:
    captures: Of all taps.
    checkpoint: Digest of the weights.
    contract: Digest of the decoder contract.
  """
  return {
      "schema": SCHEMA,
      "checkpoint": checkpoint,
      "contract": contract,
      "prompts": {
          one.prompt_id: {
              "prompt": list(one.prompt),
              "steps": [_step(step) for step in one.steps],
          }
          for one in captures
      },
  }


def _step(step: capture_lib.Step) -> dict:
  prints = {
      name: fingerprint.fingerprint(value, name)
      for name, value in step.taps.items()
  }
  return {
      "chosen": step.chosen,
      "state": step.state,
      "logits": prints["logits"],
      "taps": fingerprint.composite("taps", list(prints.items())),
  }


def differences(golden: dict, found: dict) -> list[str]:
  """Returns where two golden documents part, one line each; empty if equal."""
  out = [
      f"{key}: {found[key]} is not {golden[key]}"
      for key in ("schema", "checkpoint", "contract")
      if golden[key] != found[key]
  ]
  if sorted(golden["prompts"]) != sorted(found["prompts"]):
    out.append(
        f"prompts: {sorted(found['prompts'])} are not"
        f" {sorted(golden['prompts'])}"
    )
    return out
  for name, entry in golden["prompts"].items():
    mine = found["prompts"][name]
    if entry["prompt"] != mine["prompt"]:
      out.append(f"{name}: other tokens in the prompt")
    if len(entry["steps"]) != len(mine["steps"]):
      out.append(f"{name}: {len(mine['steps'])} steps")
    for index, (a, b) in enumerate(zip(entry["steps"], mine["steps"])):
      out += [f"{name}, step {index}: {key}" for key in a if a[key] != b[key]]
  return out
