"""One training step against transformers: same bits, or the place of a fault.

The model has three layers, the middle one dense. Seeds near the smallest
normal number make nearly every cotangent subnormal: a flushed one, or a zero
of the other sign, would show. Takes 90 s on two free cores, 60 of them for two
tests: they compile what the others share, once a dtype.
"""

import dataclasses
import json

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp

from moejax.contracts.gradients import backward
from moejax.contracts import refusal
from moejax.numerics.portable import declared_gradients
from moejax.numerics.portable import differentiable_ops
from moejax.numerics.portable import first_step
from moejax.protocols.gradients import places
from tests.torch_bridge.gradients import tiny_steps
from torch_bridge.gradients import comparison

_IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
_LAST = "layers.2"


class SameBitsTest(parameterized.TestCase):

  def _assert_same(self, document):
    self.assertIsNone(document["first_difference"])
    self.assertTrue(document["same_bits"])
    self.assertEqual(document["exit_code"], 0)
    for certificate in document["certificates"].values():
      self.assertTrue(certificate["complete"])
    kinds = {row["kind"] for row in document["places"]}
    self.assertEqual(
        kinds,
        {places.LOSS, places.COTANGENT, places.GRADIENT, places.UPDATED},
    )
    self.assertTrue(json.loads(json.dumps(document))["same_bits"])

  @parameterized.product(
      dtype=("bfloat16", "float32"),
      implementation=_IMPLEMENTATIONS,
      seed=(1.0, 2.0**-126),
  )
  def test_a_step_has_the_bits_of_transformers(
      self, dtype, implementation, seed
  ):
    kind = "adamw" if seed == 1 else "sgd"
    self._assert_same(tiny_steps.compare(dtype, implementation, seed, kind))

  @parameterized.parameters(
      dict(tie_word_embeddings=True),
      dict(norm_topk_prob=False),
      dict(attention_bias=True),
      dict(num_key_value_heads=2),
      # Token 1 is that of padding: its row has no gradient.
      dict(pad_token_id=1),
  )
  def test_other_models(self, **changes):
    self._assert_same(tiny_steps.compare("float32", **changes))


def _wrong_silu(ops, g, operands, result, needed):
  """Leaves out the derivative of the sigmoid."""
  return (ops.plain.multiply(g, ops.plain.sigmoid(operands[0])),)


def _wide_gate(ops, g, operands, result, needed):
  """Leaves out the rounding of the products that are summed."""
  expert_out, gate = operands
  wide = ops.times_to(
      ops.plain.cast(g, "float32"),
      ops.plain.cast(expert_out, "float32"),
      (*gate.shape, 1),
  )
  by_gate = ops.plain.cast(wide, gate.dtype.name).reshape(gate.shape)
  return ops.plain.multiply(g, gate[..., None]), by_gate


def _lost_slot(ops, g, operands, result, needed):
  """The gate of the last slot gets no gradient."""
  by_expert, by_gate = _RIGHT_GATE(ops, g, operands, result, needed)
  return by_expert, by_gate.at[:, -1].set(jnp.zeros((), by_gate.dtype))


_RIGHT_GATE = differentiable_ops.DifferentiableOperations.gate_terms_back


def _turned_share(moves, g, operands, result, needed):
  """Adds from the first use to the last."""
  total, *rest = g
  for other in rest:
    total = moves.plain.add(total, other)
  return (total,)


def _one_step_softmax(ops, g, operands, result, needed):
  """Rounds the product before the difference."""
  plain = ops.plain
  inner = plain.sum(plain.multiply(g, result), "attention_softmax")
  rest = plain.add(g, plain.negate(inner))
  return (plain.multiply(rest, result),)


def _square_of_two(ops, g, operands, result, needed):
  """g x instead of g (2 x)."""
  return (ops.plain.multiply(g, operands[0]),)


