"""Gradients of the expert MLP through the bridge, against torch's autograd.

A sum's gradient is a broadcast tensor and a transposed one has other strides;
the bridge copies both, so neither changes a bit. Needs no accelerator.
"""

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import torch

from moejax.contracts import grouped_mlp
from moejax.numerics.grouped import mlp
from tests import bits
from torch_bridge import tensor_bits

_IDS = np.int32([[0, 0], [1, 2], [2, 1]])


def _operands():
  rng = np.random.default_rng(0)
  return [
      rng.standard_normal(shape)
      for shape in ((3, 4), (3, 2), (3, 10, 4), (3, 4, 5))
  ]


def _torch_gradients(operands, dy):
  """Token by token and slot by slot, differentiated by torch."""
  x, gates, gate_up, down = leaves = [
      torch.from_numpy(v.copy()).requires_grad_() for v in operands
  ]
  rows = []
  for token, slots in enumerate(_IDS.tolist()):
    total = torch.zeros(4, dtype=torch.float64)
    for slot, expert in enumerate(slots):
      gate, up = (gate_up[expert] @ x[token]).chunk(2)
      out = down[expert] @ (torch.nn.functional.silu(gate) * up)
      total = total + gates[token, slot] * out
    rows.append(total)
  torch.stack(rows).backward(dy)
  return [leaf.grad.numpy() for leaf in leaves]


class ExpertGradientTest(absltest.TestCase):

  def test_m25_broadcast_and_transposed_cotangents(self):
    operands = _operands()
    y, vjp = jax.vjp(
        lambda *a: mlp.moe_mlp(
            *a, jnp.asarray(_IDS), grouped_mlp.GroupedMlpContract()
        ),
        *map(jnp.asarray, operands),
    )
    pull = jax.jit(vjp)
    broadcast = torch.ones((), dtype=torch.float64).expand(3, 4)
    transposed = torch.arange(12, dtype=torch.float64).reshape(4, 3).T
    self.assertEqual(broadcast.stride(), (0, 0))
    self.assertFalse(transposed.is_contiguous())
    for dy in (broadcast, transposed):
      found = pull(jnp.asarray(tensor_bits.to_numpy(dy)))
      plain = pull(jnp.asarray(np.ascontiguousarray(dy.clone().numpy())))
      wanted = _torch_gradients(operands, dy)
      for got, same, value in zip(found, plain, wanted, strict=True):
        bits.assert_same_bits(got, same)
        np.testing.assert_allclose(got, value, rtol=1e-12, atol=1e-12)
    self.assertEqual(y.shape, (3, 4))


if __name__ == "__main__":
  absltest.main()
