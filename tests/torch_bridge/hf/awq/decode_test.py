"""Packed folders decode: dequantised as transformers, and as the Marlin oracle.

Needs no accelerator, and float64.
"""

import pathlib
import shutil

from absl.testing import absltest
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from moejax.contracts import decoder as decoder_contract
from moejax.contracts import named_combines
from moejax.contracts import packed_moe
from moejax.contracts import refusal
from moejax.modules import config as config_lib
from moejax.modules import decoder as decoder_lib
from moejax.numerics.packed import alignment
from moejax.numerics.packed import awq_format
from moejax.numerics.packed import oracle
from moejax.numerics.packed import packed_ops
from moejax.numerics import reference_ops
from moejax.protocols import compare
from moejax.protocols import trajectory
from tests import bits
from tests.torch_bridge.hf.awq import independent
from tests.torch_bridge.hf.awq import packed_models
from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf import hf_config
from torch_bridge.hf.awq import loader
from torch_bridge.hf.awq import packer
from torch_bridge import torch_reference

_TINY = (
    pathlib.Path(__file__).parents[4]
    / "experiments/checkpoints/tiny_qwen3_moe"
)
_PROMPTS = [
    trajectory.Prompt("a", (3, 1, 4, 1, 5)),
    trajectory.Prompt("b", (9, 2, 6)),
]
_STEPS = 2
_LEAVES = ("qweight", "qzeros", "scales")


def _decoder(loaded, arithmetic, wrap):
  make = getattr(decoder_contract, arithmetic)
  contract = wrap(make(
      config_lib.router_contract(loaded.config),
      named_combines.named("transformers_batched_mm"),
  ))
  packed = isinstance(contract, packed_moe.PackedDecoderContract)
  operations = packed_ops if packed else reference_ops
  params = {path: jnp.asarray(a) for path, a in loaded.params.items()}
  return decoder_lib.Decoder(
      loaded.config, decoder_lib.nest(params), contract,
      operations.operations(contract),
  )


def _dequantized(loaded, arithmetic):
  return _decoder(loaded, arithmetic, lambda c: packed_moe.dequantized_decoder(
      c, dtype=loaded.config.dtype, group_size=loaded.awq.group_size
  ))


def _marlin(loaded, arithmetic, thread_n=64):
  return _decoder(loaded, arithmetic, lambda c: packed_moe.marlin_decoder(
      c,
      packed_moe.marlin(
          dtype=loaded.config.dtype, thread_k=64, thread_n=thread_n, grid=6,
          group_size=loaded.awq.group_size,
      ),
  ))


def _elements(decoder, capture):
  """{layer: elements from packed GEMMs}, over all steps."""
  return {
      layer: sum(
          int(s.taps[f"layers.{layer}.moe.experts.packed_elements"].sum())
          for s in capture.steps
      )
      for layer in range(decoder.config.num_layers)
  }


class DequantizedTest(packed_models.PackedModelTestCase):

  def _wide_folder(self):
    """A plain folder of the weights that a second reading makes wide."""
    folder = self.plain.with_name("wide")
    shutil.copytree(self.plain, folder)
    tensors = {}
    for name, array in checkpoint_lib.Checkpoint(self.folder).items():
      module, _, leaf = name.rpartition(".")
      if leaf == "qweight":
        packed = checkpoint_lib.Checkpoint(self.folder)
        triple = [packed.array(f"{module}.{x}") for x in _LEAVES]
        wide = independent.weight(*triple, "bfloat16")
        tensors[f"{module}.weight"] = np.ascontiguousarray(wide.T)
      elif leaf not in _LEAVES:
        tensors[name] = array
    (folder / "model.safetensors").write_bytes(
        safetensors.numpy.save(tensors, metadata={"format": "pt"})
    )
    return folder

  def test_all_bits_are_those_of_transformers_over_the_wide_weights(self):
    self.pack(packer.Request(16, ("mlp.gate",)))  # Attention is packed too.
    loaded = self.load()
    decoder = _dequantized(loaded, "portable")
    ours = trajectory.run(decoder, _PROMPTS, _STEPS)
    reference = torch_reference.TransformersReference(
        self._wide_folder(), "batched_mm"
    )
    theirs = reference.run(_PROMPTS, _STEPS, arithmetic="portable")
    # Five tokens and two steps, two slots, 2 * 16 and 32 columns.
    self.assertEqual(
        _elements(decoder, ours[0]), dict.fromkeys((0, 1), 7 * 2 * 64)
    )
    found = compare.compare(ours, theirs)
    self.assertIsNone(found.first)
    self.assertEmpty(found.missing)
    self.assertEqual(set(found.levels().values()), {"same_bits"})


