"""Operations of a decoder contract: each site in its own arithmetic.

Portable arithmetic differs in bits from native and from sequential arithmetic
on the inputs here, so a reduction that went to another site's arithmetic would
show. (Sequential matrix products are what a CPU with FMA computes natively.)
Needs no accelerator, and float64.
"""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from moejax.contracts import decoder
from moejax.contracts import named_combines
from moejax.contracts import ops as ops_lib
from moejax.contracts import reduction
from moejax.contracts import route
from moejax.numerics import native_ops
from moejax.numerics import ordered_combine
from moejax.numerics.portable import bound_ops
from moejax.numerics.portable import certificate as certificate_lib
from moejax.numerics.portable import portable_ops
from moejax.numerics import quantization_simulation
from moejax.numerics import reference_ops as lib
from moejax.numerics import sequential_ops
from tests import bits

_ROUTER = route.RouterContract("router", top_k=2, normalize=True)
_COMBINE = named_combines.named("B")
_X = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
_EXPERTS = np.arange(32, dtype=np.int32) % 3


def _mean(ops, site):
  return ops.mean(jnp.asarray(_X * _X), site)


def _linear(ops, site):
  return ops.linear(jnp.asarray(_X), jnp.asarray(_X[:8]), site)


def _matmul(ops, site):
  return ops.matmul(jnp.asarray(_X), jnp.asarray(_X.T), site)


def _softmax(ops, site):
  return ops.softmax(jnp.asarray(_X), site)


def _sum(ops, site):
  return ops.sum(jnp.asarray(_X), site)


def _expert_linear(ops, site):
  weight = jnp.asarray(_X[:24].reshape(3, 8, 64))
  return ops.expert_linear(
      jnp.asarray(_X), weight, jnp.asarray(_EXPERTS), site
  )


# The operation that reduces at each site.
_AT_SITE = {
    "norm_mean": _mean,
    "projection": _linear,
    "attention_scores": _matmul,
    "attention_softmax": _softmax,
    "attention_values": _matmul,
    "router_logits": _linear,
    "router_softmax": _softmax,
    "router_normalization": _sum,
    "expert_gemm": _expert_linear,
    "lm_head": _linear,
}
_ELEMENTWISE = {
    "scale": lambda ops: ops.scale(jnp.asarray(_X), 0.1),
    "add_scalar": lambda ops: ops.add_scalar(jnp.asarray(_X), 1e-3),
    "power": lambda ops: ops.power(10000.0, jnp.asarray(_X)),
    "rsqrt": lambda ops: ops.rsqrt(jnp.asarray(np.abs(_X))),
    "exp": lambda ops: ops.exp(jnp.asarray(_X)),
    "cos": lambda ops: ops.cos(jnp.asarray(_X)),
    "sin": lambda ops: ops.sin(jnp.asarray(_X)),
    "silu": lambda ops: ops.silu(jnp.asarray(_X)),
    "sigmoid": lambda ops: ops.sigmoid(jnp.asarray(_X)),
    "softplus": lambda ops: ops.softplus(jnp.asarray(_X)),
}


def _contract(elementwise: str, chain: str, **sites: str):
  changed = {s: reduction.ReductionContract(c) for s, c in sites.items()}
  return decoder.DecoderContract(
      "mine",
      elementwise,
      dataclasses.replace(decoder.Reductions.all(chain), **changed),
      _ROUTER,
      _COMBINE,
  )


class SiteTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    portable = portable_ops.PortableOperations()
    sets = {
        "native": native_ops.NativeOperations(),
        "portable": portable,
        "sequential": sequential_ops.SequentialReductions(portable),
    }
    # `expert_linear` belongs to no set but to the one of the contract.
    sets["sequential"].expert_linear = lib.operations(
        decoder.sequential(_ROUTER, _COMBINE)
    ).expert_linear
    cls.results = {
        chain: {s: np.asarray(fn(ops, s)) for s, fn in _AT_SITE.items()}
        for chain, ops in sets.items()
    }
    cls.elementwise = {
        chain: {
            name: np.asarray(fn(sets[chain]))
            for name, fn in _ELEMENTWISE.items()
        }
        for chain in ("native", "portable")
    }

  def test_the_cases_cover_every_site(self):
    self.assertEqual(set(_AT_SITE), set(reduction.SITES))

  @parameterized.product(
      site=reduction.SITES, chain=("native", "sequential")
  )
  def test_portable_arithmetic_differs_at_every_site(self, site, chain):
    portable, other = self.results["portable"][site], self.results[chain][site]
    self.assertTrue((portable != other).any())

  @parameterized.parameters(*_ELEMENTWISE)
  def test_portable_arithmetic_differs_in_every_elementwise_case(self, name):
    native, portable = (
        self.elementwise[chain][name] for chain in ("native", "portable")
    )
    self.assertTrue((native != portable).any())

  @parameterized.product(
      site=reduction.SITES, chain=("portable", "sequential")
  )
  def test_only_the_declared_site_leaves_native_arithmetic(self, site, chain):
    ops = lib.operations(_contract("native", "native", **{site: chain}))
    for other, fn in _AT_SITE.items():
      expected = self.results[chain if other == site else "native"][other]
      bits.assert_same_bits(fn(ops, other), expected)
    for name, fn in _ELEMENTWISE.items():
      bits.assert_same_bits(fn(ops), self.elementwise["native"][name])

  @parameterized.parameters(
      ("portable", "native"), ("native", "portable"), ("portable", "sequential")
  )
  def test_elementwise_arithmetic_is_chosen_apart(self, elementwise, chain):
    ops = lib.operations(_contract(elementwise, chain))
    for name, fn in _ELEMENTWISE.items():
      bits.assert_same_bits(fn(ops), self.elementwise[elementwise][name])
    for site, fn in _AT_SITE.items():
      bits.assert_same_bits(fn(ops, site), self.results[chain][site])


class SetTest(parameterized.TestCase):

  @parameterized.parameters(
      native_ops.NativeOperations(),
      bound_ops.BoundOperations(),
      *(
          lib.operations(make(_ROUTER, _COMBINE))
          for make in (decoder.portable, decoder.sequential)
      ),
  )
  def test_a_set_has_every_operation_of_the_protocol(self, ops):
    names = {n for n in vars(ops_lib.Operations) if not n.startswith("_")}
    self.assertIn("simulate_quantization", names)
    self.assertEmpty({n for n in names if not callable(getattr(ops, n, 0))})

  @parameterized.parameters("e4m3", "e2m1")
  def test_simulated_quantisation_is_the_same_in_every_set(self, code_format):
    x = np.concatenate([_X, 100 * _X], -1)
    expected = quantization_simulation.simulate_oracle(
        x, code_format, _X.shape[-1]
    )
    for make in (decoder.native, decoder.portable, decoder.sequential):
      ops = lib.operations(make(_ROUTER, _COMBINE))
      bits.assert_same_bits(
          ops.simulate_quantization(
              jnp.asarray(x), code_format, _X.shape[-1]
          ),
          expected,
      )
    self.assertEqual(
        bound_ops.BoundOperations()
        .simulate_quantization(x, code_format, _X.shape[-1])
        .tolist(),
        np.zeros(x.shape).tolist(),
    )

  @parameterized.parameters(
      (decoder.native, native_ops.NativeOperations),
      (decoder.portable, portable_ops.PortableOperations),
  )
  def test_a_uniform_contract_gets_the_set_itself(self, make, kind):
    ops = lib.operations(make(_ROUTER, _COMBINE))
    self.assertIsInstance(ops, kind)
    self.assertEqual(ops.name, make.__name__)

  @parameterized.parameters(decoder.portable, decoder.sequential)
  def test_the_certificate_is_the_callers(self, make):
    certificate = certificate_lib.Certificate()
    ops = lib.operations(make(_ROUTER, _COMBINE), certificate)
    ops.silu(jnp.asarray(_X))
    self.assertEqual(certificate.elements, _X.size)

  @parameterized.parameters(
      decoder.native, decoder.portable, decoder.sequential
  )
  def test_a_chained_combine_runs_as_its_contract_says(self, make):
    contract = make(_ROUTER, _COMBINE)
    rng = np.random.default_rng(0)
    expert_out = rng.standard_normal((6, 4, 8)).astype(np.float32)
    gate = rng.random((6, 4), np.float32)
    ids = np.tile(np.int32([2, 0, 3, 1]), (6, 1))
    ops = lib.operations(contract)
    terms = ops.gate_terms(
        jnp.asarray(expert_out), jnp.asarray(gate), contract.combine
    )
    bits.assert_same_bits(
        ops.combine(terms, jnp.asarray(ids), contract.combine, 0),
        ordered_combine.ordered_combine_oracle(
            expert_out, gate, ids, contract.combine
        ),
    )


if __name__ == "__main__":
  absltest.main()
