"""Are these the tensors of an AWQ linear layer, and if not, whose are they?

A layer of K inputs and N outputs in groups of S inputs has

  qweight  int32           [K, N / 8]
  qzeros   int32           [K / S, N / 8]
  scales   16-bit float    [K / S, N]

GPTQ has tensors of the same three names. It packs along the inputs, qweight
[K / 8, N], and often brings g_idx along. AWQ's "gemv" version is output-major,
qweight [N, K / 8]. All are int32, so only names and shapes tell.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Iterable
from collections.abc import Mapping

from moejax.numerics import formats

LEAVES = ("qweight", "qzeros", "scales")
HALVES = (formats.FLOAT16.name, formats.BFLOAT16.name)

_PER_WORD = 8


def foreign(names: Iterable[str]) -> list[str]:
  """Returns the names that AWQ has none like: GPTQ's order of inputs."""
  return sorted(n for n in names if n.endswith(".g_idx"))


def num_groups(k: int, group_size: int) -> int:
  """Returns the groups of K inputs.

  Raises:
    ValueError: the group size does not divide K.
  """
  rows = k if group_size == -1 else group_size
  if k % rows:
    raise ValueError(f"group_size={group_size} does not divide k={k}.")
  return k // rows


def faults(
    module: str,
    held: Mapping[str, tuple[tuple[int, ...], str]],
    k: int,
    n: int,
    group_size: int,
) -> list[str]:
  """Returns what is wrong with the tensors of a module; none is right.

  Args:
    module: Its dotted name.
    held: {leaf: (shape, dtype)} of `LEAVES`.
    k: Inputs of the layer.
    n: Its outputs.
    group_size: Of the config.

  Returns:
    One sentence a fault: the tensor, what it is, what is wanted.
  """
  if n % _PER_WORD:
    return [f"{module}: n={n} outputs do not fill words of {_PER_WORD} codes"]
  found = [
      f"{module}.{leaf} has dtype {held[leaf][1]}, want {' or '.join(want)}"
      for leaf, want in zip(
          LEAVES, (("int32",), ("int32",), HALVES), strict=True
      )
      if held[leaf][1] not in want
  ]
  words = n // _PER_WORD
  shape = held["qweight"][0]
  if shape != (k, words):
    found.append(
        f"{module}.qweight has shape {shape}, want {(k, words)}"
        f"{_whose(shape, k, n)}"
    )
    return found
  try:
    groups = num_groups(k, group_size)
  except ValueError:
    found.append(
        f"{module}.qweight has k={k} inputs, want a multiple of group_size="
        f"{group_size}"
    )
    return found
  for leaf, want in (("qzeros", (groups, words)), ("scales", (groups, n))):
    if held[leaf][0] != want:
      found.append(
          f"{module}.{leaf} has shape {held[leaf][0]}, want {want} of k={k},"
          f" n={n}, group_size={group_size}"
      )
  return found


def _whose(shape: tuple[int, ...], k: int, n: int) -> str:
  """Says whose layout an unexpected qweight has."""
  if shape == (k // _PER_WORD, n):
    return (
        ": it is packed along its inputs, as GPTQ packs, and not along its"
        " outputs"
    )
  if shape == (n, k // _PER_WORD):
    return ": it is output-major, as AWQ's version 'gemv' is"
  return ""