class TinyTest(packed_models.PackedModelTestCase):
  """The checkpoint that ships."""

  def setUp(self):
    super().setUp()
    packer.pack(_TINY, self.folder, packer.Request(group_size=32))
    self.loaded = self.load(original=checkpoint_lib.Checkpoint(_TINY))

  def test_decodes_from_packed_words(self):
    decoder = _dequantized(self.loaded, "native")
    (capture,) = trajectory.run(decoder, _PROMPTS[:1], _STEPS)
    self.assertEqual(
        _elements(decoder, capture),
        dict.fromkeys(range(4), 7 * 6 * (64 + 64)),
    )
    summary = decoder.packed_summary()
    self.assertEqual(list(summary), [f"layers.{i}" for i in range(4)])
    for layer in summary.values():
      self.assertEqual(layer["module"], "DequantizedExperts")
    self.assertLen({x["down"]["digest"] for x in summary.values()}, 4)

  def test_marlin_does_not_fit_and_says_the_numbers(self):
    with self.assertRaisesRegex(
        refusal.UnsupportedError, "gate_up .*n=64 is no multiple of thread_n="
    ):
      _marlin(self.loaded, "native", thread_n=128)
    with self.assertRaisesRegex(
        refusal.UnsupportedError, "down .*k=32 is no multiple of thread_k=64"
    ):
      _marlin(self.loaded, "native")

  def test_contract_and_folder_must_agree_on_packing(self):
    with self.assertRaisesRegex(ValueError, "'native' does not say how"):
      _decoder(self.loaded, "native", lambda contract: contract)
    plain = dict(self.loaded.params)
    for layer in range(4):
      for name in ("gate_up", "down"):
        for leaf in _LEAVES:
          del plain[f"layers.{layer}.moe.{name}.{leaf}"]
        plain[f"layers.{layer}.moe.{name}"] = np.zeros(
            (16, 64, 64), self.loaded.params["embedding"].dtype
        )
    loaded = loader.Loaded(
        self.loaded.config, self.loaded.awq, plain, (), ()
    )
    with self.assertRaisesRegex(ValueError, "and no layer has any"):
      _dequantized(loaded, "native")


