"""Which tiles and which grid Marlin takes when nobody names them.

The grid is a contract field, since it decides bits, and the kernel's automatic
choice of it depends on the device and, through the number of registers that the
compiler gave each kernel, on the compiler: 127 registers allow four thread
blocks where 128 allow three. So register counts are declared here and never
derived, and what `select` returns is a prediction of a schedule; a contract and
its planner take (thread_k, thread_n, grid) as they are. All is integers and
runs on any machine:

  >>> from moejax.numerics.packed import selector
  >>> problem = selector.Problem(
  ...     tokens=21, top_k=8, block_rows=8, n=1536, k=2048, group_size=128)
  >>> selector.select(problem, selector.H200, selector.SM_90_ROWS_8)
  Schedule(thread_k=128, thread_n=64, threads=128, blocks_per_sm=4, grid=528)

`candidates` shows what the choice was made from.

Layer: numerics.
"""

import dataclasses
from typing import NamedTuple

from moejax.contracts import document
from moejax.contracts import refusal

_STAGES = 4  # Of the kernel's pipeline.
_REGISTER_BYTES = 255 * 1024  # Of a multiprocessor, as the kernel counts them.
_RESERVED = 512  # Bytes of shared memory that a configuration must leave.
_BLOCK_OVERHEAD = 1536  # Bytes of shared memory that a thread block adds.
_BLOCK_ROWS = (8, 16, 32, 48, 64)


class Tiles(NamedTuple):
  """A compiled configuration: K rows and columns of a tile, and threads."""

  thread_k: int
  thread_n: int
  threads: int


_FEW_ROWS = (Tiles(128, 128, 256), Tiles(64, 128, 128), Tiles(128, 64, 128))
_MANY_ROWS = (Tiles(64, 256, 256), Tiles(64, 128, 128), Tiles(128, 64, 128))


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
  """One GEMM of an expert layer.

  Attributes:
    tokens: M.
    top_k: Experts of a token, for W2 as well: the nominal routes of both GEMMs
      are tokens * top_k.
    block_rows: Rows of a route block: 8, 16, 32, 48 or 64.
    n: Columns.
    k: Rows of the weight.
    group_size: K rows that share a scale; -1 means all.
  """

  tokens: int
  top_k: int
  block_rows: int
  n: int
  k: int
  group_size: int

  def __post_init__(self):
    document.check_types(self)
    document.check_choice(
        "Problem", "block_rows", self.block_rows, _BLOCK_ROWS
    )
    sizes = (self.tokens, self.top_k, self.n, self.k)
    if min(sizes) < 1 or (self.group_size < 1 and self.group_size != -1):
      raise ValueError(f"{self} is no GEMM.")


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceLimits:
  """What the choice depends on in a device.

  Attributes:
    name: A label for people.
    num_sms: Multiprocessors.
    shared_memory: Bytes of shared memory that a thread block may opt in to.
  """

  name: str
  num_sms: int
  shared_memory: int

  def __post_init__(self):
    document.check_types(self)
    if min(self.num_sms, self.shared_memory) < 1:
      raise ValueError(f"{self} is no device.")


RTX_3090 = DeviceLimits("RTX 3090", 82, 101376)
H200 = DeviceLimits("H200", 132, 232448)


@dataclasses.dataclass(frozen=True, slots=True)
class RegisterCounts:
  """How many registers a thread of each compiled configuration has.

  A declaration: of one compiler, one target and the kernels for one number of
  rows and one group size. Other kernels have other counts.

  `SM_80_ROWS_8` and `SM_90_ROWS_8` are the compile-only counts of the
  specification of the packed-AWQ MoE, section 4.1: CUDA 13.0.88, uint4 with
  zero points, float16, 8 rows, groups of 128; machine code for 8.0 and, made
  from the same 8.0 PTX, for 9.0. The driver's own compiler may differ. Counts
  of kernels for more rows were not written down there, only what is chosen.

  Attributes:
    name: A label for people.
    block_rows: Rows of a route block.
    group_size: K rows that share a scale; -1 means all.
    counts: (configuration, registers of a thread), one for each candidate.
  """

  name: str
  block_rows: int
  group_size: int
  counts: tuple[tuple[Tiles, int], ...]

  def __post_init__(self):
    document.check_types(self)
    document.check_choice(
        "RegisterCounts", "block_rows", self.block_rows, _BLOCK_ROWS
    )
    named = [tiles for tiles, _ in self.counts]
    wanted = configurations(self.block_rows)
    if sorted(named) != sorted(wanted):
      raise ValueError(
          f"RegisterCounts: counts are of {sorted(named)}, the kernels for"
          f" {self.block_rows} rows are {sorted(wanted)}."
      )
    for tiles, count in self.counts:
      if type(count) is not int or not 1 <= count <= 255:
        raise ValueError(
            f"RegisterCounts: {count!r} of {tiles} is not in 1..255."
        )


class Candidate(NamedTuple):
  """A configuration that was looked at.

  Attributes:
    tiles: The configuration.
    shared_memory: Bytes that a thread block needs.
    blocks_per_sm: Thread blocks of a multiprocessor; 0 where the configuration
      does not fit the problem or the device.
  """

  tiles: Tiles
  shared_memory: int
  blocks_per_sm: int


