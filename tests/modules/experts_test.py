"""Experts: where the gate multiplies, and every rounding on the way.

Needs no accelerator, and float64.
"""

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.contracts import combine
from moejax.contracts import named_combines
from moejax.modules import experts as lib
from moejax.numerics import ordered_combine
from moejax.numerics.portable import portable_ops
from moejax.numerics.portable import portable_oracle
from moejax.numerics import router
from tests import bits

_OPS = portable_ops.PortableOperations()
_DTYPE = "bfloat16"


def _draw(seed: int, *shape: int) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)


class GateSiteTest(parameterized.TestCase):
  """One scalar expert whose weights are one: f(x) = silu(x) * x."""

  def _run(self, site: str, x: float, gate: float, top_k: int = 1):
    contract = combine.CombineContract(
        "case", gate_site=site, output="float32"
    )
    params = {
        "gate_up": jnp.ones((1, 2, 1), jnp.float32),
        "down": jnp.ones((1, 1, 1), jnp.float32),
    }
    route = router.Route(
        jnp.zeros((1, top_k), jnp.int32),
        jnp.full((1, top_k), gate, jnp.float32),
    )
    module = lib.Experts(params, contract, 0, _OPS)
    return module(jnp.asarray([[x]], jnp.float32), route).item()

  @parameterized.parameters(
      ("input", 0.155614833),
      ("after_down", 0.880797078),
      ("before_down", 0.880797078),  # down is linear, and one here.
  )
  def test_c07_the_gate_multiplies_where_the_contract_says(
      self, site, expected
  ):
    # At most four float32 roundings of a value below one.
    self.assertAlmostEqual(
        self._run(site, 2.0, 0.25), expected, delta=4 * 2.0**-24
    )

  def test_c07_double_weighting_would_show(self):
    twice = self._run("after_down", 2.0 * 0.25, 0.25)
    self.assertAlmostEqual(twice, 0.038903708, delta=4 * 2.0**-24)
    for site in combine.GATE_SITES:
      self.assertGreater(self._run(site, 2.0, 0.25), 2 * twice)

  def test_c07_a_gate_on_the_input_needs_one_slot(self):
    with self.assertRaisesRegex(ValueError, "top_k=1, not 2"):
      self._run("input", 2.0, 0.25, top_k=2)
    for site in ("after_down", "before_down"):
      self.assertGreater(self._run(site, 2.0, 0.25, top_k=2), 1.7)


