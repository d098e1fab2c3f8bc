"""Operations with gradients: every rule stated, orders, bits of moved values.

That the rules are those of aten is the business of
`tests/torch_bridge/gradients`. Needs no accelerator, and float64.
"""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts.gradients import backward
from moejax.contracts import named_combines
from moejax.contracts import ops as ops_lib
from moejax.contracts import refusal
from moejax.numerics import declared_moves
from moejax.numerics.portable import differentiable_ops as lib
from tests import bits

_BFLOAT16 = jnp.bfloat16
_IDS = np.array([[1, 0], [1, 0]], np.int32)
_COMBINE = named_combines.named("transformers_grouped_mm")
_REFUSED = {
    "power",
    "exp",
    "cos",
    "sin",
    "sigmoid",
    "softplus",
    "sqrt",
    "sinkhorn",
    "simulate_quantization",
}


def _ops(name="transformers_eager", padding=None):
  return lib.DifferentiableOperations(
      backward.named(name), padding_token=padding
  )


def _subnormal(shape, dtype=_BFLOAT16) -> jax.Array:
  words = np.arange(1, 1 + int(np.prod(shape)), dtype=np.uint16)
  return jnp.asarray(words.reshape(shape).view(dtype))


class RulesTest(parameterized.TestCase):

  def test_every_operation_and_move_has_a_rule_or_is_refused(self):
    def methods(kind):
      return {name for name in vars(kind) if not name.startswith("_")}

    wanted = methods(ops_lib.Operations) | methods(declared_moves.Moves)
    stated = set(backward.RULES) - {"square", "log_softmax", "nll_loss"}
    self.assertEqual(wanted - _REFUSED, stated)

  def test_an_unknown_contract_or_order_is_refused(self):
    with self.assertRaisesRegex(ValueError, "transformers_eager"):
      backward.named("eager")
    with self.assertRaisesRegex(ValueError, "dispatch='sideways'"):
      backward.BackwardContract("x", "sideways", "one_sum", True)

  def test_operations_without_a_rule_refuse_a_gradient_and_run_without(self):
    ops, x = _ops(), jnp.ones(2, jnp.float32)
    for name in ("exp", "cos", "sigmoid", "softplus", "sqrt"):
      getattr(ops, name)(x)
      with self.assertRaisesRegex(refusal.UnsupportedError, f"^{name} has no"):
        jax.vjp(getattr(ops, name), x)

  def test_a_second_derivative_is_refused(self):
    ops = _ops()
    with self.assertRaises(NotImplementedError):
      jax.hessian(lambda x: ops.silu(x)[0])(jnp.ones(1, jnp.float32))


