"""The tensor-core step against exact rationals, and its edges.

That the constants are a chip's is measured on the chip (experiments/awq_bits);
here the vectorized form is held to the definition. Needs no accelerator.
"""

import dataclasses
import fractions
import math

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import numpy as np

from moejax.contracts import packed_gemm
from moejax.numerics.packed import mma16 as lib
from tests import bits

_HOPPER = packed_gemm.HOPPER
_CONTRACTS = {
    "hopper": _HOPPER,
    "group_8": dataclasses.replace(_HOPPER, group=8, fraction_bits=24),
    "renormalized": dataclasses.replace(_HOPPER, exponents="renormalized"),
    "unclamped": dataclasses.replace(_HOPPER, operand_exponents="unclamped"),
    "nearest": dataclasses.replace(_HOPPER, final="nearest_even"),
}
_LEAST = {"float16": -14, "bfloat16": -126}


def _log2(x: fractions.Fraction) -> int:
  """floor(log2 |x|) of a nonzero rational."""
  x, e = abs(x), 0
  while x >= 2:
    x, e = x / 2, e + 1
  while x < 1:
    x, e = x * 2, e - 1
  return e


def _cut(x: fractions.Fraction, unit: fractions.Fraction):
  return int(x / unit) * unit  # int() cuts toward zero.


def _add(c, pairs, contract, least):
  """One addition by the definition: float c, pairs of rationals."""

  def exponent(x, smallest):
    if x == 0:
      return None
    clamped = contract.operand_exponents == "clamped"
    return max(_log2(x), smallest) if clamped else _log2(x)

  c = fractions.Fraction(float(c))
  found = [exponent(c, -126)]
  for a, b in pairs:
    if contract.exponents == "renormalized":
      found.append(exponent(a * b, -400))
    elif a * b != 0:
      found.append(exponent(a, least) + exponent(b, least))
  found = [e for e in found if e is not None]
  if not found:
    return np.float32(0)
  unit = fractions.Fraction(2) ** (max(found) - contract.fraction_bits)
  total = _cut(c, unit) + sum(_cut(a * b, unit) for a, b in pairs)
  if total == 0:
    return np.float32(0)
  quantum = fractions.Fraction(2) ** (max(_log2(total), -126) - 23)
  if contract.final == "nearest_even":
    return np.float32(float(round(total / quantum) * quantum))
  return np.float32(float(_cut(total, quantum)))


def _chain(a, b, contract):
  """[m, k] @ [k, n] one element at a time."""
  least = _LEAST[a.dtype.name]
  out = np.zeros((len(a), b.shape[1]), np.float32)
  for i, j in np.ndindex(out.shape):
    c = np.float32(0)
    pairs = [
        (fractions.Fraction(float(x)), fractions.Fraction(float(y)))
        for x, y in zip(a[i], b[:, j], strict=True)
    ]
    for k in range(0, len(pairs), contract.group):
      c = _add(c, pairs[k : k + contract.group], contract, least)
    out[i, j] = c
  return out


def _operands(seed, dtype, spread, k=64, n=8):
  rng = np.random.default_rng(seed)
  half = np.dtype(getattr(ml_dtypes, dtype, dtype))

  def draw(*shape):
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(*spread, shape)
    return np.where(rng.random(shape) < 0.2, 0, x).astype(half)

  return draw(6, k), draw(k, n)


def _run(a, b, contract=_HOPPER):
  c = np.zeros((len(a), b.shape[1]), np.float32)
  return lib.mma16(c, a, b, contract)


class DefinitionTest(parameterized.TestCase):

  @parameterized.product(
      contract=tuple(_CONTRACTS),
      case=(
          ("float16", (-1, 1)), ("float16", (-12, 4)), ("float16", (-24, -12)),
          ("bfloat16", (-1, 1)), ("bfloat16", (-20, 20)),
          ("bfloat16", (-72, -60)), ("bfloat16", (-134, -120)),
      ),
  )
  def test_equals_exact_rationals(self, contract, case):
    dtype, spread = case
    a, b = _operands(3, dtype, spread)
    bits.assert_same_bits(
        _run(a, b, _CONTRACTS[contract]), _chain(a, b, _CONTRACTS[contract])
    )

  @parameterized.parameters(*(name for name in _CONTRACTS if name != "hopper"))
  def test_every_constant_is_observable(self, name):
    a, b = _operands(4, "float16", (-4, 4), k=512, n=256)
    if name == "unclamped":  # Normal numbers times subnormals.
      a, _ = _operands(4, "float16", (-14, -2), k=512)
      _, b = _operands(5, "float16", (-24, -16), k=512, n=256)
    self.assertTrue((_run(a, b) != _run(a, b, _CONTRACTS[name])).any())


class EdgeTest(absltest.TestCase):

  def _one(self, *pairs, dtype=np.float16):
    a, b = np.zeros((1, 16), dtype), np.zeros((16, 1), dtype)
    for i, (x, y) in enumerate(pairs):
      a[0, i], b[i, 0] = x, y
    return _run(a, b)[0, 0]

  def test_nan_and_infinity(self):
    word = lambda x: int(x.view(np.uint32))
    inf = math.inf
    self.assertEqual(self._one((inf, 1)), inf)
    self.assertEqual(self._one((-inf, 1), (2, 3)), -inf)
    for pairs in (((inf, 1), (-inf, 1)), ((inf, 0),), ((math.nan, 1),)):
      self.assertEqual(word(self._one(*pairs)), 0x7FFFFFFF)

  def test_an_infinity_stays_in_its_element(self):
    a, b = _operands(5, "float16", (-1, 1))
    a[2, 3] = np.inf
    found, plain = _run(a, b), _run(np.where(np.isinf(a), 0, a), b)
    bits.assert_same_bits(np.delete(found, 2, 0), np.delete(plain, 2, 0))

  def test_overflow_is_infinity(self):
    big = 2.0**64
    self.assertEqual(
        self._one((big, big), dtype=ml_dtypes.bfloat16), math.inf
    )

  def test_minus_zero_products_sum_to_plus_zero(self):
    found = self._one(*[(-0.0, 1)] * 16)
    bits.assert_same_bits(found, np.float32(0))

  def test_a_term_below_the_unit_is_lost(self):
    self.assertEqual(self._one((1, 1), (2.0**-13, 2.0**-13)), 1)
    self.assertEqual(self._one((2.0**-13, 2.0**-13)), 2.0**-26)

  def test_refuses_other_shapes(self):
    half = np.zeros((2, 24), np.float16)
    with self.assertRaisesRegex(ValueError, r"float16\(2, 24\)"):
      _run(half, half.T)
    whole = np.zeros((2, 32), np.float16)
    with self.assertRaisesRegex(ValueError, "bfloat16"):
      _run(whole, whole.T.astype(ml_dtypes.bfloat16))


if __name__ == "__main__":
  absltest.main()