class ExpertsTest(parameterized.TestCase):

  def _operands(self):
    """Five tokens over four experts; the last token is padding."""
    params = {
        "gate_up": _draw(0, 4, 2 * 6, 8), "down": _draw(1, 4, 8, 6)
    }
    ids = np.int32([[2, 0], [0, 3], [3, 2], [2, 3], [4, 4]])
    gates = np.random.default_rng(2).random((5, 2)).astype(ml_dtypes.bfloat16)
    return params, _draw(3, 5, 8), router.Route(ids, gates)

  def _run(self, params, x, route, contract):
    module = lib.Experts(
        {name: jnp.asarray(value) for name, value in params.items()},
        contract,
        0,
        _OPS,
    )
    return module(
        jnp.asarray(x), router.Route(*map(jnp.asarray, route))
    )

  def _by_route(self, params, x, route, contract):
    """One expert of one token at a time, each operation rounded once."""
    oracle = portable_oracle.PortableOracle()
    out = np.zeros((5, 2, 8), x.dtype)
    for token, slot in np.ndindex(*route.ids.shape):
      expert = route.ids[token, slot]
      if expert == 4:
        continue
      gate, up = np.split(
          oracle.matmul(x[token, None], params["gate_up"][expert].T, _DTYPE),
          2,
          axis=-1,
      )
      gate = oracle.unary("silu", gate, _DTYPE)
      product = oracle.multiply(gate, up, _DTYPE)
      if contract.gate_site == "before_down":
        weight = route.gates[token, slot].astype(contract.gate_dtype)
        product = oracle.multiply(product, weight, "float32").astype(x.dtype)
      out[token, slot] = oracle.matmul(
          product, params["down"][expert].T, _DTYPE
      )[0]
    return out

  @parameterized.parameters("B", "transformers_eager", "deepseek_reference")
  def test_equal_a_loop_over_the_routes(self, name):
    contract = named_combines.named(name)
    params, x, route = self._operands()
    out = self._by_route(params, x, route, contract)
    terms = ordered_combine.gate_terms_oracle(out, route.gates, contract)
    order = ordered_combine.term_order(contract, route.ids, xp=np)
    expected = portable_oracle.PortableOracle().combine(terms, order, contract)
    bits.assert_same_bits(self._run(params, x, route, contract), expected)

  def test_padding_is_sent_to_no_expert_and_becomes_zero(self):
    contract = named_combines.named("B")
    out = self._run(*self._operands(), contract)
    bits.assert_same_bits(out[4], np.zeros(8, ml_dtypes.bfloat16))

  def test_an_expert_without_tokens_may_hold_anything(self):
    contract = named_combines.named("B")
    params, x, route = self._operands()
    expected = self._run(params, x, route, contract)
    params["gate_up"][1] = np.nan  # Nobody goes to expert 1.
    bits.assert_same_bits(self._run(params, x, route, contract), expected)

  def test_a_token_alone_has_the_bits_it_has_in_a_batch(self):
    contract = named_combines.named("transformers_eager")
    params, x, route = self._operands()
    batch = np.asarray(self._run(params, x, route, contract))
    one = router.Route(route.ids[2:3], route.gates[2:3])
    alone = np.asarray(self._run(params, x[2:3], one, contract))
    bits.assert_same_bits(alone[0], batch[2])

  def test_the_layer_selects_the_permutation(self):
    contract = combine.CombineContract(
        "layers",
        accumulator="bfloat16",
        order="explicit",
        permutations=((0, 1, 2), (2, 1, 0)),
    )
    # silu(64) is 64 in float32, and times 1 / 64 it is 1.
    gate_up = jnp.asarray([[64], [1 / 64]], jnp.float32)
    params = {
        "gate_up": jnp.tile(gate_up, (3, 1, 1)),
        "down": jnp.asarray([[[256]], [[1]], [[1]]], jnp.float32),
    }
    route = router.Route(
        jnp.asarray([[0, 1, 2]], jnp.int32), jnp.ones((1, 3), jnp.float32)
    )
    x = jnp.ones((1, 1), jnp.float32)
    for layer, expected in ((0, 256.0), (1, 258.0)):
      out = lib.Experts(params, contract, layer, _OPS)(x, route)
      self.assertEqual(out.item(), expected)

  def test_refuses_a_contraction(self):
    contract = combine.CombineContract("fused", contraction="fma")
    params, _, _ = self._operands()
    with self.assertRaisesRegex(NotImplementedError, "contraction='fma'"):
      lib.Experts(params, contract, 0, _OPS)


class DenseMLPTest(absltest.TestCase):

  def test_rounds_once_an_operation(self):
    params = {
        "gate_proj": _draw(0, 6, 8),
        "up_proj": _draw(1, 6, 8),
        "down_proj": _draw(2, 8, 6),
    }
    x = _draw(3, 2, 3, 8)
    oracle = portable_oracle.PortableOracle()
    gate = oracle.matmul(x, params["gate_proj"].T, _DTYPE)
    up = oracle.matmul(x, params["up_proj"].T, _DTYPE)
    gate = oracle.unary("silu", gate, _DTYPE)
    product = oracle.multiply(gate, up, _DTYPE)
    expected = oracle.matmul(product, params["down_proj"].T, _DTYPE)
    module = lib.DenseMLP(
        {name: jnp.asarray(value) for name, value in params.items()}, _OPS
    )
    bits.assert_same_bits(module(jnp.asarray(x)), expected)


if __name__ == "__main__":
  absltest.main()