class MarlinTest(packed_models.PackedModelTestCase):
  """A checkpoint whose sizes fall into Marlin's tiles."""

  def setUp(self):
    super().setUp()
    # Both at once: the folder is the same, and packing it takes a while.
    self.pack(
        packer.Request(group_size=128),
        hidden_size=128, moe_intermediate_size=128, num_experts=6,
    )
    self.loaded = self.load(original=self.original())

  def test_decodes_as_the_oracle_says_and_near_the_dequantised(self):
    exact = _marlin(self.loaded, "portable")
    (capture,) = trajectory.run(exact, _PROMPTS[:1], _STEPS)
    self.assertEqual(
        _elements(exact, capture), dict.fromkeys((0, 1), 7 * 2 * (256 + 128))
    )
    for step in capture.steps:
      self._assert_oracle(step.taps)
    wide = _dequantized(self.loaded, "portable")
    (other,) = trajectory.run(
        wide, _PROMPTS[:1], _STEPS, tokens=[capture.generated]
    )
    self._assert_near(capture.steps[0].taps, other.steps[0].taps)

  def _assert_oracle(self, taps):
    """Every surface of both layers, from the file's tensors."""
    checkpoint = checkpoint_lib.Checkpoint(self.folder)

    def operand(layer, expert, *projections):
      at = f"model.layers.{layer}.mlp.experts.{expert}"
      qweight, qzeros, scales = (
          np.concatenate(
              [checkpoint.array(f"{at}.{p}.{x}") for p in projections], axis=1
          )
          for x in _LEAVES
      )
      return awq_format.PackedOperand(
          independent.codes(qweight).astype(np.uint8),
          independent.codes(qzeros).astype(np.uint8),
          scales,
      )

    for layer in (0, 1):
      at = f"layers.{layer}"
      ids, gates = (
          taps[f"{at}.moe.router.{x}"] for x in ("ids", "normalized")
      )
      self.assertEqual(gates.dtype, np.float32)
      expected = oracle.packed_moe_oracle(
          taps[f"{at}.mlp_norm.output"], gates,
          [operand(layer, e, "gate_proj", "up_proj") for e in range(6)],
          [operand(layer, e, "down_proj") for e in range(6)],
          alignment.route_blocks(
              ids, 6, alignment.block_rows_for(ids.size, 6)
          ),
          packed_moe.marlin(
              dtype="bfloat16", thread_k=64, thread_n=64, grid=6
          ),
      )
      for name, surface in (
          ("gate_up", expected.w13), ("activation", expected.activation),
          ("terms", expected.routed_w2), ("combine", expected.final),
      ):
        found = taps[f"{at}.moe.experts.{name}"]
        bits.assert_same_bits(
            found.reshape(-1, found.shape[-1]), surface
        )

  def _assert_near(self, marlin, wide):
    """Layer 0's input has the same bits; W13 differs by how it is added."""
    for name in ("mlp_norm.output", "moe.router.ids", "moe.router.normalized"):
      bits.assert_same_bits(
          marlin[f"layers.0.{name}"], wide[f"layers.0.{name}"]
      )
    a, b = (
        t["layers.0.moe.experts.gate_up"].astype(np.float64)
        for t in (marlin, wide)
    )
    x = np.abs(wide["layers.0.mlp_norm.output"].astype(np.float64))
    checkpoint = checkpoint_lib.Checkpoint(self.folder)
    sums = np.zeros_like(a)
    for token, slot in np.ndindex(*a.shape[:2]):
      expert = int(wide["layers.0.moe.router.ids"][token, slot])
      at = f"model.layers.0.mlp.experts.{expert}"
      weights = [
          independent.weight(
              *(checkpoint.array(f"{at}.{p}.{leaf}") for leaf in _LEAVES),
              "bfloat16",
          )
          for p in ("gate_proj", "up_proj")
      ]
      weight = np.abs(np.concatenate(weights, axis=1).astype(np.float64))
      sums[token, slot] = x[token] @ weight
    # Half an ulp of bfloat16 each (at most 2**-8 of the value), and Marlin's
    # eight k16 steps and two merges, each of which cuts 17 or 2 terms at 2**-23
    # of the largest one, which is at most the sum of absolute products.
    rule = 2.0**-8 * (np.abs(a) + np.abs(b)) + 8 * 18 * 2.0**-23 * sums
    self.assertTrue((np.abs(a - b) <= rule).all())
    self.assertGreater(float(np.abs(b).min(axis=-1).max()), 0)


class ConfigTest(packed_models.PackedModelTestCase):

  def test_the_unpacked_reader_refuses_a_packed_folder(self):
    self.pack()
    with self.assertRaisesRegex(
        refusal.HarnessError, "quantization_config={'quant_method': 'awq'"
    ):
      hf_config.read(self.folder)


if __name__ == "__main__":
  absltest.main()