def _no_decay(parameter, gradient, step, plain):
  return _RIGHT_STEP(
      parameter, gradient, dataclasses.replace(step, decay=0.0), plain
  )


_RIGHT_STEP = first_step.updated
_OPS = differentiable_ops.DifferentiableOperations
_MOVES = declared_gradients.DeclaredMoves


class PlantedFaultTest(parameterized.TestCase):
  """Each fault stands in every layer; the last layer runs back first."""

  @parameterized.named_parameters(
      ("silu", _OPS, "silu_back", _wrong_silu, "cotangent",
       f"{_LAST}.moe.experts.gate", "silu"),
      ("rounding", _OPS, "gate_terms_back", _wide_gate, "cotangent",
       f"{_LAST}.moe.router.gates", "gate_terms: gate"),
      ("slot", _OPS, "gate_terms_back", _lost_slot, "cotangent",
       f"{_LAST}.moe.router.gates", "gate_terms: gate"),
      ("order", _MOVES, "share_back", _turned_share, "cotangent",
       f"{_LAST}.input_norm.output", "share"),
      ("softmax", _OPS, "softmax_back", _one_step_softmax, "cotangent",
       f"{_LAST}.moe.router.logits", "softmax"),
      ("square", _OPS, "square_back", _square_of_two, "cotangent",
       f"{_LAST}.output", "square"),
      ("step", first_step, "updated", _no_decay, "updated", "lm_head",
       "optimiser", "float32"),  # bfloat16 does not show a decay of 1e-4.
  )
  def test_is_the_first_difference(
      self, owner, method, fault, kind, name, rule, dtype="bfloat16"
  ):
    with mock.patch.object(owner, method, fault):
      document = tiny_steps.compare(dtype, kind="adamw")
    first = document["first_difference"]
    self.assertEqual((first["kind"], first["name"]), (kind, name))
    self.assertIn(rule, first["rules"])
    self.assertGreater(first["differing"], 0)
    self.assertIsNotNone(first["first"])
    self.assertFalse(document["same_bits"])
    self.assertEqual(document["exit_code"], 1)

  @parameterized.parameters(
      ("eager", "transformers_grouped_mm", "mlp_norm.output"),
      ("eager", "transformers_batched_mm", "moe.down"),
      ("batched_mm", "transformers_grouped_mm", "moe.down"),
  )
  def test_the_graph_of_another_implementation_is_seen(
      self, implementation, wrong, name
  ):
    def operations(contract, certificate, padding):
      del contract
      return _OPS(backward.named(wrong), certificate, padding)

    document = tiny_steps.compare(
        "bfloat16", implementation, operations=operations
    )
    first = document["first_difference"]
    self.assertEqual(first["name"], f"{_LAST}.{name}")

  def test_a_lost_padding_rule_is_seen_in_the_embedding(self):
    def operations(contract, certificate, padding):
      del padding
      return _OPS(contract, certificate, None)

    document = tiny_steps.compare(
        "float32", operations=operations, pad_token_id=1
    )
    first = document["first_difference"]
    self.assertEqual((first["kind"], first["name"]), ("gradient", "embedding"))


class RefusalTest(absltest.TestCase):

  def test_an_operation_without_a_rule(self):
    ops = _OPS(backward.named("transformers_eager"))
    with self.assertRaisesRegex(refusal.UnsupportedError, "softplus has no"):
      jax.vjp(ops.softplus, jnp.ones(2, jnp.float32))

  def test_being_traced(self):
    ops = _OPS(backward.named("transformers_eager"))
    with self.assertRaises(NotImplementedError):
      jax.jit(ops.silu)(jnp.ones(2, jnp.float32))

  def test_requests_that_contradict_themselves(self):
    with self.assertRaisesRegex(ValueError, "length=1"):
      comparison.Request("", "", length=1)
    with self.assertRaisesRegex(ValueError, "experts_implementation"):
      comparison.Request("", "", "deepgemm")


if __name__ == "__main__":
  absltest.main()
