"""Portable arithmetic for aten's backward operations: orders and refusals."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import torch

from moejax.contracts import refusal
from tests import bits
from torch_bridge.gradients import backward_mode
from torch_bridge import tensor_bits

# In bfloat16 256 + 1 is 256: the order of three addends shows.
_ADDENDS = (((256, 1, 1), 256), ((1, 1, 256), 258))


def _run(fn, *args):
  mode = backward_mode.BackwardMode()
  with mode:
    out = fn(*args)
  assert mode.oracle.certificate.complete
  return out


def _column(values):
  return torch.tensor(values, dtype=torch.bfloat16)[:, None]


def _index_put(rows):
  at = torch.zeros(len(rows), dtype=torch.int64)
  start = torch.zeros(2, 1, dtype=torch.bfloat16)
  return start.index_put((at,), rows, accumulate=True)


def _embedding(rows):
  tokens = torch.zeros(len(rows), dtype=torch.int64)
  return torch.ops.aten.embedding_dense_backward(rows, tokens, 2, -1, False)


class OrderTest(parameterized.TestCase):

  @parameterized.product(fn=(_index_put, _embedding), case=_ADDENDS)
  def test_rows_are_added_in_turn_as_the_cpu_kernel_does(self, fn, case):
    addends, total = case
    for out in (_run(fn, _column(addends)), fn(_column(addends))):
      self.assertEqual(out[:, 0].tolist(), [total, 0])

  def test_the_engine_adds_from_the_last_use_to_the_first(self):
    x = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)

    def back(factors):
      x.grad = None
      uses = [x * factor for factor in factors]
      torch.cat(uses).backward(torch.ones(3, dtype=torch.bfloat16))
      return x.grad.item()

    for run in (back, lambda factors: _run(back, factors)):
      self.assertEqual(run((256.0, 1.0, 1.0)), 258)
      self.assertEqual(run((1.0, 1.0, 256.0)), 256)

  def test_experts_with_equal_keys_stand_in_the_order_of_their_rows(self):
    ids = torch.tensor([2, 0, 2, 0, 2, 0] * 40)
    _, order = _run(torch.sort, ids)
    self.assertEqual(
        order.tolist(), np.argsort(ids.numpy(), kind="stable").tolist()
    )
    _, falling = _run(lambda x: torch.sort(x, -1, True), ids)
    self.assertEqual(
        falling.tolist(), np.argsort(-ids.numpy(), kind="stable").tolist()
    )


class GroupedTest(absltest.TestCase):

  def test_a_group_without_rows_is_zero(self):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(16, 8, generator=generator).to(torch.bfloat16).t()
    b = torch.randn(16, 8, generator=generator).to(torch.bfloat16)
    ends = torch.tensor([8, 8, 16], dtype=torch.int32)
    out = tensor_bits.to_numpy(
        _run(torch.ops.aten._grouped_mm, a, b, ends)
    )
    left, right = (tensor_bits.to_numpy(v).astype(np.float64) for v in (a, b))
    for group, (start, end) in enumerate(((0, 8), (8, 8), (8, 16))):
      exact = left[:, start:end] @ right[start:end]
      bits.assert_same_bits(
          out[group], exact.astype(np.float32).astype(out.dtype)
      )


class RefusalTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("weights", lambda x: torch.nn.functional.nll_loss(
          x, torch.tensor([0, 1]), weight=torch.ones(2)), "weights"),
      ("sum", lambda x: torch.nn.functional.nll_loss(
          x, torch.tensor([0, 1]), reduction="sum"), "reduction=2"),
      ("frequency", lambda x: torch.ops.aten.embedding_dense_backward(
          x, torch.tensor([0, 1]), 2, -1, True), "frequency"),
      ("lerp", lambda x: torch.lerp(x, x, x), "lerp"),
      ("unknown", lambda x: torch.ops.aten.tanh_backward(x, x), "tanh_back"),
  )
  def test_what_is_not_covered(self, fn, message):
    with self.assertRaisesRegex(refusal.UnsupportedError, message):
      _run(fn, torch.ones(2, 2))


if __name__ == "__main__":
  absltest.main()
