"""Which thread block computes which K-tiles of which output tile.

Marlin lays the output tiles of all route blocks in one row, n fastest. Whole
waves of them go to the grid directly; the rest is cut into equal stripes of
K-tiles, one stripe a thread block, so a tile may be cut into pieces. The cuts
decide how an element's products are grouped, hence its bits.

    tile    0     1    ...  D-1 |     D     |    D+1    |   ...
    grid    0     1    ...      | 0 0 0 1 1 | 1 2 2 2 3 |   ...
            direct, one piece   | stripes of `stripe` K-tiles

Everything here is integers, and every input is a contract field.

Layer: numerics. Contract: contracts/packed_gemm.py.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
from typing import NamedTuple

from moejax.contracts import packed_gemm


class Piece(NamedTuple):
  """A run of K-tiles of one output tile, computed by one thread block.

  Attributes:
    cta: The thread block.
    k_start: Its first K-tile.
    k_len: Its number of K-tiles.
    pos: Its turn when the pieces are added; 0 is the piece of highest K.
  """

  cta: int
  k_start: int
  k_len: int
  pos: int


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
  """The planned work of one GEMM.

  Attributes:
    num_blocks: Route blocks.
    num_n_tiles: Output tiles of one route block.
    num_k_tiles: K-tiles of one output tile.
    grid: Thread blocks.
    waves: Whole waves of direct tiles.
    num_direct: Tiles before the stripes begin.
    stripe: K-tiles of one thread block's stripe.
    tiles: The pieces of each tile in ascending K; tile = block * num_n_tiles +
      n_tile.
  """

  num_blocks: int
  num_n_tiles: int
  num_k_tiles: int
  grid: int
  waves: int
  num_direct: int
  stripe: int
  tiles: tuple[tuple[Piece, ...], ...]

  def block(self, block: int) -> tuple[tuple[Piece, ...], ...]:
    """Returns the pieces of every n tile of a route block."""
    start = block * self.num_n_tiles
    return self.tiles[start : start + self.num_n_tiles]

  @property
  def num_used_ctas(self) -> int:
    """Thread blocks that take part in the stripes."""
    split = (len(self.tiles) - self.num_direct) * self.num_k_tiles
    return -(-split // self.stripe)


def plan(num_blocks: int, n: int, k: int,
         contract: packed_gemm.PackedGemmContract) -> Plan:
  """Cuts a GEMM into pieces, in closed form.

  With T tiles, G thread blocks, r = T mod G:
    T <= G: no wave; else P2 = r if 3 r > G else r + G tiles are in stripes
    stripe = unit * ceil(ceil(num_k_tiles * P2 / G) / unit)
    unit   = group_size / thread_k, or 1 where a group is the smaller
  A direct tile g runs whole on thread block g mod G. The t-th tile of the
  stripes covers K-tiles [t * num_k_tiles, (t + 1) * num_k_tiles) of their
  row; every multiple of `stripe` inside is a cut.

  Args:
    num_blocks: Active route blocks.
    n: Columns; a multiple of thread_n.
    k: Rows of the weight; a multiple of thread_k and group_size.
    contract: thread_k, thread_n, grid, group_size.

  Raises:
    ValueError: a size is not positive or does not divide.

  Source: specification of the packed-AWQ MoE, section 4.2.
  """
  if num_blocks < 0 or n < 1 or k < 1:
    raise ValueError(f"no GEMM has {num_blocks=}, {n=}, {k=}.")
  for size, name, divisor in (
      (n, "n", "thread_n"), (k, "k", "thread_k"), (k, "k", "group_size"),
  ):
    if size % getattr(contract, divisor):
      raise ValueError(
          f"{name}={size} is not a multiple of"
          f" {divisor}={getattr(contract, divisor)}."
      )
  num_k_tiles, num_n_tiles = k // contract.thread_k, n // contract.thread_n
  total, grid = num_blocks * num_n_tiles, contract.grid
  split = total
  if total > grid:
    rest = total % grid
    split = rest if 3 * rest > grid else rest + grid
  unit = max(contract.group_size // contract.thread_k, 1)
  share = -(-num_k_tiles * split // grid)  # Rounded up, as the next line.
  stripe = unit * -(-share // unit)
  direct = total - split
  tiles = [(Piece(tile % grid, 0, num_k_tiles, 0),) for tile in range(direct)]
  for begin in range(0, split * num_k_tiles, num_k_tiles):
    end = begin + num_k_tiles
    inner = range((begin // stripe + 1) * stripe, end, stripe)
    cuts = [begin, *inner, end]
    tiles.append(tuple(
        Piece(a // stripe, a - begin, b - a, len(cuts) - 2 - j)
        for j, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False))
    ))
  return Plan(num_blocks, num_n_tiles, num_k_tiles, grid, direct // grid,
              direct, max(stripe, 1), tuple(tiles))


def digest(tiles: Sequence[Sequence[Piece]]) -> str:
  """Returns the first 16 hex digits of the SHA-256 of the pieces.

  One line a tile, "g:cta,k_start,k_len,pos;...", joined by newlines.
  """
  lines = (
      f"{g}:" + ";".join(",".join(map(str, piece)) for piece in pieces)
      for g, pieces in enumerate(tiles)
  )
  return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def cuts(pieces: Sequence[Piece]) -> tuple[tuple[int, int], ...]:
  """Returns (k_start, k_len) of the pieces: what of them decides bits."""
  return tuple((piece.k_start, piece.k_len) for piece in pieces)


def schedule_classes(found: Plan) -> tuple[int, ...]:
  """Returns each route block's class; blocks of a class have the same cuts.

  Classes are numbered as they first occur. A route has the same bits in any
  block of a class.
  """
  numbers = {}
  return tuple(
      numbers.setdefault(tuple(map(cuts, found.block(b))), len(numbers))
      for b in range(found.num_blocks)
  )


def moved_n_tiles(found: Plan, block: int, other: int) -> tuple[int, ...]:
  """Returns the n tiles in which a route moved between two blocks may change.

  Raises:
    ValueError: a block is not one of the plan.
  """
  for b in (block, other):
    if not 0 <= b < found.num_blocks:
      raise ValueError(f"block {b} is not one of {found.num_blocks}.")
  pairs = zip(found.block(block), found.block(other), strict=True)
  return tuple(
      n for n, (a, b) in enumerate(pairs) if cuts(a) != cuts(b)
  )
