"""Is one training step of our decoder that of transformers, bit for bit?

  python -m experiments.gradients
  python -m experiments.gradients --dtype=float32 --optimizer=adamw
  python -m experiments.gradients --experts_implementation=grouped_mm

Both sides compute loss, gradients and one optimiser step on the same tokens in
portable arithmetic. Compared are the loss, the cotangents at the borders of
modules, the gradient of every parameter and every parameter after the step,
from the loss down; the first place that differs is named with the rules of the
backward graph before it. The last line is one JSON document, "gradients/1".
Exit codes: 0 same bits, 1 a difference, 2 usage or harness error, 4
unsupported. The library call behind it is `torch_bridge.gradients.comparison`.
"""

from absl import flags

from experiments.support import binary
from experiments.support import environment
from experiments.support import shipped
from moejax.contracts.gradients import optimizer
from moejax.contracts import refusal
from torch_bridge.gradients import comparison

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint",
    str(shipped.TINY),
    "Hugging Face folder of a Qwen3-MoE model.",
)
_PROMPTS = flags.DEFINE_string(
    "prompts", str(shipped.TINY_PROMPTS), "Prompt file, .json or .txt."
)
_EXPERTS = flags.DEFINE_enum(
    "experts_implementation",
    "eager",
    ["eager", "grouped_mm", "batched_mm"],
    "How transformers runs its experts; each has a backward graph of its own.",
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "auto", comparison.DTYPES, "Of weights and activations."
)
_SEQUENCES = flags.DEFINE_integer(
    "sequences", 2, "Prompts in the batch.", lower_bound=1
)
_LENGTH = flags.DEFINE_integer(
    "length", 12, "Tokens taken from the start of each.", lower_bound=2
)
_OPTIMIZER = flags.DEFINE_enum(
    "optimizer", "adamw", optimizer.KINDS, "Which step is taken."
)


def main() -> int:
  """Compares; returns the exit code."""
  try:
    request = comparison.Request(
        checkpoint=_CHECKPOINT.value,
        prompts=_PROMPTS.value,
        experts_implementation=_EXPERTS.value,
        dtype=_DTYPE.value,
        sequences=_SEQUENCES.value,
        length=_LENGTH.value,
        step=optimizer.FirstStep(_OPTIMIZER.value),
    )
  except ValueError as error:
    raise refusal.HarnessError(str(error)) from error
  result = comparison.run(request)
  result["environment"] = environment.describe()
  _show(result)
  binary.last_line(result)
  return result["exit_code"]


def _show(result) -> None:
  kinds = {}
  for row in result["places"]:
    same, count = kinds.get(row["kind"], (0, 0))
    kinds[row["kind"]] = (same + (not row["differing"]), count + 1)
  for kind, (same, count) in kinds.items():
    print(f"{kind}: {same} of {count} with the same bits")
  first = result["first_difference"]
  if first is not None:
    print(
        f"first difference: {first['kind']} of {first['name']},"
        f" {first['differing']} of {first['elements']} elements, at most"
        f" {first['max_ulp']} ulp; before it: {first['rules']}"
    )


if __name__ == "__main__":
  binary.run(main)
