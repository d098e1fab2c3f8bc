"""The Pallas kernels as a backend of the comparison of packed layers.

Layer: experiments.
"""

from collections.abc import Sequence

import numpy as np

from moejax.contracts import packed_moe as contracts
from moejax.numerics.packed import alignment
from moejax.numerics.packed import awq_format
from moejax.numerics.packed import oracle
from moejax.protocols import packed_fixture
from pallas_kernels import launch
from pallas_kernels import packed_moe
from pallas_kernels import packed_weight


class Pallas:
  """`pallas_kernels.packed_moe` in the form of `torch_bridge.awq_bits`."""

  name = "pallas"
  align = None

  def __init__(self, config: launch.LaunchConfig = launch.LaunchConfig()):
    """Checks the device.

    Raises:
      UnsupportedError: it cannot run the kernels.
    """
    launch.check_device(config)
    self._config = config
    self._w13 = self._w2 = None

  @staticmethod
  def prepare(operand: awq_format.PackedOperand, dtype: str):
    """Packs one expert's weight."""
    return packed_weight.pack(operand, dtype)

  def load(self, w13: Sequence, w2: Sequence, dtype: str) -> None:
    """Takes a layer to the device."""
    del dtype
    self._w13, self._w2 = map(packed_weight.stack, (w13, w2))

  def surfaces(
      self,
      inputs: packed_fixture.Request,
      blocks: alignment.RouteBlocks,
      contract: contracts.PackedMoeContract,
  ) -> oracle.Surfaces:
    """Runs the loaded layer and returns host arrays."""
    found = packed_moe.run(
        inputs.x, inputs.gates, self._w13, self._w2, blocks, contract,
        self._config,
    )
    return oracle.Surfaces(*map(np.asarray, found))
