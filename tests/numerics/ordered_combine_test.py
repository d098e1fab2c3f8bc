"""Ordered combine: the order, dtype and rounding that the contract fixes.

The oracle is held against a scalar loop, against exact rationals where it
contracts, and against what is known of the four schemes; the twin against the
oracle, compiled and not. Needs no accelerator.
"""

import dataclasses
import fractions
import itertools
import math

from absl.testing import absltest
from absl.testing import parameterized
import chex
import hypothesis as hp
import hypothesis.strategies as hps
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.contracts import combine
from moejax.numerics import formats
from moejax.numerics import ordered_combine as lib
from tests import bits
from tests.numerics import combine_cases

_SCHEMES = ("P32", "C", "A", "B")
_BOTH, _TWINS = combine_cases.BOTH, combine_cases.TWINS
_contract, _hard = combine_cases.contract_of, combine_cases.hard


def _random(seed: int, tokens: int = 5, top_k: int = 4, embed: int = 8):
  """Returns (expert_out, gate, expert_ids) with all products inexact."""
  rng = np.random.default_rng(seed)
  expert_out = rng.standard_normal((tokens, top_k, embed)).astype(np.float32)
  ids = rng.random((tokens, 2 * top_k)).argsort(-1)[:, :top_k]
  return expert_out, rng.random((tokens, top_k), np.float32), ids.astype(
      np.int32
  )


def _term_by_term(expert_out, gate, order, contract):
  """A scalar loop over NumPy scalars: what the contract's docstring says."""
  operand = formats.of(contract.operand).numpy.type
  accumulator = formats.of(contract.accumulator).numpy.type
  tokens, _, embed = expert_out.shape
  out = np.zeros((tokens, embed), formats.of(contract.output).numpy)
  for token, column in itertools.product(range(tokens), range(embed)):
    total = np.float32(0)
    for slot in order[token]:
      product = gate[token, slot] * np.float32(expert_out[token, slot, column])
      term = np.float32(operand(product))
      total = np.float32(accumulator(total + term))
    out[token, column] = total
  return out


def _all_orders(top_k: int) -> np.ndarray:
  return np.array(list(itertools.permutations(range(top_k))), np.int32)


def _in_all_orders(terms: np.ndarray, contract) -> np.ndarray:
  """Combines ungated terms [slot, embed] in each of the top_k! orders."""
  orders = _all_orders(len(terms))
  repeated = np.broadcast_to(terms, (len(orders), *terms.shape))
  gate = np.ones(orders.shape, np.float32)
  return lib.ordered_combine_oracle(
      repeated, gate, orders, contract, order=orders
  )


def _nearest_float32(value: fractions.Fraction) -> np.float32:
  """The float32 next to a rational that is not zero; ties to even."""
  middle = np.float32(float(value))
  candidates = (
      middle,
      np.nextafter(middle, np.float32(np.inf)),
      np.nextafter(middle, np.float32(-np.inf)),
  )
  return min(
      candidates,
      key=lambda c: (
          abs(fractions.Fraction(float(c)) - value),
          int(c.view(np.uint32)) & 1,
      ),
  )


