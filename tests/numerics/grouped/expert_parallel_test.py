"""Expert parallelism: the bits of one device, and every slot a row.

Needs no accelerator.
"""

import itertools
import json
import os
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from moejax.numerics.grouped import expert_parallel as lib
from tests.numerics.grouped import cases
from tests.numerics.grouped import expert_parallel_child as child


class ExpertParallelTest(parameterized.TestCase):

  def test_m26_two_and_four_shards_have_the_bits_of_one_device(self):
    # The devices of a process are fixed before JAX starts.
    flags = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-m", "tests.numerics.grouped.expert_parallel_child"],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, check=False, timeout=600,
    )
    self.assertEqual(done.returncode, 0, done.stderr[-2000:])
    found = [json.loads(line) for line in done.stdout.splitlines()]
    self.assertEqual(
        [(f["chain"], f["placement"], f["shards"]) for f in found],
        list(itertools.product(child.CHAINS, child.PLACEMENTS, child.SHARDS)),
    )
    for each in found:
      self.assertEqual(each["same"], dict.fromkeys(cases.NAMES, True), each)
      self.assertTrue(each["moved"])

  @parameterized.parameters(1, 2, 4)
  def test_m26_split_counts_are_the_rows_sent(self, devices):
    ids = np.int32([[0, 0], [1, 8], [7, 7], [0, 0], [6, 1]])
    plan = lib.dispatch_plan(jnp.asarray(ids), devices, 8 // devices)
    sent = np.asarray(plan.slot_of_row).reshape(devices, ids.size)
    np.testing.assert_array_equal(np.sum(sent < ids.size, 1), plan.counts)
    self.assertEqual(int(np.sum(plan.counts)), 9)  # Duplicates count twice.
    for device, slots in enumerate(sent):
      slots = slots[slots < ids.size]
      self.assertTrue((np.diff(slots) > 0).all())
      owners = ids.reshape(-1)[slots] // (8 // devices)
      self.assertEqual(owners.tolist(), [device] * len(slots))


if __name__ == "__main__":
  absltest.main()