class Schedule(NamedTuple):
  """The chosen configuration; grid = blocks_per_sm * num_sms."""

  thread_k: int
  thread_n: int
  threads: int
  blocks_per_sm: int
  grid: int


def configurations(block_rows: int) -> tuple[Tiles, ...]:
  """Returns the compiled configurations for a block, by priority."""
  return _FEW_ROWS if block_rows <= 16 else _MANY_ROWS


def shared_memory(tiles: Tiles, block_rows: int, group_size: int) -> int:
  """Returns the bytes of shared memory that a thread block needs.

    rows   = 16 * ceil(block_rows / 16)
    sets   = ceil(thread_k / group_size), or 1 for one group
    x      = 4 rows thread_k * 2            four stages of activations
    codes  = 4 thread_k thread_n / 2
    sums   = rows (thread_n + 8) * 2        the reduction between warps
    scales = 4 sets thread_n * 2,  zeros = scales / 4
    max(codes, sums, min(codes, sums) + 2 thread_n) + x + scales + zeros
      + 16 rows

  Source: specification of the packed-AWQ MoE, section 4.1.
  """
  rows = 16 * -(-block_rows // 16)
  sets = 1 if group_size == -1 else -(-tiles.thread_k // group_size)
  x = _STAGES * rows * tiles.thread_k * 2
  codes = _STAGES * tiles.thread_k * tiles.thread_n // 2
  sums = rows * (tiles.thread_n + 8) * 2
  scales = _STAGES * sets * tiles.thread_n * 2
  bias = 2 * tiles.thread_n
  return (
      max(codes, sums, min(codes, sums) + bias) + x + scales + scales // 4
      + 16 * rows
  )


def candidates(
    problem: Problem, device: DeviceLimits, registers: RegisterCounts
) -> tuple[Candidate, ...]:
  """Returns every configuration with the thread blocks it would get.

  A configuration fits if its tile divides the weight and its shared memory is
  at most the device's less 512. A multiprocessor then takes

    min(floor(255 * 1024 / (4 registers threads)),
        floor(device / (shared memory + 1536)))

  thread blocks, at least 1 and at most 4, or 2 from 32 rows on. If all
  multiprocessors together had more of them than 4 tokens top_k n / thread_n,
  each takes that number over num_sms, rounded down, at least 1.

  Args:
    problem: The GEMM.
    device: Where it runs.
    registers: Of the kernels that the compiler made; must be those for the
      problem's block_rows and group_size.

  Raises:
    ValueError: the counts are of other kernels.

  Source: specification of the packed-AWQ MoE, section 4.1.
  """
  for field in ("block_rows", "group_size"):
    ours, theirs = getattr(problem, field), getattr(registers, field)
    if ours != theirs:
      raise ValueError(
          f"the register counts {registers.name!r} are of {field}={theirs},"
          f" the problem has {field}={ours}; declare those of its kernels."
      )
  counts = dict(registers.counts)
  return tuple(
      _candidate(problem, device, tiles, counts[tiles])
      for tiles in configurations(problem.block_rows)
  )


def select(
    problem: Problem, device: DeviceLimits, registers: RegisterCounts
) -> Schedule:
  """Returns the schedule that the kernel chooses by itself.

  The first candidate with the most thread blocks of a multiprocessor.

  Raises:
    ValueError: the register counts are of other kernels.
    UnsupportedError: no configuration fits.
  """
  found = candidates(problem, device, registers)
  best = max(found, key=lambda c: c.blocks_per_sm)  # The first of equals.
  if not best.blocks_per_sm:
    needs = ", ".join(f"{tuple(c.tiles)}: {c.shared_memory}" for c in found)
    raise refusal.UnsupportedError(
        f"no configuration fits n={problem.n}, k={problem.k} and"
        f" {device.shared_memory - _RESERVED} usable bytes of shared memory"
        f" ({needs})."
    )
  per_sm = best.blocks_per_sm
  return Schedule(*best.tiles, per_sm, per_sm * device.num_sms)


def _candidate(problem, device, tiles: Tiles, registers: int) -> Candidate:
  size = shared_memory(tiles, problem.block_rows, problem.group_size)
  if (
      problem.k % tiles.thread_k
      or problem.n % tiles.thread_n
      or size > device.shared_memory - _RESERVED
  ):
    return Candidate(tiles, size, 0)
  by_registers = _REGISTER_BYTES // (4 * registers * tiles.threads)
  by_memory = device.shared_memory // (size + _BLOCK_OVERHEAD)
  most = 4 if problem.block_rows <= 16 else 2
  per_sm = min(max(min(by_registers, by_memory), 1), most)
  work = 4 * problem.tokens * problem.top_k * (problem.n // tiles.thread_n)
  if work < device.num_sms * per_sm:
    per_sm = max(work // device.num_sms, 1)
  return Candidate(tiles, size, per_sm)


def _rows_8(name: str, *registers: int) -> RegisterCounts:
  counts = tuple(zip(_FEW_ROWS, registers, strict=True))
  return RegisterCounts(name, 8, 128, counts)


SM_80_ROWS_8 = _rows_8("sm_80, CUDA 13.0.88, 8 rows, float16", 122, 127, 127)
SM_90_ROWS_8 = _rows_8(
    "sm_90 from compute_80, CUDA 13.0.88, 8 rows, float16", 128, 128, 127
)
