"""A run proves that it ran packed, and one that did not is caught.

Needs no accelerator, and float64.
"""

import functools

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax.numpy as jnp
import numpy as np

from moejax.modules import experts as experts_lib
from moejax.modules import packed_experts
from moejax.protocols.packed import proof as lib
from moejax.protocols import trajectory
from tests.modules import packed_decoders

_AT = "layers.1.moe.experts.packed_elements"


@functools.cache
def _params():
  return packed_decoders.params()


def _decoder(contract=packed_decoders.dequantized("native"), change=None):
  decoder = packed_decoders.decoder(contract, _params())
  if change is not None:
    moe = decoder.layers[1].moe
    moe.experts = change(moe.experts, contract, decoder.ops)
  return decoder


def _prove(decoder, edit=lambda captures: None):
  before = lib.gemms(decoder)
  captures = trajectory.run(
      decoder, packed_decoders.PROMPTS, packed_decoders.STEPS
  )
  edit(captures)
  return lib.prove(decoder, captures, _params(), before)


def _wide(experts, operations):
  """{"gate_up", "down"} of a layer, made wide."""
  return {
      name: getattr(experts, name).dequantized(
          operations, packed_decoders.CONFIG.dtype
      )
      for name in ("gate_up", "down")
  }


def _plain(experts, contract, operations):
  """The experts of an unpacked decoder."""
  return experts_lib.Experts(
      _wide(experts, operations), contract.combine, 1, operations
  )


class _Keeps(packed_experts.DequantizedExperts):
  """Shows the tap, and keeps the wide weights beside the words."""

  def __init__(self, experts, contract, operations):
    words = {
        name: {
            leaf: getattr(getattr(experts, name), leaf)[...]
            for leaf in packed_decoders.LEAVES
        }
        for name in ("gate_up", "down")
    }
    super().__init__(words, contract, 1, operations)
    made = _wide(experts, operations)
    self.store(made["gate_up"], made["down"])

  def store(self, gate_up, down):
    self.kept = nnx.List([nnx.Param(gate_up), nnx.Param(down)])

  def weights(self):
    return tuple(kept[...] for kept in self.kept)


class _KeepsCodes(_Keeps):
  """Keeps one byte a code: less than a wide weight, more than its words."""

  def store(self, gate_up, down):
    self.pair = lambda: (gate_up, down)
    self.kept = nnx.Param(down.astype(jnp.int8))

  def weights(self):
    self.ops.packed_gemms += 2
    return self.pair()


class _Hides(_Keeps):
  """Keeps them where no one looks for parameters."""

  def store(self, gate_up, down):
    self.weights_of = lambda: (gate_up, down)

  def weights(self):
    return self.weights_of()


