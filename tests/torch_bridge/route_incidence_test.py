"""Counting orders, memberships and outputs, with kernels made of NumPy."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from moejax.contracts import refusal
from moejax.numerics.packed import alignment
from moejax.numerics.packed import oracle
from moejax.protocols import packed_fixture
from torch_bridge import route_incidence

_SHAPE = packed_fixture.LayerShape(experts=4, embed=128, hidden=128)


class _Backend:
  """Plans at random; its output depends on the membership alone."""

  def __init__(self, random: bool):
    self._rng = np.random.default_rng(0)
    self._random = random
    self.calls = 0

  def align(self, ids, experts, rows):
    orders = {}
    if self._random:
      orders = {
          int(e): self._rng.permutation(np.flatnonzero(ids.reshape(-1) == e))
          for e in np.unique(ids)
      }
    return alignment.route_blocks(ids, experts, rows, orders=orders)

  def surfaces(self, inputs, blocks, contract):
    del contract
    self.calls += 1
    number = np.zeros(8, np.float16)
    number[0] = hash(blocks.membership()) % 1000
    return oracle.Surfaces(number, number, number, number)


class RouteIncidenceTest(parameterized.TestCase):

  def _run(self, random, tokens=(200,), calls=30):
    request = route_incidence.Request(
        tokens=tokens, calls=calls, top_k=2, shape=_SHAPE
    )
    backend = _Backend(random)
    drawn = []
    preludes = {
        "none": lambda rng: None,
        "draws": lambda rng: drawn.append(rng.integers(100)),
    }
    entries = route_incidence.run(request, backend, preludes)
    self.assertEqual(backend.calls, len(tokens) * 2 * 2 * calls)
    self.assertLen(drawn, len(tokens) * 2 * calls)
    return entries

  def test_random_plans_are_counted_and_the_stable_plan_has_one_output(self):
    entries = self._run(random=True)
    self.assertLen(entries, 2)
    for entry in entries:
      kernel = entry["kernel"]
      self.assertEqual(kernel["orders"], 30)
      self.assertGreater(kernel["memberships"], 1)
      self.assertEqual(kernel["final"], kernel["w13"])
      self.assertGreater(kernel["final"], 1)
      self.assertGreater(entry["experts_with_several_blocks"], 0)
      self.assertGreater(int(entry["legal_memberships"]), 1)
      self.assertEqual(set(entry["stable"].values()), {1})
      self.assertLessEqual(entry["most_frequent_output"], 1)
    self.assertEqual(
        route_incidence.removed(entries),
        {
            "cells": 2,
            "with_several_outputs": 2,
            "of_these_one_under_the_stable_plan": 2,
            "with_several_outputs_under_the_stable_plan": 0,
        },
    )

  def test_a_steady_kernel_has_one_of_each(self):
    (first, _) = self._run(random=False)
    self.assertEqual(set(first["kernel"].values()), {1})
    self.assertEqual(first["most_frequent_output"], 1.0)
    self.assertEqual(
        route_incidence.removed([first])["with_several_outputs"], 0
    )

  @parameterized.parameters({"calls": 0}, {"tokens": ()}, {"tokens": (0,)})
  def test_nothing_to_count_is_refused(self, **changes):
    with self.assertRaisesRegex(refusal.HarnessError, "nothing to count"):
      route_incidence.Request(**changes)


if __name__ == "__main__":
  absltest.main()
