"""A plan of any order becomes the stable plan, bit for bit, tail included."""

import ctypes
import dataclasses
import pathlib
import shutil
import subprocess
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest
import torch

from moejax.contracts import refusal
from moejax.numerics.packed import alignment
from tests import bits
from tests.torch_bridge.performance import kernels
from torch_bridge import vllm_marlin
from torch_bridge.performance import cuda_graph
from torch_bridge.performance import stable_order as lib

# tokens, top_k, experts, rows of a block.
_CASES = (
    (1, 8, 128, 8), (21, 8, 128, 8), (64, 8, 128, 8), (256, 8, 128, 32),
    (7, 2, 4, 16), (5, 3, 3, 48), (40, 1, 2, 8), (1, 1, 1, 64),
)


def _plans(tokens, top_k, experts, block_rows):
  """Yields pairs of the same plan in another and in the stable order."""
  rng = np.random.default_rng(tokens)
  for _ in range(4):
    skew = rng.uniform(0, 3)
    scores = rng.gumbel(size=(tokens, experts)) - skew * np.log(
        1 + np.arange(experts)
    )
    ids = np.argsort(scores, axis=1)[:, :top_k]
    found = kernels.any_plan(ids, experts, block_rows, rng)
    stable = alignment.route_blocks(ids, experts, block_rows)
    yield (
        vllm_marlin.to_device(found, experts, "cpu"),
        vllm_marlin.to_device(stable, experts, "cpu"),
        found, ids,
    )


class BySortTest(parameterized.TestCase):

  @parameterized.parameters(*_CASES)
  def test_is_the_stable_plan(self, tokens, top_k, experts, block_rows):
    changed = 0
    for plan, stable, found, ids in _plans(
        tokens, top_k, experts, block_rows
    ):
      ordered = lib.by_sort(plan, experts)
      for name in ("rows", "experts", "padded"):
        bits.assert_same_bits(
            getattr(ordered, name).numpy(), getattr(stable, name).numpy()
        )
      changed += not torch.equal(plan.rows, ordered.rows)
      back = vllm_marlin.to_host(plan, ids)
      bits.assert_same_bits(back.sorted_routes, found.sorted_routes)
    self.assertEqual(changed > 0, tokens > 1)

  def test_keys_beyond_32_bits(self):
    plan = next(_plans(2, 1, 2, 8))[0]
    big = dataclasses.replace(plan, num_routes=1 << 30)
    with self.assertRaisesRegex(refusal.UnsupportedError, "32 bits"):
      lib.by_sort(big, 2)


class KernelTest(parameterized.TestCase):
  """The kernel's source, compiled for the host and run thread by thread."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
      cls.skipTest(cls, "There is no C++ compiler.")
    folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    source = folder / "kernel.cc"
    source.write_text(f"""
#define __global__
struct {{ int x; }} blockIdx, blockDim, threadIdx;
{lib.SOURCE}
extern "C" void run(const int* rows, const int* experts, int* out,
                    int num_rows, int block_rows, int num_routes) {{
  blockDim.x = 128;
  for (blockIdx.x = 0; blockIdx.x * 128 < num_rows; ++blockIdx.x)
    for (threadIdx.x = 127; threadIdx.x >= 0; --threadIdx.x)
      stable_order(rows, experts, out, num_rows, block_rows, num_routes);
}}
""")
    library = folder / "kernel.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", library, source],
        check=True,
    )
    cls.library = ctypes.CDLL(str(library))

  @parameterized.parameters(*_CASES)
  def test_is_the_stable_plan(self, tokens, top_k, experts, block_rows):
    for plan, stable, _, _ in _plans(tokens, top_k, experts, block_rows):
      rows, owners = plan.rows.numpy(), plan.experts.numpy()
      out = np.full(len(rows) + 1, -9, np.int32)
      pointers = [
          a.ctypes.data_as(ctypes.c_void_p) for a in (rows, owners, out)
      ]
      self.library.run(*pointers, len(rows), block_rows, plan.num_routes)
      bits.assert_same_bits(out[:-1], stable.rows.numpy())
      self.assertEqual(out[-1], -9)

  def test_without_a_device_it_is_unsupported(self):
    if torch.cuda.is_available():
      self.skipTest("There is a device.")
    with self.assertRaisesRegex(refusal.UnsupportedError, "cannot be compiled"):
      lib.Kernel()


@pytest.mark.accelerator
class DeviceTest(parameterized.TestCase):
  """The kernel and the sort where they are measured: in a CUDA graph."""

  def setUp(self):
    super().setUp()
    if not torch.cuda.is_available():
      self.skipTest("There is no CUDA device.")

  @parameterized.product(case=_CASES, way=("kernel", "sort"))
  def test_a_replay_gives_the_stable_plan_of_what_lies_there(self, case, way):
    experts = case[2]
    order = lib.Kernel() if way == "kernel" else (
        lambda plan: lib.by_sort(plan, experts)
    )
    plans = [(p, stable) for p, stable, _, _ in _plans(*case)]
    held = dataclasses.replace(plans[0][0], **{
        name: getattr(plans[0][0], name).cuda()
        for name in ("rows", "experts", "padded")
    })
    graph = cuda_graph.Captured([lambda: order(held)])
    for plan, stable in plans:
      held.rows.copy_(plan.rows)
      held.experts.copy_(plan.experts)
      graph.results[0].rows.fill_(-9)
      self.assertGreater(graph.sample(), 0)
      bits.assert_same_bits(
          graph.results[0].rows.cpu().numpy(), stable.rows.numpy()
      )


if __name__ == "__main__":
  absltest.main()
