"""Writes the golden fingerprints of the tiny Qwen3-MoE checkpoint.

  python -m experiments.write_golden

Run it only when bits were meant to change, and say so in the changelog under
"Bits changed". The tests compare every machine's run with this file.
"""

import json
import pathlib

from absl import flags

from experiments.support import binary
from experiments.support import shipped
from moejax.contracts import document
from moejax.contracts import named_combines
from moejax.numerics import reference_ops
from moejax.protocols import golden
from moejax.protocols import trajectory
from torch_bridge.hf import tokenizer
from torch_bridge import subject as subject_lib

_OUT = flags.DEFINE_string("out", str(shipped.GOLDEN), "File to write.")


def fingerprints() -> dict:
  """Runs the tiny checkpoint in portable arithmetic; its fingerprints."""
  subject = subject_lib.load(shipped.TINY)
  texts = tokenizer.read_prompts(shipped.TINY_PROMPTS)
  prompts = subject.prompts(texts, shipped.DECODE_STEPS)
  combine = named_combines.named("transformers_grouped_mm")
  contract = subject.contracts(combine)["portable"]
  decoder = subject.decoder(contract, reference_ops.operations(contract))
  captures = trajectory.run(decoder, prompts, shipped.DECODE_STEPS)
  return golden.document(
      captures, subject.checkpoint_digest, document.digest(contract)
  )


def main() -> int:
  """Writes the file."""
  found = fingerprints()
  text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
  pathlib.Path(_OUT.value).write_text(text, "utf-8")
  binary.last_line({
      "schema": "write_golden/1",
      "out": _OUT.value,
      "digest": document.sha256(document.canonical_json(found)),
  })
  return 0


if __name__ == "__main__":
  binary.run(main)