class OrderTest(parameterized.TestCase):
  """In bfloat16 256 + 1 is 256: three addends show their order."""

  def test_shares_add_from_the_last_use_to_the_first(self):
    x = jnp.ones(1, _BFLOAT16)
    _, back = jax.vjp(lambda x: _ops().moves.share(x, 3), x)
    for addends, total in (((1, 1, 256), 256), ((256, 1, 1), 258)):
      (g,) = back(tuple(jnp.full(1, v, _BFLOAT16) for v in addends))
      self.assertEqual(float(g[0]), total)

  @parameterized.parameters(
      # Slots 0 to 2 go to experts 2, 0 and 1.
      ("transformers_eager", (256, 1, 1), 256),
      ("transformers_eager", (1, 256, 1), 258),
      ("transformers_grouped_mm", (256, 1, 1), 258),
      ("transformers_grouped_mm", (1, 256, 1), 256),
      ("transformers_batched_mm", (1, 256, 1), 258),
      ("transformers_batched_mm", (256, 1, 1), 258),
  )
  def test_rows_of_one_token_add_as_the_contract_says(
      self, name, addends, total
  ):
    ids = jnp.asarray([[2, 0, 1]], jnp.int32)
    _, back = jax.vjp(
        lambda x: _ops(name).moves.dispatch(x, ids, 4),
        jnp.ones((1, 1), _BFLOAT16),
    )
    (g,) = back(jnp.asarray(addends, _BFLOAT16)[:, None])
    self.assertEqual(float(g[0, 0]), total)

  def test_one_embedding_row_adds_token_by_token_and_padding_none(self):
    table = jnp.ones((3, 1), _BFLOAT16)
    tokens = np.array([[0, 2, 0, 0, 1]])
    _, back = jax.vjp(lambda t: _ops(padding=2).moves.lookup(t, tokens), table)
    for addends, total in (((256, 9, 1, 1, 5), 256), ((1, 9, 1, 256, 5), 258)):
      (g,) = back(jnp.asarray(addends, _BFLOAT16).reshape(1, 5, 1))
      self.assertEqual(g[:, 0].astype(jnp.float32).tolist(), [total, 5, 0])

  @parameterized.parameters(
      ("transformers_eager", 258.0), ("transformers_batched_mm", 256.0)
  )
  def test_the_rows_of_an_expert_are_one_sum_or_added_in_turn(
      self, name, total
  ):
    rows = jnp.asarray([[256.0], [1.0], [1.0]], _BFLOAT16)
    ids = jnp.zeros(3, jnp.int32)
    _, back = jax.vjp(
        lambda w: _ops(name).expert_linear(rows, w, ids, "expert_gemm"),
        jnp.ones((2, 1, 1), _BFLOAT16),
    )
    (g,) = back(jnp.ones((3, 1), _BFLOAT16))
    self.assertEqual(g[:, 0, 0].astype(jnp.float32).tolist(), [total, 0.0])


class BitsTest(parameterized.TestCase):
  """Subnormal cotangents pass every move; XLA's own additions flush them."""

  def test_jax_itself_would_flush(self):
    x = _subnormal((4,))
    _, back = jax.vjp(lambda x: (x, x), x)
    (g,) = back((x, x))
    self.assertEqual(float(jnp.abs(g).max()), 0.0)

  def test_shared_values_keep_them(self):
    x = _subnormal((4,))
    _, back = jax.vjp(lambda x: _ops().moves.share(x, 2), x)
    (g,) = back((x, x))
    bits.assert_same_bits(
        g, (2 * np.arange(1, 5, dtype=np.uint16)).view(_BFLOAT16)
    )

  @parameterized.named_parameters(
      ("combine", lambda ops, x: ops.combine(x, _IDS, _COMBINE, 0), (2, 2, 4),
       (2, 4), lambda g: np.repeat(g[:, None], 2, axis=1)),
      ("halves", lambda ops, x: ops.moves.halves(x)[0], (2, 8), (2, 4),
       lambda g: np.concatenate([g, np.zeros_like(g)], -1)),
      ("sum", lambda ops, x: ops.sum(x, "router_normalization"), (2, 4),
       (2, 1), lambda g: np.repeat(g, 4, axis=1)),
      ("pick", lambda ops, x: ops.moves.pick(x, _IDS), (2, 4), (2, 2),
       lambda g: np.concatenate([g[:, ::-1], np.zeros_like(g)], -1)),
      ("half_turn", lambda ops, x: ops.moves.half_turn(x), (2, 4), (2, 4),
       lambda g: np.concatenate([g[:, 2:], -g[:, :2]], -1)),
      ("scale", lambda ops, x: ops.scale(x, 1.0), (2, 4), (2, 4),
       lambda g: g),
  )
  def test_moves_keep_them(self, fn, shape, out, expected):
    g = _subnormal(out)
    _, back = jax.vjp(lambda x: fn(_ops(), x), jnp.ones(shape, _BFLOAT16))
    (back_g,) = back(g)
    bits.assert_same_bits(back_g, expected(np.asarray(g)))

  def test_dispatch_keeps_subnormal_activations(self):
    x = _subnormal((2, 4))
    out = declared_moves.of(None).dispatch(x, _IDS, 4)
    bits.assert_same_bits(out, np.repeat(np.asarray(x), 2, axis=0))


if __name__ == "__main__":
  absltest.main()
