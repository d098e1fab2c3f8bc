"""Who measures: the Pallas kernels, the oracle, and vLLM's kernels.

Layer: experiments.
"""

from collections.abc import Callable
from collections.abc import Sequence
import hashlib
import time

import jax
import numpy as np

from experiments.support import environment
from experiments.support import study_backends
from moejax.contracts import packed_moe as packed_moe_contract
from moejax.contracts import refusal
from moejax.numerics.packed import awq_format
from moejax.numerics.packed import oracle
from moejax.protocols.performance import protocol as protocol_lib
from moejax.protocols.performance import run
from pallas_kernels import half_words
from pallas_kernels import launch
from pallas_kernels import packed_moe
from pallas_kernels import packed_weight


def maker(
    protocol: protocol_lib.Protocol,
    moe_extension: str = "",
    ops_extension: str = "",
) -> run.Maker:
  """Returns the backends that this machine has for the arms of a protocol.

  Args:
    protocol: Whose arms.
    moe_extension: vLLM's `_moe_C_stable_libtorch.abi3.so`, or "".
    ops_extension: vLLM's `_C_stable_libtorch.abi3.so`, or "".

  Raises:
    HarnessError: one extension is given without the other, or cannot be loaded.
  """
  extensions = (moe_extension, ops_extension)
  if any(extensions) != all(extensions):
    raise refusal.HarnessError(
        "--moe_extension and --ops_extension belong together."
    )

  def vllm():
    if not any(extensions):
      raise refusal.UnsupportedError(
          "vLLM's kernels need --moe_extension and --ops_extension."
      )
    # Here, because a machine without torch can measure the other arms.
    from torch_bridge import vllm_marlin  # pylint: disable=g-import-not-at-top
    from torch_bridge.performance import vllm_arms  # pylint: disable=g-import-not-at-top

    return vllm_arms.VllmArms(vllm_marlin.Kernels(*extensions, fill=False))

  def pallas():
    return PallasArms(launch.LaunchConfig(interpret=protocol.interpret))

  backends, refused = [], {}
  for family, make in (
      ("vllm_", vllm), ("pallas_", pallas), ("oracle_", OracleArm)
  ):
    arms = [arm for arm in protocol.arms if arm.startswith(family)]
    if arms:
      try:
        backends.append(make())
        refused |= backends[-1].refused
      except refusal.UnsupportedError as error:
        refused |= dict.fromkeys(arms, str(error))
  return run.Maker(
      backends=backends,
      refused=refused,
      source=environment.source,
      binary=study_backends.binary_identity(
          "packed_performance", ("numpy", "ml_dtypes", "jaxlib"), ("torch",),
          extensions, jax.devices()[0].device_kind,
      ),
      environment=environment.describe(),
  )


class PallasArms:
  """The arms "pallas_..." of `performance.protocol.ARMS`."""

  arms = ("pallas_layer", "pallas_w13")
  refused: dict[str, str] = {}

  def __init__(self, config: launch.LaunchConfig):
    """Checks the device.

    Raises:
      UnsupportedError: it cannot run the kernels.
    """
    launch.check_device(config)
    self._config = config
    self._w13 = self._w2 = None

  def load(
      self,
      w13: Sequence[awq_format.PackedOperand],
      w2: Sequence[awq_format.PackedOperand],
      dtype: str,
  ) -> None:
    """Takes a layer to the device."""
    self._w13, self._w2 = (
        packed_weight.from_operands(part, dtype) for part in (w13, w2)
    )

  def prepare(self, arm: str, work: run.Work) -> run.Prepared:
    """Compiles the calls of all requests and runs them once.

    Raises:
      UnsupportedError: the kernels do not run the contract here.
    """
    contract, config = work.contract, self._config
    placed = [
        packed_moe.place(
            i.x, i.gates, self._w13, self._w2, blocks, contract, config
        )
        for i, blocks in zip(work.inputs, work.plans, strict=True)
    ]
    program = jitted(arm, contract, config)
    w13, w2 = self._w13, self._w2

    def dispatch():
      return jax.block_until_ready([program(p, w13, w2) for p in placed])

    taken = hashlib.sha256()
    for inputs, words in zip(work.inputs, dispatch(), strict=True):
      tokens, top_k = inputs.gates.shape
      rows = tokens if arm == "pallas_layer" else tokens * top_k
      found = half_words.from_words(words[:rows], contract.dtype)
      taken.update(np.asarray(found).tobytes())
    return run.Prepared(_by_host_clock(dispatch), taken.hexdigest())


def jitted(
    arm: str,
    contract: packed_moe_contract.PackedMoeContract,
    config: launch.LaunchConfig,
) -> Callable:
  """Returns what an arm dispatches: (placed, w13, w2) to words.

  Contract and launch are closed over, so that a call does not hash them.
  """

  def layer(placed, w13, w2):
    return packed_moe.surface_words(
        placed, w13, w2, contract=contract, config=config
    )[3]

  def first(placed, w13, w2):
    del w2
    return packed_moe.gemm_words(
        placed.x, w13, placed.work13, None, contract.w13, config
    )

  return jax.jit({"pallas_layer": layer, "pallas_w13": first}[arm])


class OracleArm:
  """The arm "oracle_layer"."""

  arms = ("oracle_layer",)
  refused: dict[str, str] = {}

  def __init__(self):
    """Holds no layer yet."""
    self._layer = None

  def load(self, w13: Sequence, w2: Sequence, dtype: str) -> None:
    """Keeps a layer."""
    del dtype
    self._layer = (w13, w2)

  def prepare(self, arm: str, work: run.Work) -> run.Prepared:
    """Runs all requests once."""
    del arm
    layer = self._layer

    def compute():
      return [
          oracle.packed_moe_oracle(i.x, i.gates, *layer, blocks, work.contract)
          for i, blocks in zip(work.inputs, work.plans, strict=True)
      ]

    taken = hashlib.sha256()
    for surfaces in compute():
      taken.update(np.ascontiguousarray(surfaces.final).tobytes())
    return run.Prepared(_by_host_clock(compute), taken.hexdigest())


def _by_host_clock(work: Callable[[], object]) -> Callable[[], int]:
  def sample() -> int:
    start = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - start

  return sample
