"""How evenly experts are used, and the bias that evens them out.

Layer: training.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np


def moved_bias(bias: jax.Array, counts: jax.Array, speed: float) -> jax.Array:
  """bias + speed * sign(mean of counts - counts): [expert] float32.

  An expert with fewer routes than the mean is selected more readily from now
  on. The bias takes no part in gates, so nothing else changes.
  """
  # k experts get mean * k routes; whole numbers compare exactly.
  gap = counts.sum(dtype=jnp.int32) - counts * jnp.int32(counts.size)
  return bias + jnp.float32(speed) * jnp.sign(gap).astype(jnp.float32)


def statistics(counts: Mapping[int, np.ndarray]) -> dict[str, dict]:
  """{layer: load, entropy and dead experts} as JSON values.

  Entropy is that of the load, over log(experts): one is even, zero means that
  a single expert has all routes. A dead expert has no route at all.

  Args:
    counts: {layer: [expert] routes}.
  """
  out = {}
  for layer, routes in sorted(counts.items()):
    share = routes / max(int(routes.sum()), 1)
    used = share[share > 0]
    entropy = -float(np.sum(used * np.log(used))) / np.log(len(routes))
    out[str(layer)] = {
        "load": [round(float(s), 5) for s in share],
        "entropy": round(entropy, 5),
        "dead": [int(e) for e in np.flatnonzero(routes == 0)],
    }
  return out