class OracleTest(parameterized.TestCase):

  @parameterized.product(
      scheme=_SCHEMES, dtype=("bfloat16", "float16"), out=("float32", "float16")
  )
  def test_equals_a_scalar_loop(self, scheme, dtype, out):
    expert_out, gate, ids = _random(1)
    order = np.random.default_rng(2).permuted(
        np.tile(np.arange(4, dtype=np.int32), (5, 1)), axis=-1
    )
    contract = _contract(scheme, dtype, order="explicit", output=out)
    bits.assert_same_bits(
        lib.ordered_combine_oracle(
            expert_out, gate, ids, contract, order=order
        ),
        _term_by_term(expert_out, gate, order, contract),
    )

  @hp.given(seed=hps.integers(0, 2**16), order=hps.permutations(range(4)))
  def test_relabelling_the_slots_keeps_the_bits(self, seed, order):
    expert_out, gate, ids = _random(seed)
    explicit = _contract("B", order="explicit", permutations=(tuple(order),))
    bits.assert_same_bits(
        lib.ordered_combine_oracle(expert_out, gate, ids, explicit),
        lib.ordered_combine_oracle(
            expert_out[:, order], gate[:, order], ids[:, order], _contract("B")
        ),
    )

  @hp.given(seed=hps.integers(0, 2**16), order=hps.permutations(range(4)))
  def test_expert_order_does_not_depend_on_the_slots(self, seed, order):
    expert_out, gate, ids = _random(seed)
    contract = _contract("B", order="expert")
    bits.assert_same_bits(
        lib.ordered_combine_oracle(
            expert_out[:, order], gate[:, order], ids[:, order], contract
        ),
        lib.ordered_combine_oracle(expert_out, gate, ids, contract),
    )

  def test_expert_order_is_ascending_and_leaves_equal_ids_in_slot_order(self):
    ids = np.int32([[5, 2, 7, 2], [8, 8, 8, 8]])
    contract = _contract("B", order="expert")
    expected = np.int32([[1, 3, 0, 2], [0, 1, 2, 3]])
    bits.assert_same_bits(
        lib.term_order(contract, ids, xp=np), expected
    )
    bits.assert_same_bits(
        lib.term_order(contract, jnp.asarray(ids)), expected
    )
    # A sort that is stable by accident is so for few elements only.
    ids = np.arange(100, dtype=np.int32)[None] % 2
    expected = np.int32([[*range(0, 100, 2), *range(1, 100, 2)]])
    bits.assert_same_bits(lib.term_order(contract, ids, xp=np), expected)
    bits.assert_same_bits(
        lib.term_order(contract, jnp.asarray(ids)), expected
    )

  @hp.given(seed=hps.integers(0, 2**16), token=hps.integers(0, 4))
  def test_a_token_alone_has_the_bits_it_has_in_a_batch(self, seed, token):
    inputs = _random(seed)
    contract = _contract("B", order="expert")
    batch = lib.ordered_combine_oracle(*inputs, contract)
    alone = lib.ordered_combine_oracle(*(x[token, None] for x in inputs),
                                       contract)
    bits.assert_same_bits(alone[0], batch[token])

  @hp.given(seed=hps.integers(0, 2**16), rows=hps.permutations(range(5)))
  def test_c25_permuting_the_tokens_permutes_the_results(self, seed, rows):
    inputs = _random(seed)
    contract = _contract("A")
    bits.assert_same_bits(
        lib.ordered_combine_oracle(*(x[rows] for x in inputs), contract),
        lib.ordered_combine_oracle(*inputs, contract)[rows],
    )

  @parameterized.parameters(*_SCHEMES)
  def test_the_order_is_observable(self, scheme):
    # Terms in float32 need a wider spread than 13 binades before C sees it.
    terms = np.float32([[1.0], [2.0**30], [-(2.0**30)]])
    y = _in_all_orders(
        terms, _contract(scheme, order="explicit", output="float32")
    )
    by_order = dict(zip(itertools.permutations(range(3)), y[:, 0].tolist()))
    self.assertEqual(by_order[0, 1, 2], 0.0)  # 1 is lost against 2**30.
    self.assertEqual(by_order[1, 2, 0], 1.0)

  def test_every_layer_has_its_own_permutation(self):
    inputs = _random(3)
    both = _contract("B", order="explicit", permutations=_BOTH)
    results = []
    for layer, permutation in enumerate(_BOTH):
      alone = _contract("B", order="explicit", permutations=(permutation,))
      results.append(lib.ordered_combine_oracle(*inputs, both, layer=layer))
      bits.assert_same_bits(
          results[-1], lib.ordered_combine_oracle(*inputs, alone, layer=layer)
      )
    self.assertFalse(np.array_equal(*results))

  @parameterized.parameters(
      ("float32", "0x7fc00000", 0x7FC00000),
      ("float32", "0x7fffffff", 0x7FFFFFFF),
      ("bfloat16", "0x7fc00000", 0x7FC0),
      ("bfloat16", "0x7fffffff", 0x7FFF),
      ("float16", "0x7fc00000", 0x7E00),
      ("float16", "0x7fffffff", 0x7FFF),
  )
  def test_every_nan_is_the_contracts_own(self, output, nan, word):
    # NaN in, infinity times zero, infinity minus infinity.
    expert_out = np.float32([
        [[-np.nan], [1]], [[np.inf], [1]], [[np.inf], [-np.inf]]
    ])
    gate = np.float32([[1, 1], [0, 1], [1, 1]])
    contract = _contract("P32", output=output, nan=nan)
    y = lib.ordered_combine_oracle(
        expert_out, gate, np.zeros((3, 2), np.int32), contract
    )
    uint = formats.of(output).uint
    bits.assert_same_bits(y.view(uint), np.full((3, 1), word, uint))

  @parameterized.parameters(("zero", 0x00000000), ("first", 0x80000000))
  def test_only_a_start_from_the_first_term_keeps_minus_zero(
      self, start, word
  ):
    contract = _contract("P32", start=start, output="float32")
    y = lib.ordered_combine_oracle(
        np.float32([[[-0.0], [-0.0]]]),
        np.ones((1, 2), np.float32),
        np.zeros((1, 2), np.int32),
        contract,
    )
    bits.assert_same_bits(y.view(np.uint32), np.uint32([[word]]))

  def test_the_shared_expert_joins_before_or_after_the_rounding(self):
    # In bfloat16, 256 + 1 is 256; in float32, 257 + 1 is 258.
    inputs = (
        np.float32([[[256], [1]]]),
        np.ones((1, 2), np.float32),
        np.zeros((1, 2), np.int32),
    )
    shared = np.float32([[1]])
    for early, expected in ((False, 258.0), (True, 256.0)):
      contract = _contract("P32", round_before_shared=early)
      y = lib.ordered_combine_oracle(*inputs, contract, shared)
      bits.assert_same_bits(y, np.array([[expected]], ml_dtypes.bfloat16))

  def test_a_product_is_rounded_to_float32_and_then_to_the_operand(self):
    # 2.5e-8 above 1 + 2**-8, which float32 takes for that tie of bfloat16.
    gate = np.float32([[float.fromhex("0x1.00d9c2p+0")]])
    expert_out = np.float32([[[float.fromhex("0x1.00261ep+0")]]])
    self.assertGreater(float(gate[0, 0]) * expert_out.item(), 1 + 2.0**-8)
    contract = _contract("C", output="float32")
    inputs = (expert_out, gate, np.int32([[0]]))
    for y in (
        lib.ordered_combine_oracle(*inputs, contract),
        lib.ordered_combine(*map(jnp.asarray, inputs), contract),
    ):
      bits.assert_same_bits(y, np.float32([[1.0]]))

  def test_a_sum_is_rounded_to_float32_and_then_to_the_accumulator(self):
    # 1 + 2**-8 + 2**-28 is the tie 1 + 2**-8 in float32, and 1 in bfloat16.
    inputs = (
        np.float32([[[1], [2.0**-8 * (1 + 2.0**-20)]]]),
        np.float32([[1, 1]]),
        np.int32([[0, 0]]),
    )
    contract = _contract("A", output="float32")
    for y in (
        lib.ordered_combine_oracle(*inputs, contract),
        lib.ordered_combine(*map(jnp.asarray, inputs), contract),
    ):
      bits.assert_same_bits(y, np.float32([[1.0]]))

  @parameterized.parameters(
      ("gate_dtype", "bfloat16"),
      ("operand", "bfloat16"),
      ("accumulator", "bfloat16"),
      ("order", "expert"),
      ("gate_site", "before_down"),
      ("contraction", "fma"),
  )
  def test_a_field_changes_bits(self, field, value):
    inputs = _random(4)
    base = _contract("P32", output="float32")
    other = dataclasses.replace(base, **{field: value})
    left = lib.ordered_combine_oracle(*inputs, base)
    right = lib.ordered_combine_oracle(*inputs, other)
    self.assertTrue((left != right).any())


