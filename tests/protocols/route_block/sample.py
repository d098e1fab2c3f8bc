"""A small study with the structure of the published one, made in seconds."""

import functools
import pathlib
import tempfile

import numpy as np

from moejax.numerics.packed import oracle
from moejax.protocols import packed_fixture
from moejax.protocols.route_block import identity
from moejax.protocols.route_block import request as request_lib
from moejax.protocols.route_block import study

# 28 direct tiles of 4 a block, so expert 6 owns the last direct block and the
# first split one. With this seed the histories differ on all four surfaces,
# and the stable plan differs from both.
REQUEST = request_lib.StudyRequest(
    seed=110,
    shape=packed_fixture.LayerShape(
        experts=12, embed=512, hidden=128, group_size=64
    ),
    tokens=9,
    top_k=4,
    block_rows=4,
    split_expert=6,
    first_block=6,
    num_blocks=11,
    other_experts=2,
    low_blocks=5,
    moved_pairs=3,
    thread_k=64,
    thread_n=64,
    grid=14,
    other_grid=22,
    replicates=2,
)
SOURCE = "5" * 64


@functools.cache
def _surfaces(request, rows: bytes, grid: int):
  """The oracle, once for each plan and grid: tests ask for them often."""
  del rows
  return oracle.packed_moe_oracle(
      _now["inputs"].x, _now["inputs"].gates,
      *packed_fixture.layer(request.seed, request.shape, request.dtype),
      _now["blocks"], request.contract(grid),
  )


_now = {}


def compute(request, inputs, jobs):
  """The oracle as a backend of studies."""
  for job in jobs:
    _now.update(inputs=inputs, blocks=job.blocks)
    yield _surfaces(request, job.blocks.sorted_routes.tobytes(), job.grid)


def lying(cells, change):
  """The oracle, but for the cells of which `cells(cell)` holds.

  Args:
    cells: Predicate on a cell.
    change: (surfaces, {(arm, history): surfaces so far}) to what is claimed.
  """

  def compute_and_lie(request, inputs, jobs):
    seen = {}
    found = compute(request, inputs, jobs)
    for cell, surfaces in zip(request.cells(), found, strict=True):
      seen.setdefault((cell.arm, cell.history), surfaces)
      yield change(surfaces, seen) if cells(cell) else surfaces

  return compute_and_lie


def turned(surfaces, name, row=0, column=0):
  """The surfaces with the last bit of one element turned over."""
  array = getattr(surfaces, name).copy()
  array.view(np.uint16)[row, column] ^= 1
  return surfaces._replace(**{name: array})


def maker(how=compute, source=lambda: SOURCE) -> study.Maker:
  """Who makes the study."""
  binary = identity.binary("oracle", {"numpy": "0"}, {"numpy": "7" * 64}, "cpu")
  return study.Maker("oracle", how, binary, source, {"commit": None})


def make(out: pathlib.Path, request=REQUEST, how=compute) -> pathlib.Path:
  """Makes a study in a folder."""
  study.run(request, maker(how), out)
  return out


def folder(test) -> pathlib.Path:
  """An empty folder that is gone when the test ends."""
  return pathlib.Path(test.enterContext(tempfile.TemporaryDirectory()))
