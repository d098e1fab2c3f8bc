"""Scatter and gather: copies, ordered sums, and each the other's transpose.

Needs no accelerator.
"""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from moejax.numerics.grouped import row_moves as lib
from moejax.numerics.grouped import row_plan
from tests import bits

_IDS = np.int32([[0, 2, 0], [3, 1, 4], [1, 1, 1], [4, 4, 4], [2, 0, 3]])
_VALID = int(np.sum(_IDS < 4))


def _plan():
  return row_plan.row_plan(jnp.asarray(_IDS), 4)


def _draw(*shape, dtype="float64", seed=0):
  values = np.random.default_rng(seed).standard_normal(shape)
  return values.astype(jnp.dtype(dtype))


class RowMovesTest(parameterized.TestCase):

  @parameterized.parameters("float64", "float32", "bfloat16", "float16")
  def test_m19_twins_have_the_bits_of_the_definitions(self, dtype):
    x, v = _draw(5, 7, dtype=dtype), _draw(15, 7, dtype=dtype, seed=1)
    v[3, 2] = np.float32(-0.0)
    pos = row_plan.scatter_index_oracle(_IDS, 4)
    bits.assert_same_bits(
        jax.jit(lib.moe_scatter)(x, _plan()),
        lib.moe_scatter_oracle(x, pos, _VALID),
    )
    bits.assert_same_bits(
        jax.jit(lib.moe_gather)(v, _plan()),
        lib.moe_gather_oracle(v, pos, _VALID),
    )

  def test_m19_gather_is_the_transpose_of_scatter(self):
    x, v = _draw(5, 7), _draw(15, 7, seed=1)
    plan = _plan()
    left = np.vdot(lib.moe_scatter(x, plan), v)
    right = np.vdot(x, lib.moe_gather(v, plan))
    self.assertAlmostEqual(left, right, delta=1e-12 * abs(left))
    _, vjp = jax.vjp(lambda a: lib.moe_scatter(a, plan), x)
    bits.assert_same_bits(vjp(v)[0], lib.moe_gather(v, plan))
    _, vjp = jax.vjp(lambda a: lib.moe_gather(a, plan), v)
    bits.assert_same_bits(vjp(x)[0], lib.moe_scatter(x, plan))

  def test_m19_gates_and_their_gradient(self):
    gates, plan = _draw(5, 3), _plan()
    rows, vjp = jax.vjp(lambda g: lib.moe_gate_rows(g, plan), gates)
    pos = np.asarray(plan.pos)
    np.testing.assert_array_equal(
        np.asarray(rows)[pos], np.where(_IDS < 4, gates, 0)
    )
    d_rows = _draw(15, seed=2)
    np.testing.assert_array_equal(
        vjp(d_rows)[0], np.where(_IDS < 4, d_rows[pos], 0)
    )

  @parameterized.parameters(1, 2, 3)
  def test_m19_round_trip_multiplies_by_the_slots(self, top_k):
    ids = np.zeros((4, top_k), np.int32)
    plan = row_plan.row_plan(jnp.asarray(ids), 2)
    x = _draw(4, 3)
    np.testing.assert_allclose(
        lib.moe_gather(lib.moe_scatter(x, plan), plan), top_k * x, rtol=1e-15
    )

  def test_m18_rows_without_a_slot_are_plus_zero_and_are_not_read(self):
    plan = _plan()
    x = np.full((5, 2), -1.0)
    x[3] = np.nan  # Token 3 has no expert.
    rows = np.asarray(lib.moe_scatter(x, plan))
    bits.assert_same_bits(rows[_VALID:], np.zeros((15 - _VALID, 2)))
    self.assertTrue(np.isfinite(rows).all())
    v = np.ones((15, 2))
    v[_VALID:] = np.nan
    y = np.asarray(lib.moe_gather(v, plan))
    np.testing.assert_array_equal(y[:, 0], np.sum(_IDS < 4, axis=1))

  def test_slots_add_in_order_and_round_once(self):
    plan = row_plan.row_plan(jnp.int32([[0, 1, 2]]), 3)

    def total(*terms, dtype=jnp.float32):
      v = np.array(terms).astype(dtype)[:, None]
      return np.asarray(lib.moe_gather(v, plan)).item()

    self.assertEqual(total(1e8, -1e8, 1), 1)
    self.assertEqual(total(1e8, 1, -1e8), 0)
    # A bfloat16 sum would lose each 1; the float32 sum is rounded once.
    self.assertEqual(total(256, 1, 1, dtype=jnp.bfloat16), 258)
    self.assertEqual(total(256, 1, 0.5, dtype=jnp.bfloat16), 258)

  def test_a_sum_of_minus_zeros_is_plus_zero(self):
    plan = row_plan.row_plan(jnp.int32([[0, 1]]), 2)
    for run in (lib.moe_gather, jax.jit(lib.moe_gather)):
      bits.assert_same_bits(
          run(np.full((2, 3), -0.0), plan), np.zeros((1, 3))
      )

  @parameterized.parameters(
      lib.moe_scatter, lib.moe_gather, lib.moe_gate_rows
  )
  def test_no_batching_and_no_second_derivative(self, operation):
    plan = row_plan.row_plan(jnp.int32([[0], [1]]), 2)
    x = _draw(2) if operation is lib.moe_gate_rows else _draw(2, 3)
    x = x[:, None] if operation is lib.moe_gate_rows else x

    def loss(v):
      return jnp.sum(operation(v, plan) ** 2)

    jax.grad(loss)(x)
    with self.assertRaisesRegex(NotImplementedError, "batching"):
      jax.vmap(loss)(x[None])
    with self.assertRaisesRegex(NotImplementedError, "second"):
      jax.grad(lambda v: jnp.sum(jax.grad(loss)(v)))(x)

  def test_a_cotangent_of_another_dtype_is_refused(self):
    plan = row_plan.row_plan(jnp.int32([[0], [1]]), 2)
    _, vjp = jax.vjp(
        lambda v: lib.moe_gather(v, plan), _draw(2, 3, dtype="bfloat16")
    )
    with self.assertRaises((ValueError, TypeError)):
      vjp(_draw(2, 3, dtype="float32"))


if __name__ == "__main__":
  absltest.main()
