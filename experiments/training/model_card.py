"""The README.md of an exported model: what it is, from what, how good.

Layer: experiments.
"""

from typing import Any


def write(record: dict[str, Any]) -> str:
  """Returns the model card, Markdown, from a record of schema training/1."""
  parts = [
      f"# {record['name']}",
      f"A {record['model']} decoder of {record['parameters']:,} parameters,"
      " trained from nothing by `experiments/train.py` with this project's own"
      " routed expert MLP. It is made for comparing runtimes: small enough to"
      " ship, trained enough that routes, margins and text mean something. It"
      " knows nothing to rely on.",
      "## Validation",
      _table(
          ("text", "tokens", "nats per token", *_baseline_names(record)),
          _validation_rows(record),
      ),
      "Nats are natural-logarithm cross entropy of the exported weights on"
      " documents that no step has seen. The baselines are counted on the"
      " training text.",
      "## Training",
      _table(("what", "value"), _training_rows(record)),
      "![loss](loss.svg)",
      "## Experts on the validation text",
      _table(
          ("layer", "entropy", "least load", "greatest load", "dead"),
          _expert_rows(record),
      ),
      "Entropy is that of the load over its greatest value; a load is a share"
      " of the layer's routes.",
      "## Samples",
      *(
          f"> {' '.join(sample['text'].split())}"
          for sample in record["samples"]
      ),
      "## Text and licences",
      "The training text is documentation from free packages; `LICENSES.md`"
      " names each source and its licence.",
      "## Files",
      _table(("file", "SHA-256"), sorted(record["sha256"].items())),
  ]
  return "\n\n".join(parts) + "\n"


def _table(head, rows) -> str:
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _baseline_names(record) -> list[str]:
  return sorted({n for part in record["baselines"].values() for n in part})


def _validation_rows(record) -> list[tuple]:
  return [
      (
          name,
          part["tokens"],
          f"{part['nats']:.4f}",
          *(
              _number(record["baselines"].get(name, {}).get(baseline))
              for baseline in _baseline_names(record)
          ),
      )
      for name, part in record["validation"].items()
  ]


def _number(nats) -> str:
  return "" if nats is None else f"{nats:.4f}"


def _training_rows(record) -> list[tuple]:
  recipe, where = record["recipe"], record["environment"]
  return [
      ("steps", f"{record['steps']} of {recipe['steps']}"),
      ("tokens of a step", recipe["batch"] * recipe["length"]),
      ("training text, tokens", record["corpus"]["train_tokens"]),
      ("peak learning rate", recipe["peak"]),
      ("seed", recipe["seed"]),
      ("last training loss", _number(record["train_loss"]["last"])),
      ("seconds in steps", record["seconds"]),
      ("seconds in the compiler", record["compile_seconds"]),
      ("tokens per second", record["tokens_per_second"]),
      ("device", where["device"]),
      ("JAX", where["packages"]["jax"]),
      ("compiler flags", f"`{where['xla_flags']}`"),
      ("corpus digest", f"`{record['corpus']['digest']}`"),
  ]


def _expert_rows(record) -> list[tuple]:
  return [
      (
          layer,
          f"{row['entropy']:.4f}",
          f"{min(row['load']):.4f}",
          f"{max(row['load']):.4f}",
          ", ".join(map(str, row["dead"])) or "none",
      )
      for layer, row in record["experts"].items()
  ]
