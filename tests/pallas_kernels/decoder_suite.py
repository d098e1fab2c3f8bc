"""What the kernels owe a decoder: the bits of the oracle, in every tap.

One suite, two machines, as in `packed_moe_suite.py`: in the interpreter the
tensor core's step is computed exactly, on a GPU it is the tensor core's. XLA on
a CPU flushes subnormals; no operand of these steps is one.
"""

from absl.testing import parameterized
import jax
import numpy as np

from moejax.protocols import compare
from moejax.protocols.packed import clause
from moejax.protocols import trajectory
from pallas_kernels import decoder_layer
from pallas_kernels import launch
from tests.modules import packed_decoders


class DecoderSuite(parameterized.TestCase):
  """Subclasses say where it runs. Not collected itself."""

  interpret: bool
  arithmetic: str  # Of what is not packed; both decoders have it.
  device: jax.Device | None = None

  def layer(self):
    config = launch.LaunchConfig(interpret=self.interpret)
    return decoder_layer.PallasLayer(config)

  def test_every_tap_of_prefill_and_decode_has_the_oracles_bits(self):
    contract = packed_decoders.marlin(self.arithmetic)
    with jax.default_device(self.device):
      held = packed_decoders.params()
      runs = [
          trajectory.run(
              packed_decoders.decoder(contract, held, *layer),
              packed_decoders.PROMPTS, packed_decoders.STEPS,
          )
          for layer in ((self.layer(),), ())
      ]
    found = compare.compare(*runs)
    self.assertIsNone(found.first)
    self.assertEmpty(found.missing)
    self.assertEqual(set(found.levels().values()), {"same_bits"})
    self.assert_normal(runs[1])
    work = clause.work(runs[1], packed_decoders.CONFIG)
    for site in ("w13", "w2"):
      _, cut, _ = work.pieces(site, getattr(contract.experts, site))
      self.assertEqual(cut > 0, site == "w13", site)  # W2 has one K-tile.

  def assert_normal(self, captures):
    """The interpreter can express these steps: nothing in them is subnormal.

    And something is compared: the experts' outputs differ from zero.
    """
    for one in captures:
      for step in one.steps:
        for layer in packed_decoders.CONFIG.sparse_layers:
          at = f"layers.{layer}."
          for tap in ("mlp_norm.output", "moe.experts.gate_up",
                      "moe.experts.activation", "moe.experts.terms"):
            size = np.abs(step.taps[at + tap].astype(np.float64))
            self.assertFalse(((size > 0) & (size < 2.0**-126)).any(), tap)
            self.assertGreater(size.max(), 2.0**-10, tap)

  def test_weights_are_packed_once_and_shared(self):
    contract = packed_decoders.marlin("portable")
    layer = self.layer()
    with jax.default_device(self.device):
      held = packed_decoders.params()
      first, second = (
          packed_decoders.decoder(contract, held, layer) for _ in range(2)
      )
    mine, theirs, other = (
        jax.tree.leaves(decoder.layers[index].moe.experts.operands.get_value())
        for decoder, index in ((first, 1), (second, 1), (first, 0))
    )
    for a, b, c in zip(mine, theirs, other, strict=True):
      self.assertIs(a, b)
      self.assertIsNot(a, c)