class ProofTest(parameterized.TestCase):

  @parameterized.parameters("dequantized", "marlin")
  def test_counts_what_the_routes_demand(self, way):
    contract = getattr(packed_decoders, way)("native")
    found = _prove(_decoder(contract))
    self.assertEmpty(found["faults"])
    # 7 tokens, then 2 a step; 2 slots; 2 * 64 and 128 columns.
    by_step = [7 * 2 * 128, 2 * 2 * 128, 2 * 2 * 128]
    for row in found["layers"]:
      self.assertEqual((row["w13"], row["w2"]), (by_step, by_step))
      self.assertEqual(row["demanded"], {"w13": by_step, "w2": by_step})
      self.assertEqual(row["held"]["dtypes"], ["bfloat16", "int32"])
      # 5 experts of 128 by 128 and 64 by 128 codes, two bytes each if wide.
      self.assertEqual(row["held"]["wide_bytes"], 2 * 5 * (128 + 64) * 128)
      self.assertLess(row["held"]["bytes"], row["held"]["wide_bytes"] / 3)
      self.assertLen(set(row["held"]["digests"].values()), 2)
    self.assertEqual(found["elements"], found["demanded"])
    self.assertEqual(found["demanded"], 2 * 2 * sum(by_step))
    self.assertEqual((found["gemms"], found["demanded_gemms"]), (12, 12))
    self.assertEqual(found["held_bytes"], found["loaded_bytes"])
    self.assertEqual(found["backend_bytes"], 0)

  def test_what_a_backend_packed_for_itself_is_counted_apart(self):
    class Copies(packed_decoders.packed_ops.OracleLayer):

      def hold(self, *tensors):
        return tuple(t + jnp.zeros((), t.dtype) for t in tensors[:3])

    contract = packed_decoders.marlin("native")
    decoder = packed_decoders.decoder(contract, _params(), Copies())
    found = _prove(decoder)
    self.assertEmpty(found["faults"])
    self.assertEqual(
        found["backend_bytes"],
        sum(a.nbytes for p, a in _params().items()
            if p.endswith(packed_decoders.LEAVES)),
    )
    self.assertEqual(
        found["held_bytes"], found["loaded_bytes"] + found["backend_bytes"]
    )

  @parameterized.parameters(
      (_plain, ("layer 1, step 0, prompt long: nothing came from packed",
                "6 GEMMs took .* want 12",
                r"layer 1 holds .*gate_up.*bfloat16\(5, 128, 128\)",
                "the decoder holds")),
      (_Keeps, ("6 GEMMs took .* want 12",
                r"layer 1 holds .*kept.*bfloat16\(5, 128, 64\)",
                "the decoder holds")),
      (_KeepsCodes, ("the decoder holds .* want the",)),
      (_Hides, ("6 GEMMs took .* want 12",)),
  )
  def test_a_layer_that_secretly_runs_wide_is_caught(self, change, patterns):
    honest = trajectory.run(
        _decoder(), packed_decoders.PROMPTS, packed_decoders.STEPS
    )
    decoder = _decoder(change=change)
    secret = trajectory.run(
        decoder, packed_decoders.PROMPTS, packed_decoders.STEPS
    )
    # No result betrays it.
    for a, b in zip(honest, secret, strict=True):
      self.assertEqual(
          [s.state for s in a.steps], [s.state for s in b.steps]
      )
    faults = "\n".join(_prove(decoder)["faults"])
    for pattern in patterns:
      self.assertRegex(faults, pattern)

  def test_too_few_elements_of_one_route_are_caught(self):
    def edit(captures):
      taps = captures[1].steps[2].taps
      taps[_AT] = taps[_AT] - np.int32([[[0, 0], [0, 1]]])

    found = _prove(_decoder(), edit)
    self.assertLen(found["faults"], 1)
    self.assertRegex(
        found["faults"][0], "layer 1, step 2, prompt short: .256, 255. came"
    )
    self.assertEqual(found["elements"], found["demanded"] - 1)

  def test_elements_of_the_wrong_route_do_not_make_up_for_others(self):
    def edit(captures):
      taps = captures[0].steps[1].taps
      taps[_AT] = taps[_AT] + np.int32([[[1, 0], [-1, 0]]])

    found = _prove(_decoder(), edit)
    self.assertEqual(found["elements"], found["demanded"])
    self.assertLen(found["faults"], 1)


class DocumentTest(absltest.TestCase):

  def test_one_fault_of_one_arithmetic_is_enough(self):
    contracts = {
        n: packed_decoders.dequantized(n) for n in ("portable", "native")
    }
    for faults in ([], ["a fault"]):
      document = lib.document(
          {"portable": {"faults": []}, "native": {"faults": faults}},
          contracts, "jax", {"portable": {}, "native": {"x.y": ("1", "2")}},
      )
      self.assertEqual(document["proven"], not faults)
      self.assertEqual(document["faults"], [f"native: {f}" for f in faults])
    self.assertEqual(
        document["clauses"]["native"],
        {"x.y": {"ours": "1", "reference": "2"}},
    )


if __name__ == "__main__":
  absltest.main()
