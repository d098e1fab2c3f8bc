"""Is our Flax decoder the same model as the reference? The main job.

  python -m experiments.conformance               a trained model that ships
  python -m experiments.conformance --checkpoint=DIR --out=DIR
  python -m experiments.conformance --reference=capsule:DIR

Writes report.html, report.md, report.json, junit.xml and a capsule of each
side, prints ten lines, and ends with one JSON document. Exit codes: 0
conformant, 1 beyond the rule, 2 usage or harness error, 3 incomplete, 4
unsupported. The library call behind it is `torch_bridge.conformance.run`.
"""

import pathlib

from absl import flags
import jax
import rich.console

from experiments.support import binary
from experiments.support import environment
from experiments.support import progress
from experiments.support import shipped
from moejax.contracts import deepseek_v4
from moejax.contracts import named_combines
from moejax.contracts import refusal
from moejax.protocols import outcome
from moejax.reports import summary
from moejax.reports import writer
from pallas_kernels import decoder_layer
from pallas_kernels import launch
from torch_bridge import conformance
from torch_bridge import evidence

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint",
    None,
    "Hugging Face folder (safetensors, config.json, tokenizer.json). Default:"
    " the trained Qwen3-MoE that ships with the project.",
)
_PROMPTS = flags.DEFINE_string(
    "prompts",
    None,
    "Prompt file, .json or .txt (one a line). Default: the checkpoint's"
    " prompts.json, else the shipped prompts.",
)
_REFERENCE = flags.DEFINE_string(
    "reference",
    "transformers",
    "'transformers', or 'capsule:FOLDER' for a capsule from another run.",
)
_EXPERTS = flags.DEFINE_enum(
    "experts_implementation",
    "grouped_mm",
    ["grouped_mm", "eager", "batched_mm"],
    "How transformers runs its experts; each is a contract of its own.",
)
_COMBINE = flags.DEFINE_string(
    "combine",
    "transformers_grouped_mm",
    "Combine contract of our decoder: a JSON file or one of"
    f" {', '.join(named_combines.NAMES)}.",
)
_GRAPH = flags.DEFINE_enum(
    "graph",
    "transformers",
    deepseek_v4.GRAPH_NAMES,
    "Where our decoder rounds apart from its combine. DeepSeek-V4 has the graph"
    " of the release's own code too.",
)
_STEPS = flags.DEFINE_integer(
    "decode_steps",
    shipped.DECODE_STEPS,
    "Tokens to decode after each prompt.",
    lower_bound=0,
)
_ARITHMETICS = flags.DEFINE_list(
    "arithmetics", ["portable", "native"], "Which arithmetics to compare in."
)
_TAPS = flags.DEFINE_enum(
    "taps",
    "all",
    ["all", "boundaries"],
    "What to capture; 'boundaries' needs less memory and leaves L4 incomplete.",
)
_PACKED_EXPERTS = flags.DEFINE_enum(
    "packed_experts",
    "dequantized",
    ["dequantized", "marlin"],
    "How the experts of a packed AWQ checkpoint run: made wide with one"
    " rounding, or as the expert layer of vLLM's Marlin.",
)
_THREAD_K = flags.DEFINE_integer(
    "thread_k", None, "K rows of a tile of Marlin; 128 if not given."
)
_THREAD_N = flags.DEFINE_integer(
    "thread_n", None, "Columns of a tile of Marlin; 64 if not given."
)
_GRID = flags.DEFINE_integer(
    "grid",
    None,
    "Thread blocks over which Marlin cuts K; 528 if not given. Like the tile a"
    " part of the contract: vLLM's own selection is not reproduced.",
    lower_bound=1,
)
_PACKED_LAYER = flags.DEFINE_enum(
    "packed_layer",
    "oracle",
    ["oracle", "pallas"],
    "Who runs Marlin's expert layer: the NumPy oracle, or the Pallas kernels"
    " (on a Hopper GPU; interpreted where JAX has a CPU alone).",
)
_OUT = flags.DEFINE_string(
    "out",
    "conformance_report",
    "Folder for the report; an earlier report in"
    " it is replaced, anything else is refused.",
)


def main() -> int:
  """Runs the comparison; returns the exit code."""
  checkpoint = _CHECKPOINT.value or str(shipped.CHECKPOINT)
  prompts = _PROMPTS.value
  own = pathlib.Path(checkpoint) / shipped.PROMPTS.name
  if prompts is None and _REFERENCE.value == "transformers":
    prompts = str(own if own.is_file() else shipped.PROMPTS)
  try:
    request = conformance.Request(
        checkpoint=checkpoint,
        prompts=prompts,
        reference=_REFERENCE.value,
        experts_implementation=_EXPERTS.value,
        combine=_COMBINE.value,
        graph=_GRAPH.value,
        decode_steps=_STEPS.value,
        arithmetics=tuple(_ARITHMETICS.value),
        taps=_TAPS.value,
        packed=_packed(),
    )
  except ValueError as error:
    raise refusal.HarnessError(str(error)) from error
  with writer.folder(_OUT.value) as folder:
    with progress.stages() as stage:
      result = conformance.run(request, stage, _packed_layer())
    result.report["environment"] = environment.describe()
    result.report["paths"]["out"] = str(_OUT.value)
    evidence.write_capsules(result, folder)
    writer.write(result.report, folder)
  summary.show(result.report, rich.console.Console(highlight=False))
  binary.last_line(outcome.last_line(result.report))
  return result.report["exit_code"]


def _packed() -> conformance.PackedExperts | None:
  """What the flags say of packed experts; None if they say nothing."""
  flags_ = (_PACKED_EXPERTS, _THREAD_K, _THREAD_N, _GRID)
  if not any(flag.present for flag in flags_):
    return None
  return conformance.PackedExperts(*(flag.value for flag in flags_))


def _packed_layer() -> decoder_layer.PallasLayer | None:
  """The kernels, if they are asked for; None is the oracle."""
  if _PACKED_LAYER.value == "oracle":
    return None
  interpret = jax.default_backend() == "cpu"
  return decoder_layer.PallasLayer(launch.LaunchConfig(interpret=interpret))


if __name__ == "__main__":
  binary.run(main)
