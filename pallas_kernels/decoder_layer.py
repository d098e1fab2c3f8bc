"""The kernels as the packed layer of a decoder.

`packed_ops.operations(contract, layer=PallasLayer())` are the operations of a
decoder whose packed experts run here. The weights are packed for the kernels
once, when the decoder is built, and stay on the device from step to step.

Layer: pallas_kernels. Protocol: contracts/ops.py, PackedLayer.
"""

import jax
import numpy as np

from moejax.contracts import packed_moe as contracts
from moejax.numerics.packed import alignment
from moejax.numerics.packed import awq_format
from moejax.numerics.packed import oracle
from pallas_kernels import launch
from pallas_kernels import packed_moe
from pallas_kernels import packed_weight


class PallasLayer:
  """`packed_moe.run`, with the weights it has packed.

  Attributes:
    name: "pallas", or "pallas, interpreted".
  """

  def __init__(self, config: launch.LaunchConfig = launch.LaunchConfig()):
    """Checks the device.

    Raises:
      UnsupportedError: it cannot run the kernels.
    """
    launch.check_device(config)
    self.name = "pallas, interpreted" if config.interpret else "pallas"
    self._config = config
    # {(id of the words, dtype): (words, packed)}. The words are kept so that
    # no other array takes their id.
    self._packed: dict[tuple[int, str], tuple] = {}

  def hold(
      self,
      qweight: jax.Array,
      qzeros: jax.Array,
      scales: jax.Array,
      dtype: str,
  ) -> packed_weight.PackedWeight:
    """Packs the weights of all experts; decoders over equal words share them.

    Raises:
      UnsupportedError: the kernels do not reach a weight of this size.
    """
    key = id(qweight), dtype
    if key not in self._packed:
      rows = qweight.shape[1] // qzeros.shape[1]
      made = packed_weight.stack([
          packed_weight.pack(
              awq_format.from_checkpoint(*expert, rows), dtype
          )
          for expert in zip(
              *map(np.asarray, (qweight, qzeros, scales)), strict=True
          )
      ])
      self._packed[key] = qweight, made
    return self._packed[key][1]

  def surfaces(
      self,
      x: np.ndarray,
      gates: np.ndarray,
      w13: packed_weight.PackedWeight,
      w2: packed_weight.PackedWeight,
      blocks: alignment.RouteBlocks,
      contract: contracts.PackedMoeContract,
  ) -> oracle.Surfaces:
    """Runs the kernels; see `packed_moe.run` for what is refused."""
    return packed_moe.run(x, gates, w13, w2, blocks, contract, self._config)
