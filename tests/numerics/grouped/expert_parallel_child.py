"""Runs expert parallelism on the devices there are; prints what is equal.

Started by `expert_parallel_test.py` with a flag that makes devices of a CPU; on
a machine with two accelerators or more it runs as it is.
"""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import grouped_mlp
from moejax.numerics.grouped import expert_parallel
from moejax.numerics.grouped import mlp
from tests.numerics.grouped import cases

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")

CHAINS = ("sequential", "portable")
PLACEMENTS = ("before_fc2", "after_fc2")
SHARDS = (2, 4)


def _ids() -> np.ndarray:
  """8 tokens, 3 slots, 8 experts: duplicates, an idle shard, no expert."""
  ids = np.random.default_rng(0).integers(0, 9, (8, 3)).astype(np.int32)
  ids[0] = 1
  ids[5] = [3, 8, 3]
  ids[(ids == 4) | (ids == 5)] = 2  # The third of four shards has no row.
  return ids


def _run(function, case):
  y, vjp = jax.vjp(function, *case.operands)
  return (y, *vjp(jnp.asarray(case.dy)))


def main():
  case = cases.problem(_ids(), experts=8, dtype="bfloat16", weights="float32")
  for chain, placement in itertools.product(CHAINS, PLACEMENTS):
    contract = grouped_mlp.of_chain(
        chain, weight_placement=placement, block_rows=8
    )
    one = jax.jit(lambda c=contract: _run(
        lambda *a: mlp.moe_mlp(*a, jnp.asarray(case.ids), c), case
    ))()
    for shards in (n for n in SHARDS if n <= jax.device_count()):
      mesh = jax.sharding.Mesh(np.array(jax.devices()[:shards]), ("expert",))
      spec = jax.sharding.PartitionSpec("expert")
      sharded = jax.shard_map(
          functools.partial(
              expert_parallel.moe_mlp, contract=contract, axis_name="expert"
          ),
          mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False,
      )
      many = jax.jit(lambda f=sharded: _run(
          lambda *a: f(*a, jnp.asarray(case.ids)), case
      ))()
      same = {
          name: np.asarray(a).tobytes() == np.asarray(b).tobytes()
          for name, a, b in zip(cases.NAMES, many, one, strict=True)
      }
      print(json.dumps({
          "chain": chain, "placement": placement, "shards": shards,
          "device": jax.devices()[0].device_kind, "same": same,
          "moved": bool(np.any(np.asarray(one[1]) != 0)),
      }))


if __name__ == "__main__":
  main()
