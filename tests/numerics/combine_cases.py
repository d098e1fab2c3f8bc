"""Contracts and operands of the combine that hold every special value.

The twin of the numerics and the kernel on a GPU are held to the oracle by them.
"""

import dataclasses

import numpy as np

from moejax.contracts import named_combines
from moejax.numerics import formats

BOTH = ((3, 1, 0, 2), (1, 3, 2, 0))

# Scheme and other fields; together they hold every pair of choices that meets
# in one formula. "bfloat16" stands for the 16-bit dtype under test.
TWINS = {
    "P32": ("P32", {}),
    "P32_first_expert": (
        "P32", {"start": "first", "order": "expert", "nan": "0x7fffffff"}
    ),
    "P32_fma": ("P32", {"contraction": "fma", "output": "float32"}),
    "P32_fma_first_flush": (
        "P32",
        {
            "contraction": "fma",
            "start": "first",
            "order": "expert",
            "subnormals": "flush",
            "nan": "0x7fffffff",
        },
    ),
    "P32_flush_by_layer": (
        "P32",
        {
            "subnormals": "flush",
            "order": "explicit",
            "permutations": BOTH,
            "output": "float32",
            "round_before_shared": True,
        },
    ),
    "C_ieee": ("C", {"rounding": "ieee", "nan": "0x7fffffff"}),
    "C_first_flush_by_token": (
        "C",
        {
            "start": "first",
            "order": "explicit",
            "subnormals": "flush",
            "round_before_shared": True,
        },
    ),
    "C_before_down": (
        "C",
        {
            "gate_site": "before_down",
            "order": "expert",
            "rounding": "ieee",
            "output": "float32",
        },
    ),
    "A_rounded_gate": (
        "A", {"gate_dtype": "bfloat16", "round_before_shared": True}
    ),
    "A_fma_by_token": (
        "A", {"contraction": "fma", "order": "explicit", "output": "float32"}
    ),
    "A_first_flush_explicit": (
        "A",
        {
            "start": "first",
            "subnormals": "flush",
            "rounding": "ieee",
            "nan": "0x7fffffff",
            "order": "explicit",
            "permutations": BOTH[:1],
        },
    ),
    "A_fma_flush": (
        "A", {"contraction": "fma", "subnormals": "flush", "start": "first"}
    ),
    "B": ("B", {}),
    "B_first_expert": (
        "B",
        {
            "start": "first",
            "order": "expert",
            "rounding": "ieee",
            "gate_dtype": "bfloat16",
            "output": "float32",
        },
    ),
    "B_before_down_by_layer": (
        "B",
        {
            "gate_site": "before_down",
            "order": "explicit",
            "permutations": BOTH,
            "nan": "0x7fffffff",
            "round_before_shared": True,
        },
    ),
    "B_flush_by_token": (
        "B", {"subnormals": "flush", "order": "explicit", "output": "float32"}
    ),
}


def contract_of(scheme: str, dtype: str = "bfloat16", **fields):
  """A named scheme with other fields, for models of a dtype."""
  contract = dataclasses.replace(named_combines.named(scheme), **fields)
  return named_combines.at_dtype(contract, dtype)


def hard(dtype: str):
  """Returns (expert_out, gate, ids, order, shared) with every special value.

  Half of the columns are random, over many binades, so that a contracted
  product changes bits; the others hold zeros, infinities, NaN, subnormals and
  values that overflow or vanish when they are gated or added.
  """
  fmt = formats.of(dtype)
  rng = np.random.default_rng(0)
  tokens, top_k, embed = 6, 4, 48
  out = rng.standard_normal((tokens, top_k, embed))
  out *= np.exp2(rng.integers(-12, 12, out.shape))
  largest = np.ldexp(2.0 - 2.0 ** (1 - fmt.precision), fmt.max_exponent)
  smallest = np.ldexp(1.0, fmt.min_exponent)
  special = np.array([
      0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.0, -1.0,
      largest, -largest, largest / 2, smallest, -smallest, smallest / 2,
      -smallest / 4, smallest * 1.5, 1e-40, -1e-40, 2.0**-149, 257.0,
  ])
  out[..., 24:] = rng.choice(special, (tokens, top_k, embed - 24))
  out[0, :, 24] = -0.0
  out[1, :, 24] = smallest / 2
  gate = rng.random((tokens, top_k)) + 2.0**-24
  gate[2] = [1.0, 0.5, 2.0**-20, 1e-30]
  gate[3] = [-1.0, 0.0, -0.0, 1e-40]
  shared = rng.standard_normal((tokens, embed))
  shared[:, 40:] = rng.choice(special, (tokens, 8))
  ids = rng.random((tokens, 8)).argsort(-1)[:, :top_k]
  ids[5] = 8  # A padded row: equal ids keep the order of the slots.
  order = rng.random((tokens, top_k)).argsort(-1)
  with np.errstate(over="ignore", under="ignore", invalid="ignore"):
    return (
        out.astype(np.float32).astype(fmt.numpy),
        gate.astype(np.float32),
        ids.astype(np.int32),
        order.astype(np.int32),
        shared.astype(np.float32).astype(fmt.numpy),
    )
