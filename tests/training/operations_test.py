"""Forward bits and gradients of the operations a model is trained with."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import named_combines
from moejax.modules import experts
from moejax.numerics import native_ops
from moejax.training import operations
from tests import bits

_NATIVE = native_ops.NativeOperations()
_OURS = operations.TrainingOperations()


def _values(shape, seed=0, dtype="bfloat16"):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)


def _whole(shape, seed=0, dtype="bfloat16"):
  """Small whole numbers: every product and sum is exact."""
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.integers(-3, 4, shape), jnp.float32).astype(dtype)


class MatrixTest(parameterized.TestCase):

  @parameterized.parameters("bfloat16", "float32")
  def test_products_have_native_bits(self, dtype):
    x, weight = _values((3, 5, 16), 0, dtype), _values((8, 16), 1, dtype)
    bits.assert_same_bits(
        _OURS.linear(x, weight, "projection"),
        _NATIVE.linear(x, weight, "projection"),
    )
    b = _values((3, 16, 4), 2, dtype)
    bits.assert_same_bits(
        _OURS.matmul(x, b, "projection"), _NATIVE.matmul(x, b, "projection")
    )

  @parameterized.parameters(
      ("linear", (3, 5, 16), (8, 16)),
      ("matmul", (3, 5, 16), (3, 16, 4)),
      ("matmul", (3, 2, 5, 16), (3, 1, 16, 4)),
      ("matmul", (3, 2, 5, 16), (16, 4)),
  )
  def test_gradients_of_whole_numbers_are_exact(self, name, left, right):
    a, b = _whole(left, 0), _whole(right, 1)

    def pull(ops, a, b):
      out, back = jax.vjp(lambda x, y: getattr(ops, name)(x, y, "s"), a, b)
      return back(_whole(out.shape, 2, out.dtype))

    wide = [v.astype(jnp.float32) for v in (a, b)]
    for mine, plain in zip(
        pull(_OURS, a, b), pull(_NATIVE, *wide), strict=True
    ):
      bits.assert_same_bits(mine, plain.astype(jnp.bfloat16))


class FunctionTest(parameterized.TestCase):

  @parameterized.parameters("silu", "sigmoid")
  def test_stays_within_four_float32_steps_of_native(self, name):
    x = _values((4096,), 0, "float32") * 8
    mine, native = (
        np.asarray(getattr(ops, name)(x), np.float64)
        for ops in (_OURS, _NATIVE)
    )
    # Two roundings and a function of two ulps on either side.
    bound = 4 * np.spacing(np.abs(native).astype(np.float32))
    self.assertLess((np.abs(mine - native) / bound).max(), 1.0)

  def test_gradient_is_finite_where_that_of_native_is_not(self):
    x = jnp.asarray([-200.0, -90.0, 0.0, 90.0], jnp.float32)
    slope = jax.vmap(jax.grad(_OURS.silu))(x)
    np.testing.assert_allclose(slope, [0.0, 0.0, 0.5, 1.0], atol=1e-30)
    native = jax.vmap(jax.grad(_NATIVE.silu))(x)
    self.assertFalse(np.isfinite(native).all())

  def test_sinkhorn_is_the_last_round_and_has_its_gradient(self):
    x = jax.nn.softmax(_values((5, 4, 4), 0, "float32"), axis=-1)
    weight = _values((5, 4, 4), 1, "float32")

    def total(ops):
      def run(x):
        out = ops.sinkhorn(x, 7, 1e-6, "sinkhorn")[..., -1, :, :]
        return jnp.vdot(out, weight), out

      return jax.value_and_grad(run, has_aux=True)(x)

    (_, mine), slope = total(_OURS)
    (_, native), native_slope = total(_NATIVE)
    # 13 rounds of a sum of four, an addition and a quotient.
    rule = 13 * 5 * 2.0**-24
    np.testing.assert_allclose(mine, native, rtol=rule)
    # The slope is larger than what is left of it, by cancellation.
    largest = float(np.abs(native_slope).max())
    np.testing.assert_allclose(slope, native_slope, atol=64 * rule * largest)
    self.assertGreater(largest, 1e-3)


class WholeExpertsTest(absltest.TestCase):

  def test_only_operations_that_have_them_and_only_their_combine(self):
    weights = {
        "gate_up": _values((4, 16, 8)), "down": _values((4, 8, 8), 1)
    }
    own = named_combines.named("transformers_grouped_mm")

    def build(combine, ops, **options):
      return experts.build(weights, combine, 0, ops, **options)

    self.assertIs(type(build(own, _NATIVE)), experts.Experts)
    self.assertIs(type(build(own, _OURS)), experts.WholeExperts)
    other = named_combines.named("deepseek_reference")
    with self.assertRaisesRegex(NotImplementedError, "deepseek_reference"):
      build(other, _OURS)
    with self.assertRaisesRegex(NotImplementedError, "wide=True"):
      build(own, _OURS, wide=True)


if __name__ == "__main__":
  absltest.main()
