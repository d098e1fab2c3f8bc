"""How a kernel is launched: what must not change bits, and where it may run.

Everything here is about speed or about the machine. What decides bits is a
contract (`moejax/contracts`). The kernels go through Pallas' Triton lowering,
which does not contract a * b + c; the lowering is always named, because the
default of `pallas_call` differs between versions of JAX.

Layer: pallas_kernels.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from moejax.contracts import refusal


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchConfig:
  """Choices of a launch of the packed GEMM that leave every bit as it is.

  Attributes:
    num_warps: Warps of a program.
    num_stages: Depth of the software pipeline.
    tile_n: Columns of a program; a power of two that divides thread_n.
    interpret: Runs the kernel in the interpreter of JAX, with the tensor
      core's step and the fused multiply-add computed exactly (`steps.py`).
  """

  num_warps: int = 2
  num_stages: int = 1
  tile_n: int = 64
  interpret: bool = False

  def __post_init__(self):
    for field in ("num_warps", "num_stages", "tile_n"):
      value = getattr(self, field)
      if value < 1 or value & (value - 1) and field != "num_stages":
        raise ValueError(f"LaunchConfig: {field}={value} is no power of two.")


def call(
    kernel: Callable,
    *operands: jax.Array,
    grid: tuple[int, ...],
    out: jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...],
    config: LaunchConfig,
    memory: dict[int, int] | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
  """Runs a kernel over whole arrays; each program indexes what it needs.

  `memory` gives operands whose memory becomes that of an output, by number:
  what no program writes keeps what the operand held.
  """
  whole = pl.BlockSpec(memory_space=pl.ANY)
  return pl.pallas_call(
      kernel,
      grid=grid,
      in_specs=[whole] * len(operands),
      out_specs=tuple(whole for _ in out) if isinstance(out, tuple) else whole,
      out_shape=out,
      input_output_aliases=memory or {},
      compiler_params=pltriton.CompilerParams(
          num_warps=config.num_warps, num_stages=config.num_stages
      ),
      interpret=config.interpret,
  )(*operands)


def check_device(
    config: LaunchConfig, capabilities: Sequence[str] = ()
) -> None:
  """Checks that the default device can run the kernels.

  Args:
    config: An interpreted launch needs no device.
    capabilities: Compute capabilities whose tensor core a contract names;
      empty for a kernel without tensor cores.

  Raises:
    UnsupportedError: there is no GPU, or it is of another capability.
  """
  if config.interpret:
    return
  device = jax.devices()[0]
  found = getattr(device, "compute_capability", None)
  if device.platform not in ("gpu", "cuda") or found is None:
    raise refusal.UnsupportedError(
        f"the kernels need a CUDA device, JAX has {device.device_kind!r};"
        " LaunchConfig(interpret=True) runs them without one."
    )
  if capabilities and found not in capabilities:
    raise refusal.UnsupportedError(
        f"{device.device_kind} has compute capability {found}; the contract's"
        f" tensor core step was measured on {', '.join(capabilities)} alone."
    )


def check_size(name: str, shape: Sequence[int]) -> None:
  """Checks that 32-bit offsets reach every element of an array.

  Raises:
    UnsupportedError: they do not.
  """
  size = 1
  for length in shape:
    size *= length
  if size >= 1 << 31:
    raise refusal.UnsupportedError(
        f"{name} {tuple(shape)} has {size} elements; the kernels reach fewer"
        f" than {1 << 31}."
    )


def padded(length: int, least: int = 1) -> int:
  """Returns the least of least, 4 least, 16 least, ... that holds `length`.

  Arrays padded so take few shapes, so few programs are compiled.
  """
  while least < length:
    least *= 4
  return least
