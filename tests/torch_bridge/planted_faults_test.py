"""Twelve faults that ports really have, each found by its operator.

Every fault is planted into our decoder, in one layer where it can be, and the
decoder is compared with the unmodified transformers model in portable
arithmetic. No tolerance is involved: the first tap whose bits differ must be
the operator at fault, in its layer. Then each operator runs on the reference's
own inputs: only the operators at fault may differ there, whatever the rest of
the run inherited.
"""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax.numpy as jnp
import numpy as np

from moejax.contracts import named_combines
from moejax.modules import attention
from moejax.numerics.portable import portable_ops
from moejax.numerics import reference_ops
from moejax.numerics import rounding
from moejax.protocols import compare
from moejax.protocols import outcome
from moejax.protocols import taps
from moejax.protocols import trajectory
from torch_bridge.hf import tokenizer as tokenizer_lib
from torch_bridge import subject as subject_lib
from torch_bridge import torch_reference

_FOLDER = (
    pathlib.Path(__file__).parents[2]
    / "experiments"
    / "checkpoints"
    / "tiny_qwen3_moe"
)
_STEPS = 2


@functools.cache
def _subject():
  return subject_lib.load(_FOLDER)


@functools.cache
def _prompts():
  texts = tokenizer_lib.read_prompts(_FOLDER / "prompts.json")
  return _subject().prompts(texts[:3], _STEPS)


@functools.cache
def _reference(implementation):
  reference = torch_reference.TransformersReference(_FOLDER, implementation)
  return reference.run(_prompts(), _STEPS, arithmetic="portable")


def _decoder(subject=None, combine="transformers_grouped_mm", operations=None):
  subject = subject or _subject()
  contract = subject.contracts(named_combines.named(combine))["portable"]
  operations = operations or reference_ops.operations(contract)
  return subject.decoder(contract, operations)


# The faults. Each returns a decoder that has it.


def _norm_epsilon():
  decoder = _decoder()
  decoder.layers[2].input_norm.epsilon = 1e-5
  return decoder


def _rotary_base():
  subject = _subject()
  config = dataclasses.replace(subject.config, rope_theta=10000.0)
  return _decoder(dataclasses.replace(subject, config=config))


def _gates_not_normalized():
  decoder = _decoder()
  router = decoder.layers[1].moe.router
  router.contract = dataclasses.replace(router.contract, normalize=False)
  return decoder


def _gate_and_up_swapped():
  decoder = _decoder()
  experts = decoder.layers[2].moe.experts
  gate, up = jnp.split(experts.gate_up[...], 2, axis=1)
  experts.gate_up = nnx.Param(jnp.concatenate([up, gate], axis=1))
  return decoder


def _gate_before_down():
  decoder = _decoder()
  experts = decoder.layers[2].moe.experts
  experts.contract = dataclasses.replace(
      experts.contract, gate_site="before_down"
  )
  return decoder


class _FusedActivation(portable_ops.PortableOperations):
  """Forgets to round silu(gate) before it multiplies, as a fused kernel may."""

  def silu(self, x):
    wide = rounding.widen(x)
    self._unrounded = wide / (1 + jnp.exp(-wide))
    return super().silu(x)

  def multiply(self, x, y):
    wide, self._unrounded = getattr(self, "_unrounded", None), None
    if wide is None or x.shape != wide.shape:
      return super().multiply(x, y)
    product = wide * rounding.widen(y)
    return rounding.round_pack(product, x.dtype.name)


def _missing_rounding():
  decoder = _decoder()
  decoder.layers[1].moe.experts.ops = _FusedActivation()
  return decoder


def _state_in_float32():
  decoder = _decoder()
  for layer in decoder.layers:
    layer.attention.state_dtype = "float32"
  return decoder


def _attention_scale():
  decoder = _decoder()
  decoder.layers[3].attention.scale = 1 / 32
  return decoder


def _tie_rule():
  decoder = _decoder()
  router = decoder.layers[2].moe.router
  router.contract = dataclasses.replace(
      router.contract, tie_rule="highest_index"
  )
  return decoder


def _router_in_float32():
  decoder = _decoder()
  router = decoder.layers[1].moe.router
  router.contract = dataclasses.replace(
      router.contract, logits_dtype="float32"
  )
  return decoder


def _combine_order():
  decoder = _decoder(combine="transformers_eager")
  experts = decoder.layers[2].moe.experts
  experts.contract = dataclasses.replace(experts.contract, order="slot")
  return decoder


def _sees_the_next_key(valid, start, num_tokens, window, dtype):
  return attention_visibility_bias(valid, start + 1, num_tokens, window, dtype)


attention_visibility_bias = attention.visibility_bias


@dataclasses.dataclass(frozen=True)
class Fault:
  """A fault, and where it has to be found."""

  plant: Callable
  layer: int | None
  operator: str
  kind: str = "values"
  causes: tuple[tuple[int | None, str], ...] = ()
  implementation: str = "grouped_mm"