class SchemeTest(parameterized.TestCase):

  @hp.given(seed=hps.integers(0, 2**16), top_k=hps.integers(2, 6))
  def test_b_has_half_as_many_classes_as_orders(self, seed, top_k):
    rng = np.random.default_rng(seed)
    terms = rng.standard_normal((top_k, 64)).astype(ml_dtypes.bfloat16)
    y = _in_all_orders(terms, _contract("B", order="explicit"))
    words = [row.tobytes() for row in y]
    self.assertLen(set(words), math.factorial(top_k) // 2)
    by_order = dict(zip(itertools.permutations(range(top_k)), words))
    for order, word in by_order.items():
      swapped = (order[1], order[0], *order[2:])
      self.assertEqual(by_order[swapped], word)

  @hp.given(seed=hps.integers(0, 2**16))
  def test_c_is_free_of_order_for_six_terms_within_13_binades(self, seed):
    rng = np.random.default_rng(seed)
    exponent = rng.integers(-90, 90) + rng.integers(0, 14, (6, 32))
    # 8 bits of significand, 13 binades and 3 carries fit 24 bits.
    terms = np.ldexp(rng.integers(128, 256, (6, 32)) / 128, exponent)
    terms *= rng.choice([-1, 1], terms.shape)
    y = _in_all_orders(
        terms.astype(ml_dtypes.bfloat16),
        _contract("C", order="explicit", output="float32"),
    )
    exact = terms.sum(0).astype(np.float32)
    bits.assert_same_bits(y, np.broadcast_to(exact, y.shape))

  def test_c_depends_on_the_order_beyond(self):
    # 2**16 + 0.50390625 is a tie, and so is the next; the two small terms
    # alone make 1.0078125, which fits.
    terms = np.array(
        [[2.0**16], [0.50390625], [0.50390625]], ml_dtypes.bfloat16
    )
    y = _in_all_orders(
        terms, _contract("C", order="explicit", output="float32")
    )
    self.assertEqual(set(y[:, 0].tolist()), {65537.0, 65537.0078125})

  def test_c25_float32_terms(self):
    y = _in_all_orders(
        np.float32([[1e8], [1], [-1e8]]),
        _contract("P32", order="explicit", output="float32"),
    )
    by_order = dict(zip(itertools.permutations(range(3)), y[:, 0].tolist()))
    for order, value in by_order.items():
      self.assertEqual(value, 1.0 if order[2] == 1 else 0.0, order)

  def test_c25_bfloat16_accumulator(self):
    y = _in_all_orders(
        np.float32([[256], [1], [1]]), _contract("A", order="explicit")
    )
    by_order = dict(zip(itertools.permutations(range(3)), y[:, 0].tolist()))
    for order, value in by_order.items():
      self.assertEqual(value, 258.0 if order[2] == 0 else 256.0, order)

  def test_c25_one_rounding_at_the_end(self):
    y = _in_all_orders(
        np.float32([[256], [1], [1]]), _contract("P32", order="explicit")
    )
    bits.assert_same_bits(y, np.full((6, 1), 258, ml_dtypes.bfloat16))


class FmaTest(parameterized.TestCase):

  def _fma(self, a, g, e, run=lib.ordered_combine_oracle):
    """a + g * e by a contract that starts from the first term."""
    contract = combine.CombineContract(
        "fma", contraction="fma", start="first", output="float32"
    )
    y = run(
        np.stack([a, e], -1)[..., None],
        np.stack([np.ones_like(g), g], -1),
        np.zeros((len(a), 2), np.int32),
        contract,
    )
    return np.asarray(y)[:, 0]

  def _assert_exact(self, a, g, e):
    exact = fractions.Fraction
    expected = [
        _nearest_float32(exact(x) + exact(y) * exact(z))
        for x, y, z in zip(a.tolist(), g.tolist(), e.tolist(), strict=True)
    ]
    bits.assert_same_bits(self._fma(a, g, e), np.array(expected))

  @parameterized.parameters(0, -140, 90)
  def test_random_values_are_rounded_once(self, centre):
    rng = np.random.default_rng(0)
    shape = (1500,)
    g = np.ldexp(rng.standard_normal(shape), centre // 2).astype(np.float32)
    e = np.ldexp(rng.standard_normal(shape), centre - centre // 2)
    e = e.astype(np.float32)
    spread = rng.integers(-28, 28, shape)
    a = np.ldexp(rng.standard_normal(shape), centre + spread)
    a = a.astype(np.float32)
    # Some sums cancel down to the rounding error of the product.
    a[::5] = -(g * e)[::5]
    a = np.where(g.astype(float) * e + a == 0, np.float32(1), a)
    self._assert_exact(a, g, e)

  def test_what_lies_beside_halfway_is_not_taken_for_it(self):
    up, down = 1 + 2.0**-23, 1 - 2.0**-23
    odd = 1 + 2.0**-23
    half = 2.0**-12
    rows = [
        # a, g, e: exactly halfway, then 2**-70 below and 2**-47 above it.
        (a * sign, half * sign, half * factor)
        for a in (1.0, odd)
        for sign in (1, -1)
        for factor in (1.0, down, up)
    ]
    rows += [
        (a * sign, half * up * sign, half * down)
        for a in (1.0, odd)
        for sign in (1, -1)
    ]
    a, g, e = np.float32(rows).T
    self._assert_exact(a, g, e)
    # Rounding to float64 first would go wrong here.
    twice = (a.astype(float) + g.astype(float) * e).astype(np.float32)
    self.assertGreater((twice != self._fma(a, g, e)).sum(), 0)

  def test_exact_cancellation_is_plus_zero(self):
    one = np.float32([1, -1])
    bits.assert_same_bits(self._fma(one, -one, np.float32([1, 1])),
                          np.zeros(2, np.float32))

  def test_twin_rounds_once_beside_halfway(self):
    def twin(expert_out, gate, ids, contract):
      arrays = map(jnp.asarray, (expert_out, gate, ids))
      return lib.ordered_combine(*arrays, contract)

    a = np.float32([1 + 2.0**-23])
    g = np.float32([2.0**-12 * (1 + 2.0**-23)])
    e = np.float32([2.0**-12 * (1 - 2.0**-23)])
    bits.assert_same_bits(self._fma(a, g, e, twin), self._fma(a, g, e))


class TwinTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.product(case=tuple(_TWINS), dtype=("bfloat16", "float16"))
  def test_equals_the_oracle(self, case, dtype):
    scheme, fields = _TWINS[case]
    contract = _contract(scheme, dtype, **fields)
    expert_out, gate, ids, order, shared = _hard(dtype)
    if contract.order != "explicit" or contract.permutations:
      order = None

    @self.variant
    def fn(expert_out, gate, ids, order, shared):
      arguments = (expert_out, gate, ids, contract)
      return (
          lib.ordered_combine(*arguments, None, 1, order),
          lib.ordered_combine(*arguments, shared, 1, order),
      )

    actual = fn(
        *map(jnp.asarray, (expert_out, gate, ids)),
        None if order is None else jnp.asarray(order),
        jnp.asarray(shared),
    )
    for y, shared_out in zip(actual, (None, shared), strict=True):
      bits.assert_same_bits(
          y,
          lib.ordered_combine_oracle(
              expert_out, gate, ids, contract, shared_out, 1, order
          ),
      )

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.product(start=("zero", "first"), top_k=(1, 2))
  def test_signed_zeros_equal_the_oracle(self, start, top_k):
    signs = np.array(list(itertools.product([0.0, -0.0], repeat=top_k)))
    expert_out = signs[..., None].astype(np.float32)
    gate = np.ones(signs.shape, np.float32)
    ids = np.zeros(signs.shape, np.int32)
    contract = _contract("P32", start=start, output="float32")
    fn = self.variant(lambda *x: lib.ordered_combine(*x, contract))
    bits.assert_same_bits(
        fn(*map(jnp.asarray, (expert_out, gate, ids))),
        lib.ordered_combine_oracle(expert_out, gate, ids, contract),
    )

  @parameterized.product(
      dtype=("float32", "bfloat16", "float16"),
      site=("after_down", "before_down"),
      operand=("float32", "bfloat16", "float16"),
  )
  def test_terms_equal_the_oracle(self, dtype, site, operand):
    # The final sum replaces every NaN; the terms' own are seen by a tap.
    expert_out, gate, *_ = _hard(dtype)
    if dtype == "float32":  # NaN of either sign, payload high, low and both.
      expert_out[0, 0, :6] = np.uint32([
          0x7FC00000, 0xFFC00000, 0x7FFF0000, 0xFF812345, 0x7F800001, 0xFF80FFFF
      ]).view(np.float32)
    for rounding, nan, subnormals in (
        ("ieee", "0x7fc00000", "keep"),
        ("paper", "0x7fffffff", "keep"),
        ("paper", "0x7fc00000", "flush"),
    ):
      contract = combine.CombineContract(
          "terms",
          gate_site=site,
          operand=operand,
          rounding=rounding,
          nan=nan,
          subnormals=subnormals,
      )
      bits.assert_same_bits(
          lib.gate_terms(jnp.asarray(expert_out), jnp.asarray(gate), contract),
          lib.gate_terms_oracle(expert_out, gate, contract),
      )

  def test_paper_makes_infinity_of_an_ungated_nan_with_a_low_payload(self):
    contract = _contract("C", gate_site="before_down", output="float32")
    words = np.uint32([[[0x7F800001, 0xFF80FFFF, 0x7F810000]]])
    inputs = (
        words.view(np.float32),
        np.ones((1, 1), np.float32),
        np.int32([[0]]),
    )
    for y in (
        lib.ordered_combine_oracle(*inputs, contract),
        lib.ordered_combine(*map(jnp.asarray, inputs), contract),
    ):
      bits.assert_same_bits(y, np.float32([[np.inf, -np.inf, np.nan]]))

  def test_an_fma_that_vanishes_keeps_its_sign_as_in_the_oracle(self):
    # fma(1e-30, -1e-30, +0) is -0: its exact value is not zero.
    inputs = (
        np.float32([[[-1e-30]]]), np.float32([[1e-30]]), np.int32([[0]])
    )
    contract = _contract("P32", contraction="fma", output="float32")
    bits.assert_same_bits(
        lib.ordered_combine(*map(jnp.asarray, inputs), contract),
        lib.ordered_combine_oracle(*inputs, contract),
    )

  def test_a_subnormal_is_flushed_before_it_is_rounded_as_in_the_oracle(self):
    # 0x007fffff is flushed; rounded first, it would become 2**-126.
    inputs = (
        np.uint32([[[0x007FFFFF]]]).view(np.float32),
        np.float32([[1]]),
        np.int32([[0]]),
    )
    contract = _contract(
        "C", gate_site="before_down", subnormals="flush", output="float32"
    )
    bits.assert_same_bits(
        lib.ordered_combine(*map(jnp.asarray, inputs), contract),
        lib.ordered_combine_oracle(*inputs, contract),
    )

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(("keep", 0x000116C2), ("flush", 0))
  def test_c18_subnormals_follow_the_contract(self, subnormals, word):
    contract = _contract("P32", output="float32", subnormals=subnormals)
    fn = self.variant(lambda *x: lib.ordered_combine(*x, contract))
    tiny = np.float32([[1e-20]])
    inputs = (tiny[..., None], tiny, np.int32([[0]]))
    for y in (
        fn(*map(jnp.asarray, inputs)),
        lib.ordered_combine_oracle(*inputs, contract),
    ):
      bits.assert_same_bits(np.asarray(y).view(np.uint32), np.uint32([[word]]))

  def test_c18_a_plain_product_is_flushed_on_a_cpu(self):
    if jax.default_backend() != "cpu":
      self.skipTest("That XLA flushes subnormals was seen on CPUs.")
    tiny = jnp.float32(1e-20)
    self.assertEqual(float(jax.jit(jnp.multiply)(tiny, tiny)), 0.0)

  def test_a_token_alone_has_the_bits_it_has_in_a_batch(self):
    inputs = _hard("bfloat16")[:3]
    contract = _contract("B", order="expert")
    fn = jax.jit(lambda *x: lib.ordered_combine(*x, contract))
    batch = np.asarray(fn(*inputs))
    for token in range(2):
      alone = fn(*(x[token, None] for x in inputs))
      bits.assert_same_bits(alone[0], batch[token])


class RefusalTest(parameterized.TestCase):

  def _assert_refused(self, contract, message, **arguments):
    inputs = _random(0)
    with self.assertRaisesRegex(ValueError, message):
      lib.ordered_combine_oracle(*inputs, contract, **arguments)
    with self.assertRaisesRegex(ValueError, message):
      lib.ordered_combine(*map(jnp.asarray, inputs), contract, **arguments)

  def test_a_permutation_of_another_top_k(self):
    contract = _contract("B", order="explicit", permutations=((1, 0),))
    self._assert_refused(contract, r"\(1, 0\) does not order top_k=4")

  def test_a_layer_without_a_permutation(self):
    contract = _contract("B", order="explicit", permutations=_BOTH)
    self._assert_refused(contract, "layer=2 .* holds 2", layer=2)

  def test_an_explicit_order_that_nobody_gives(self):
    self._assert_refused(_contract("B", order="explicit"), "needs `order`")


if __name__ == "__main__":
  absltest.main()
