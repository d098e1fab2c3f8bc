"""Nine faults that ports of DeepSeek-V4 really have, each found by its tap.

Every fault is planted into our decoder, in one layer where it can be, and the
decoder is compared with the unmodified transformers model in portable
arithmetic. No tolerance is involved: the first tap whose bits differ must be
the operator at fault, in its layer and in the step where it first shows.

Needs no accelerator.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import transformers

from moejax.contracts import named_combines
from moejax.modules.deepseek_v4 import attention
from moejax.modules.deepseek_v4 import compressor
from moejax.modules.deepseek_v4 import hyper
from moejax.modules.deepseek_v4 import indexer
from moejax.modules.deepseek_v4 import state as rows_lib
from moejax.numerics.portable import portable_ops
from moejax.numerics import reference_ops
from moejax.protocols import compare
from moejax.protocols import trajectory
from torch_bridge.hf import tokenizer as tokenizer_lib
from torch_bridge import subject as subject_lib
from torch_bridge import torch_reference

_FOLDER = (
    pathlib.Path(__file__).parents[2]
    / "experiments"
    / "checkpoints"
    / "tiny_deepseek_v4"
)
# A window of a CSA layer is open after the prompt, and is completed by them.
_STEPS = 3
_PROMPT_LENGTH = 21


@functools.cache
def _subject() -> subject_lib.Subject:
  return subject_lib.load(_FOLDER)


@functools.cache
def _prompts() -> tuple[trajectory.Prompt, ...]:
  texts = tokenizer_lib.read_prompts(_FOLDER / "prompts_by_length.json")
  long = max(_subject().prompts(texts, _STEPS), key=lambda p: len(p.tokens))
  return (trajectory.Prompt("p", long.tokens[:_PROMPT_LENGTH]),)


@functools.cache
def _reference():
  reference = torch_reference.TransformersReference(_FOLDER, "grouped_mm")
  return reference.run(_prompts(), _STEPS, arithmetic="portable")


def _decoder(operations=None, **combine):
  """Our decoder, under a combine with other fields."""
  contract = _subject().contracts(
      dataclasses.replace(
          named_combines.named("transformers_grouped_mm"), **combine
      )
  )["portable"]
  operations = operations or reference_ops.operations(contract)
  return _subject().decoder(contract, operations)


# The faults. Each yields a decoder that has it.


class _SigmoidForSoftmax(portable_ops.PortableOperations):

  def softmax(self, x, site):
    if site == "hyper_softmax":
      return self.sigmoid(x)
    return super().softmax(x, site)


class _NoFactorTwo(portable_ops.PortableOperations):
  """The stream weights stay sigmoids, in (0, 1)."""

  def scale(self, x, factor):
    return x if factor == 2.0 else super().scale(x, factor)


@contextlib.contextmanager
def _untransposed_mixing():
  def mix(post, comb, *others):
    return right(post, jnp.swapaxes(comb, -1, -2), *others)

  right = hyper.mix
  with mock.patch.object(hyper, "mix", mix):
    yield _decoder()


@contextlib.contextmanager
def _rotary_base_of_the_other_kind():
  """One compressed layer turns its queries and keys by the main table."""
  decoder = _decoder()
  tables = {}
  make, call = decoder._rope, attention.Attention.__call__

  def rope(name, *others):
    tables[name] = make(name, *others)
    return tables[name]

  def attend(self, x, state, cols, cos, sin, *others):
    if self is decoder.layers[3].attention:
      cos, sin = tables["main"][:2]
    return call(self, x, state, cols, cos, sin, *others)

  with (
      mock.patch.object(type(decoder), "_rope", lambda _, *a: rope(*a)),
      mock.patch.object(attention.Attention, "__call__", attend),
  ):
    yield decoder


@contextlib.contextmanager
def _no_causal_mask_on_entries():
  def complete(cols, rate, capacity):
    entry = jnp.arange(capacity, dtype=jnp.int32)
    seen = entry < (cols.after // rate)[:, None, None]
    return jnp.broadcast_to(seen, (*cols.position.shape, capacity))

  with mock.patch.object(indexer, "complete_entries", complete):
    yield _decoder()


@contextlib.contextmanager
def _one_window_row_too_many():
  """A query sees W earlier positions beside itself, not W - 1."""
  right = attention.Attention._window_bias

  def bias(self, cols, dtype):
    config = self.config
    self.config = dataclasses.replace(config, window=config.window + 1)
    try:
      # The first column would be a row that the ring lacks.
      return right(self, cols, dtype)[..., 1:]
    finally:
      self.config = config

  with mock.patch.object(attention.Attention, "_window_bias", bias):
    yield _decoder()


@contextlib.contextmanager
def _bias_in_the_buffered_gate():
  """Layer 1 buffers gate plus bias, and adds the bias again later."""
  decoder = _decoder()
  call = compressor.Compressor.__call__

  def compress(self, x, state, cols, *others):
    after = call(self, x, state, cols, *others)
    if self is not decoder.layers[1].attention.compressor:
      return after
    biased = self.ops.add(
        self.ops.cast(after.gate, "float32"), self.position_bias[...]
    )
    biased = self.ops.cast(biased, after.gate.dtype.name)
    newest = rows_lib.latest(self.rate, cols.after) >= cols.before[:, None]
    return after._replace(
        gate=jnp.where(newest[..., None], biased, after.gate)
    )

  with mock.patch.object(compressor.Compressor, "__call__", compress):
    yield decoder


def _hash_rows_in_another_order():
  decoder = _decoder()
  router = decoder.layers[1].moe.router
  router.table = router.table[:, ::-1]
  return decoder


def _plain(make: Callable) -> Callable[[], Iterator]:
  return lambda: contextlib.nullcontext(make())


@dataclasses.dataclass(frozen=True)
class Fault:
  """A fault, and where it has to be found first."""

  plant: Callable
  layer: int | None
  operator: str
  step: int = 0
  kind: str = "values"


FAULTS = {
    "sigmoid for softmax": Fault(
        _plain(lambda: _decoder(_SigmoidForSoftmax())),
        0,
        "attention_hc.comb_softmax",
    ),
    "untransposed mixing": Fault(
        _untransposed_mixing, 0, "attention_mix.comb"
    ),
    "missing factor two": Fault(
        _plain(lambda: _decoder(_NoFactorTwo())), 0, "attention_hc.post"
    ),
    "rotary base of the other kind": Fault(
        _rotary_base_of_the_other_kind, 3, "attention.q_turn.times_cos"
    ),
    "no causal mask on entries": Fault(
        _no_causal_mask_on_entries, 1, "attention.indexer.visible"
    ),
    "W rows of the cache": Fault(
        _one_window_row_too_many, 0, "attention.masked"
    ),
    "bias in the buffered gate": Fault(
        _bias_in_the_buffered_gate, 1, "attention.compressor.scores", step=3
    ),
    "hash row order": Fault(
        _plain(_hash_rows_in_another_order), 1, "moe.router.ids"
    ),
    "shared expert added before rounding": Fault(
        _plain(lambda: _decoder(round_before_shared=False)),
        0,
        "moe.experts.combine",
        kind="dtype",
    ),
}


class DeepseekV4FaultsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    if transformers.__version__ == "5.17.0":
      self.skipTest("transformers 5.17 cannot run this model in bfloat16")

  def test_without_a_fault_all_bits_are_the_same(self):
    ours = trajectory.run(_decoder(), _prompts(), _STEPS)
    found = compare.compare(ours, _reference())
    self.assertIsNone(found.first)
    self.assertEqual(found.missing, [])
    self.assertEqual(set(found.levels().values()), {"same_bits"})

  @parameterized.named_parameters(
      (name.replace(" ", "_"), name) for name in FAULTS
  )
  def test_fault_is_named_by_layer_and_tap(self, name):
    fault = FAULTS[name]
    with fault.plant() as decoder:
      ours = trajectory.run(
          decoder,
          _prompts(),
          _STEPS,
          tokens=[c.generated for c in _reference()],
      )
    first = compare.compare(ours, _reference()).first
    self.assertEqual(
        (first.step, first.layer, first.operator, first.kind),
        (fault.step, fault.layer, fault.operator, fault.kind),
    )


if __name__ == "__main__":
  absltest.main()