FAULTS = {
    "norm epsilon": Fault(_norm_epsilon, 2, "input_norm.plus_epsilon"),
    "rotary base": Fault(_rotary_base, None, "rotary.inverse_frequencies"),
    "norm_topk_prob": Fault(_gates_not_normalized, 1, "moe.router.gates"),
    "gate and up swapped": Fault(
        _gate_and_up_swapped, 2, "moe.experts.gate_up"
    ),
    "gate multiplied before the down projection": Fault(
        _gate_before_down,
        2,
        "moe.experts.down",
        causes=((2, "moe.experts.down"), (2, "moe.experts.terms")),
    ),
    "a missing bf16 rounding": Fault(
        _missing_rounding, 1, "moe.experts.activation"
    ),
    "KV kept in fp32": Fault(
        _state_in_float32,
        0,
        "attention.state_keys",
        kind="dtype",
        causes=tuple(
            (layer, f"attention.state_{name}")
            for layer in range(4)
            for name in ("keys", "values")
        ),
    ),
    "attention scale": Fault(_attention_scale, 3, "attention.scaled"),
    "tie rule": Fault(_tie_rule, 2, "moe.router.ids", kind="order_tie"),
    "router in fp32": Fault(
        _router_in_float32,
        1,
        "moe.router.logits",
        kind="dtype",
        # A replay leaves values of another dtype alone, so the next operation
        # does not run on the reference's input.
        causes=((1, "moe.router.logits"), (1, "moe.router.scores")),
    ),
    "mask off by one": Fault(
        _decoder,
        0,
        "attention.masked",
        causes=tuple((layer, "attention.masked") for layer in range(4)),
    ),
    "combine order": Fault(
        _combine_order, 2, "moe.experts.combine", implementation="eager"
    ),
}


class PlantedFaultsTest(parameterized.TestCase):

  @parameterized.parameters("grouped_mm", "batched_mm", "eager")
  def test_without_a_fault_all_bits_are_the_same(self, implementation):
    decoder = _decoder(combine=f"transformers_{implementation}")
    ours = trajectory.run(decoder, _prompts(), _STEPS)
    found = compare.compare(ours, _reference(implementation))
    self.assertIsNone(found.first)
    self.assertEqual(set(found.levels().values()), {"same_bits"})

  @parameterized.named_parameters(
      (name.replace(" ", "_"), name) for name in FAULTS
  )
  def test_fault_is_named_by_layer_and_operator(self, name):
    fault = FAULTS[name]
    theirs = _reference(fault.implementation)
    bias = (
        _sees_the_next_key
        if name == "mask off by one"
        else attention_visibility_bias
    )
    decoder = fault.plant()
    with mock.patch.object(attention, "visibility_bias", bias):
      ours = trajectory.run(decoder, _prompts(), _STEPS)
      replay = trajectory.run(decoder, _prompts(), _STEPS, given=theirs)

    found = compare.compare(ours, theirs)
    self.assertEqual(
        (found.first.layer, found.first.operator, found.first.kind),
        (fault.layer, fault.operator, fault.kind),
    )
    level = taps.level(fault.operator)
    self.assertEqual(found.levels()[level], "beyond_rule")
    causes = {
        (cause["layer"], cause["operator"])
        for cause in outcome.causes(compare.compare(replay, theirs))
    }
    expected = fault.causes or ((fault.layer, fault.operator),)
    self.assertEqual(causes, set(expected))

  def test_there_are_twelve(self):
    self.assertLen(FAULTS, 12)

  def test_a_boundary_tie_is_no_router_mismatch(self):
    """Case C03: equal scores on both sides of the last slot."""
    scores = np.float32([[1, 3, 3, 2, 3, 0, 3, 1]])
    context = {"layers.0.moe.router.scores": scores}
    ours, reference = np.int32([[1, 2]]), np.int32([[1, 6]])
    found = compare.locate(
        "p", 0, "layers.0.moe.router.ids", ours, reference, context
    )
    self.assertEqual((found.kind, found.margin), ("boundary_tie", 0.0))
    inner = compare.locate(
        "p",
        0,
        "layers.0.moe.router.ids",
        np.int32([[1, 3]]),
        np.int32([[3, 1]]),
        {"layers.0.moe.router.scores": np.float32([[0, 5, 1, 5, 2, 3, 1, 0]])},
    )
    self.assertEqual((inner.kind, inner.margin), ("order_tie", 2.0))
    mismatch = compare.locate(
        "p",
        0,
        "layers.0.moe.router.ids",
        np.int32([[1, 3]]),
        reference,
        context,
    )
    self.assertEqual(mismatch.kind, "values")


if __name__ == "__main__":
  absltest.main()
