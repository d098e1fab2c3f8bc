"""The combine contracts that have names.

P32, C, A and B are the four schemes of the study of expert-reduction order:
terms in float32 or rounded to bfloat16, partial sums in float32 or rounded to
bfloat16, in slot order. The others describe backends, each read from its
source and held by a test against the backend itself where it runs here.

Layer: contracts. Imports contracts.
"""

import dataclasses
import json
import pathlib

from moejax.contracts import combine
from moejax.contracts import document
from moejax.contracts import refusal

_B16 = "bfloat16"
_ALL = (
    combine.CombineContract("P32", rounding="paper"),
    combine.CombineContract("C", operand=_B16, rounding="paper"),
    combine.CombineContract("A", accumulator=_B16, rounding="paper"),
    combine.CombineContract(
        "B", operand=_B16, accumulator=_B16, rounding="paper"
    ),
    # One index_add_ into a bfloat16 buffer for each expert, ids ascending.
    combine.CombineContract(
        "transformers_eager",
        gate_dtype=_B16,
        operand=_B16,
        accumulator=_B16,
        order="expert",
        round_before_shared=True,
    ),
    # The slots side by side in route order, then one sum over them.
    combine.CombineContract(
        "transformers_grouped_mm",
        gate_dtype=_B16,
        operand=_B16,
        round_before_shared=True,
    ),
    combine.CombineContract(
        "transformers_batched_mm",
        gate_dtype=_B16,
        operand=_B16,
        round_before_shared=True,
    ),
    # The gate multiplies in float32 ahead of W2; experts add into a float32
    # buffer, ids ascending, and the shared expert joins before the rounding.
    combine.CombineContract(
        "deepseek_reference",
        gate_site="before_down",
        operand=_B16,
        order="expert",
    ),
    # W2 rounds y * R_FP16(weight) to float16; moe_sum adds the slots in
    # float32 from zero and rounds once.
    combine.CombineContract(
        "vllm_marlin",
        gate_dtype="float16",
        operand="float16",
        output="float16",
    ),
)
NAMES = tuple(contract.name for contract in _ALL)


def named(name: str) -> combine.CombineContract:
  """Returns a named contract.

  Raises:
    ValueError: the name is unknown; the message lists the known ones.
  """
  for contract in _ALL:
    if contract.name == name:
      return contract
  raise ValueError(f"combine {name!r} is not one of {', '.join(NAMES)}.")


def load(name_or_file: str) -> combine.CombineContract:
  """Returns the contract of that name, or the one in that JSON file.

  Raises:
    HarnessError: the text names neither, or the file does not hold a combine
      contract.
  """
  if name_or_file in NAMES:
    return named(name_or_file)
  path = pathlib.Path(name_or_file)
  try:
    exists = path.is_file()
  except OSError:  # For example a name that is too long for a file.
    exists = False
  if not exists:
    raise refusal.HarnessError(
        f"combine {name_or_file!r} is neither a file nor one of"
        f" {', '.join(NAMES)}."
    )
  try:
    return document.from_dict(
        combine.CombineContract, json.loads(path.read_text("utf-8"))
    )
  except ValueError as error:  # JSON errors are ValueErrors too.
    raise refusal.HarnessError(f"{path}: {error}") from error


def at_dtype(
    contract: combine.CombineContract, dtype: str
) -> combine.CombineContract:
  """Returns the contract with its 16-bit role played by another dtype.

  The named contracts are written for bfloat16 models. On a float16 or float32
  model the same code rounds to that model's dtype instead; every field that
  says bfloat16 then says `dtype`.
  """
  return dataclasses.replace(contract, **{
      field: dtype
      for field in ("gate_dtype", "operand", "accumulator", "output")
      if getattr(contract, field) == _B16
  })
