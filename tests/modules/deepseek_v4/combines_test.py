"""Every named combine in the sparse layer of both graphs, in two arithmetics.

What the layer adds is added again in plain float32. Needs no accelerator.
"""

import dataclasses
import math

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.contracts import combine as combine_contract
from moejax.contracts import deepseek_v4 as contract_lib
from moejax.contracts import named_combines
from moejax.modules import decoder as nest_lib
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import decoder as decoder_lib
from moejax.modules.deepseek_v4 import moe as moe_lib
from moejax.numerics import reference_ops
from tests import bits
from tests.modules.deepseek_v4 import recorder as recorder_lib
from tests.modules.deepseek_v4 import tiny

_NAMES = (
    "P32", "C", "A", "B", "transformers_eager", "transformers_grouped_mm",
    "deepseek_reference",
)
_GRAPHS = ("transformers", "deepseek_reference")
_LAYER = 1
# {name: (terms are rounded, partial sums are rounded, ascending expert ids,
# the routed sum is rounded before the shared expert joins)}.
_RULES = {
    "P32": (False, False, False, False),
    "C": (True, False, False, False),
    "A": (False, True, False, False),
    "B": (True, True, False, False),
    "transformers_eager": (True, True, True, True),
    "transformers_grouped_mm": (True, False, False, True),
    "deepseek_reference": (True, False, True, False),
}


def _r16(x):
  return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(
      np.float32
  )


def _contract(combine, graph, arithmetic) -> contract_lib.DeepseekV4Contract:
  if isinstance(combine, str):
    combine = named_combines.named(combine)
  if graph == "transformers":
    return contract_lib.of(
        arithmetic, config_lib.router_contract(tiny.CONFIG), combine
    )
  contract = contract_lib.deepseek_reference(
      arithmetic, tiny.CONFIG.top_k, tiny.CONFIG.gate_scale
  )
  return dataclasses.replace(contract, combine=combine)


def _run(contract) -> dict:
  """The taps of one sparse layer over twelve tokens, as float32."""
  rng = np.random.default_rng(5)
  x = rng.standard_normal((1, 12, tiny.CONFIG.embed)).astype(np.float32)
  layer = moe_lib.MoE(
      nest_lib.nest(tiny.params())["layers"][_LAYER]["moe"],
      tiny.CONFIG,
      contract,
      _LAYER,
      reference_ops.operations(contract),
  )
  recorder = recorder_lib.Recorder()
  out = layer(
      jnp.asarray(x).astype(jnp.bfloat16),
      jnp.zeros((1, 12), jnp.int32),
      jnp.ones((1, 12), bool),
      recorder,
  )
  seen = {
      name: value if value.dtype == np.int32 else value.astype(np.float32)
      for name, value in recorder.seen.items()
  }
  return seen | {"out": np.asarray(out)[0].astype(np.float32)}


def _expected(seen, name, arithmetic) -> np.ndarray:
  """R(a + s) in plain float32, from what the experts returned."""
  rounds_terms, rounds_sums, ascending, rounds_routed = _RULES[name]
  terms = seen["experts.down"]
  if name != "deepseek_reference":
    gates = seen["router.gates"]
    if name.startswith("transformers"):
      gates = _r16(gates)
    terms = gates[..., None] * terms
  if rounds_terms:
    terms = _r16(terms)
  if ascending:
    order = np.argsort(seen["router.ids"], -1, kind="stable")
    terms = np.take_along_axis(terms, order[..., None], 1)
  if arithmetic == "portable" and not (rounds_sums or ascending):
    # One sum over an axis: one operation of the graph, one rounding.
    total = np.apply_along_axis(math.fsum, 1, terms).astype(np.float32)
  else:
    total = np.zeros_like(terms[:, 0])
    for slot in range(terms.shape[1]):
      total = total + terms[:, slot]
      total = _r16(total) if rounds_sums else total
  if rounds_routed:
    total = _r16(total)
  return _r16(total + seen["shared.down_proj"])


class NamedCombinesTest(parameterized.TestCase):

  @parameterized.product(
      name=_NAMES, graph=_GRAPHS, arithmetic=("sequential", "portable")
  )
  def test_the_layer_adds_as_the_contract_says(self, name, graph, arithmetic):
    seen = _run(_contract(name, graph, arithmetic))
    bits.assert_same_bits(seen["out"], _expected(seen, name, arithmetic))
    gated = "experts.gated_activation" in seen
    self.assertEqual(gated, name == "deepseek_reference")

  @parameterized.parameters(*_GRAPHS)
  def test_no_two_of_them_are_the_same(self, graph):
    outs = {
        _run(_contract(name, graph, "sequential"))["out"].tobytes(): name
        for name in _NAMES
    }
    self.assertCountEqual(outs.values(), _NAMES)


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
      ("vllm_marlin", "'vllm_marlin' has output='float16'.*bfloat16"),
      (combine_contract.CombineContract("wide", output="float32"), "'wide'"),
  )
  def test_a_combine_of_another_dtype(self, combine, message):
    contract = _contract(combine, "transformers", "native")
    with self.assertRaisesRegex(ValueError, message):
      decoder_lib.Decoder(
          tiny.CONFIG,
          nest_lib.nest(tiny.params()),
          contract,
          reference_ops.operations(contract),
      )

  @parameterized.parameters(
      (dict(contraction="fma"), NotImplementedError, "'fma'"),
      (dict(gate_site="input"), ValueError, "top_k=1, not 3"),
      (dict(order="explicit"), ValueError, "`order`"),
      (
          dict(order="explicit", permutations=((0, 1),)),
          ValueError,
          "does not order top_k=3",
      ),
      (dict(subnormals="flush"), NotImplementedError, "flush"),
  )
  def test_a_combine_that_the_layer_cannot_run(self, fields, error, message):
    combine = combine_contract.CombineContract("case", **fields)
    with self.assertRaisesRegex(error, message):
      _run(_contract(combine, "deepseek_reference", "portable"))


if __name__ == "__main__":
  absltest.main()
