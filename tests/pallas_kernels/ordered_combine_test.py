"""The combine kernel in the interpreter, and its refusals.

Proven here: indexing, orders and every rounding on normal numbers, infinities
and NaN. Subnormals and the device's fused multiply-add are proven on the device
(`ordered_combine_device_test.py`). Needs no accelerator.
"""

from absl.testing import absltest
import jax
import jax.numpy as jnp

from moejax.contracts import named_combines
from moejax.contracts import refusal
from pallas_kernels import launch
from pallas_kernels import ordered_combine as lib
from tests.pallas_kernels import ordered_combine_suite as suite


class InterpreterTest(suite.OrderedCombineSuite):
  interpret = True
  device = jax.devices("cpu")[0]


class RefusalTest(absltest.TestCase):

  def _run(self, out=(2, 4, 8), gate=(2, 4), shared=None, interpret=True):
    lib.ordered_combine(
        jnp.zeros(out, jnp.float32), jnp.zeros(gate, jnp.float32),
        jnp.zeros(gate, jnp.int32), named_combines.named("P32"),
        shared=None if shared is None else jnp.zeros(shared, jnp.float32),
        config=launch.LaunchConfig(interpret=interpret),
    )

  def test_shapes_that_do_not_fit(self):
    with self.assertRaisesRegex(ValueError, r"gate \(2, 3\)"):
      self._run(gate=(2, 3))
    with self.assertRaisesRegex(ValueError, r"shared \(2, 9\)"):
      self._run(shared=(2, 9))

  def test_no_device(self):
    if jax.default_backend() != "cpu":
      self.skipTest("There is a device.")
    with self.assertRaisesRegex(refusal.UnsupportedError, "CUDA device"):
      self._run(interpret=False)


if __name__ == "__main__":
  absltest.main()
