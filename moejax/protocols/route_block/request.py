"""What a route-block study is asked for, and the order of its cells.

A study asks whether the block in which a route lies decides bits. It runs seven
arms on two histories, that is, on two legal alignments of the same routes; a
cell is one arm on one history, once. Nothing is drawn while it runs: the cells,
their order and their treatments are functions of the request.

Layer: protocols.
"""

import dataclasses
from typing import NamedTuple

from moejax.contracts import document
from moejax.contracts import packed_moe
from moejax.contracts import refusal
from moejax.protocols import packed_fixture

HISTORIES = ("H0", "H1")
ARMS = (
    "native",
    "own_plan",
    "other_plan",
    "swap_inside",
    "exchange_across",
    "other_grid",
    "stable",
)
BACKENDS = ("oracle", "pallas", "vllm")


class Cell(NamedTuple):
  """One arm on one history, once.

  Attributes:
    ordinal: Its place in the order of execution.
    arm: One of ARMS.
    history: One of HISTORIES.
    replicate: From 0.
  """

  ordinal: int
  arm: str
  history: str
  replicate: int

  @property
  def name(self) -> str:
    """The cell's id, which is also the name of its file."""
    return f"{self.ordinal:03d}_{self.arm}_{self.history}_{self.replicate}"


@dataclasses.dataclass(frozen=True, slots=True)
class StudyRequest:
  """A study; everything in it is a function of these values.

  Attributes:
    seed: Of weights, activations, routes and histories.
    shape: Sizes of the layer.
    tokens: M.
    top_k: Experts of a token.
    block_rows: Rows of a route block.
    split_expert: The expert whose two blocks are studied.
    first_block: The global ordinal of its first block.
    num_blocks: Active blocks.
    other_experts: Experts before it that have two blocks as well.
    low_blocks: Those lie among the first `low_blocks` ordinals, where every
      tile is direct, so that moves between them change no bits.
    moved_pairs: Pairs of routes that the histories exchange between two blocks
      of an expert; one pair belongs to `split_expert`.
    dtype: Of the layer.
    thread_k: K rows of a tile.
    thread_n: Columns of a tile.
    grid: Thread blocks; cuts the studied blocks differently.
    other_grid: Thread blocks that cut both blocks alike in W13.
    replicates: Cells of an arm and history.
  """

  seed: int = 20260722
  shape: packed_fixture.LayerShape = packed_fixture.LayerShape()
  tokens: int = 21
  top_k: int = 8
  block_rows: int = 8
  split_expert: int = 106
  first_block: int = 40
  num_blocks: int = 50
  other_experts: int = 4
  low_blocks: int = 22
  moved_pairs: int = 10
  dtype: str = "float16"
  thread_k: int = 64
  thread_n: int = 128
  grid: int = 246
  other_grid: int = 200
  replicates: int = 5

  def __post_init__(self):
    try:
      document.check_types(self)
      if not isinstance(self.shape, packed_fixture.LayerShape):
        raise ValueError(f"shape={self.shape!r} is no LayerShape.")
      document.check_types(self.shape)
      for grid in (self.grid, self.other_grid):
        self.contract(grid)
    except (ValueError, KeyError) as error:
      raise refusal.HarnessError(f"no study: {error}") from error
    sizes = {
        name: value
        for name, value in (
            document.to_dict(self) | document.to_dict(self.shape)
        ).items()
        if isinstance(value, int) and name != "seed"
    }
    zero_is_legal = ("split_expert", "first_block", "other_experts",
                     "low_blocks")
    for name, value in sizes.items():
      if value < (0 if name in zero_is_legal else 1):
        raise refusal.HarnessError(f"no study has {name}={value}.")
    if self.seed < 0:
      raise refusal.HarnessError(f"seed={self.seed} is negative.")

  def contract(self, grid: int) -> packed_moe.PackedMoeContract:
    """Returns the layer's contract for a grid."""
    return packed_moe.marlin(
        dtype=self.dtype, thread_k=self.thread_k, thread_n=self.thread_n,
        grid=grid, group_size=self.shape.group_size,
    )

  def cells(self) -> tuple[Cell, ...]:
    """Returns the cells in their order: replicate by replicate.

    Odd replicates take the histories the other way round, so that neither
    always goes first.
    """
    order = [
        (arm, history, replicate)
        for replicate in range(self.replicates)
        for arm in ARMS
        for history in HISTORIES[:: -1 if replicate % 2 else 1]
    ]
    return tuple(Cell(i, *values) for i, values in enumerate(order))
