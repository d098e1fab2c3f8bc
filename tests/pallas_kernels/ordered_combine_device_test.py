"""The combine kernel on a GPU: every contract, every special value."""

from absl.testing import absltest
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.contracts import named_combines
from moejax.numerics import ordered_combine as definition
from pallas_kernels import ordered_combine as lib
from tests import bits
from tests.pallas_kernels import ordered_combine_suite as suite

pytestmark = pytest.mark.accelerator


class DeviceTest(suite.OrderedCombineSuite):
  interpret = False

  def test_full_width(self):
    rng = np.random.default_rng(0)
    out = rng.standard_normal((64, 8, 2048)).astype("bfloat16")
    gate = rng.random((64, 8), np.float32)
    ids = np.argsort(rng.random((64, 128)), -1)[:, :8].astype(np.int32)
    for name in named_combines.NAMES:
      contract = named_combines.named(name)
      with self.subTest(name):
        bits.assert_same_bits(
            lib.ordered_combine(
                *map(jnp.asarray, (out, gate, ids)), contract
            ),
            definition.ordered_combine_oracle(out, gate, ids, contract),
        )


if __name__ == "__main__":
  absltest.main()
