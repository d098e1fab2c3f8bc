"""The tiny DeepSeek-V4 checkpoint: the shipped files and what they show.

Comparisons rest on properties that nobody sees by looking at the files: that
they can be remade bit for bit, that both loaders read every tensor, and that
each part of the architecture has work to do, so that leaving it out shows. The
bounds leave room for machines that round in another order.
"""

import functools
import hashlib
import itertools
import json
import math
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import numpy as np
import safetensors.numpy
import transformers

from experiments.support import shipped
from experiments.tiny import checkpoint_folder
from experiments.tiny import deepseek_v4 as tiny_deepseek_v4
from experiments.tiny import qwen3_moe as tiny_qwen3_moe
from moejax.contracts import refusal
from moejax.modules.deepseek_v4 import config as config_lib
from moejax.modules.deepseek_v4 import parameters
from moejax.protocols import trajectory
from tests import bits
from torch_bridge.hf.deepseek_v4 import parameter_map
from torch_bridge.hf import tokenizer
from torch_bridge import torch_reference

_ROOT = pathlib.Path(__file__).parents[2]
_SHIPPED = tiny_deepseek_v4.SHIPPED
_CONFIG = tiny_deepseek_v4.CONFIG
_MAX_BYTES = 4_000_000
_LENGTHS = (3, 4, 7, 8, 9, 16, 45, 130)
_CSA, _HCA = config_lib.CSA, config_lib.HCA
_BFLOAT16_RUNS = transformers.__version__ != "5.17.0"


@functools.cache
def _tensors() -> dict[str, np.ndarray]:
  return safetensors.numpy.load_file(_SHIPPED / "model.safetensors")


def _prompt(length: int) -> trajectory.Prompt:
  return trajectory.Prompt(
      str(length), tuple(int(7 * i * i + 3) % 1000 + 2 for i in range(length))
  )


@functools.cache
def _reference(implementation="grouped_mm"):
  return torch_reference.TransformersReference(_SHIPPED, implementation)


@functools.cache
def _taps() -> dict[str, np.ndarray]:
  """What transformers computes for 130 tokens at once."""
  return _reference().run([_prompt(130)], 0)[0].steps[0].taps


def _layers(*kinds: str) -> list[int]:
  return [i for i, kind in enumerate(_CONFIG.attentions) if kind in kinds]


def _top_k_layers() -> list[int]:
  return [i for i in range(_CONFIG.num_layers) if i not in _CONFIG.hash_layers]


class MakeTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.parent = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory())
    ).resolve()

  def test_binary_remakes_the_shipped_files(self):
    out = self.parent / "made"
    run = subprocess.run(
        [
            sys.executable, "-m", "experiments.make_tiny_deepseek_v4",
            f"--out={out}",
        ],
        cwd=_ROOT, check=True, capture_output=True, text=True,
    )
    names = sorted((*tiny_deepseek_v4.SOURCES, *checkpoint_folder.GENERATED))
    self.assertEqual(sorted(p.name for p in out.iterdir()), names)
    self.assertEqual(sorted(p.name for p in _SHIPPED.iterdir()), names)
    for name in names:  # Not the contents: a failure would print megabytes.
      made, shipped = (out / name).read_bytes(), (_SHIPPED / name).read_bytes()
      self.assertTrue(made == shipped, name)
    shapes = [
        shape
        for shape, dtype in parameters.leaves(_CONFIG).values()
        if dtype != "int32"
    ]
    self.assertEqual(
        json.loads(run.stdout.splitlines()[-1]),
        {
            "schema": "make_checkpoint/1",
            "out": str(out),
            "num_parameters": sum(math.prod(shape) for shape in shapes),
            "sha256": {
                name: hashlib.sha256((_SHIPPED / name).read_bytes()).hexdigest()
                for name in ("model.safetensors", "tokenizer.json",
                             "config.json")
            },
        },
    )

  def test_another_seed_changes_the_weights_alone(self):
    out = self.parent / "made"
    tiny_deepseek_v4.make(out, tiny_deepseek_v4.SEED + 1)
    self.assertEqual(
        [
            path.name
            for path in sorted(out.iterdir())
            if path.read_bytes() != (_SHIPPED / path.name).read_bytes()
        ],
        ["model.safetensors"],
    )

  def test_folder_is_small(self):
    size = sum(path.stat().st_size for path in _SHIPPED.iterdir())
    self.assertLess(size, _MAX_BYTES)

  def test_the_card_names_seed_and_size(self):
    card = (_SHIPPED / "README.md").read_text("utf-8")
    weights = sum(
        t.size for t in _tensors().values() if t.dtype.kind not in "iu"
    )
    self.assertIn(f"the seed {tiny_deepseek_v4.SEED} |", card)
    self.assertIn(f"| parameters | {weights:,} (bfloat16)", card)
    self.assertIn("**The weights are untrained.**", card)

  def test_vocabulary_is_that_of_the_other_checkpoint(self):
    for name in ("tokenizer.json", "tokenizer_config.json"):
      other = tiny_qwen3_moe.SHIPPED / name
      self.assertTrue(
          (_SHIPPED / name).read_bytes() == other.read_bytes(), name
      )


class WeightsTest(parameterized.TestCase):

  def test_both_routes_meet_every_kind_that_the_release_has(self):
    met = {
        (kind, i in _CONFIG.hash_layers)
        for i, kind in enumerate(_CONFIG.attentions)
    }
    self.assertEqual(
        met,
        {("swa", True), ("csa", True), ("swa", False), ("csa", False),
         ("hca", False)},
    )

  def test_our_loader_reads_every_tensor_with_its_bits(self):
    config, loaded = parameter_map.load(_SHIPPED)
    self.assertEqual(config, _CONFIG)
    self.assertEqual(
        {k: (v.shape, str(v.dtype)) for k, v in loaded.items()},
        parameters.leaves(_CONFIG),
    )
    stored = _tensors()
    at = "layers.5"
    bits.assert_same_bits(
        loaded[f"{at}.moe.gate_up"][7],
        np.concatenate(
            [stored[f"{at}.ffn.experts.7.{w}.weight"] for w in ("w1", "w3")]
        ),
    )
    bits.assert_same_bits(
        loaded[f"{at}.attention.sinks"],
        stored[f"{at}.attn.attn_sink"].astype(np.float32),
    )
    self.assertEqual(
        sum(array.size for array in loaded.values()),
        sum(tensor.size for tensor in stored.values()),
    )

  def test_stored_in_bfloat16_but_for_hash_tables(self):
    tables = {f"layers.{i}.ffn.gate.tid2eid" for i in _CONFIG.hash_layers}
    self.assertContainsSubset(tables, _tensors())
    for name, tensor in _tensors().items():
      expected = np.int64 if name in tables else ml_dtypes.bfloat16
      self.assertEqual(tensor.dtype, np.dtype(expected), name)

  def test_rows_of_matrices_are_aligned_for_grouped_products(self):
    matrices = [n for n in _tensors() if ".experts." in n]
    self.assertLen(matrices, 8 * 16 * 3)
    for name in matrices:
      tensor = _tensors()[name]
      self.assertEqual(tensor.shape[1] * tensor.itemsize % 16, 0, name)

  def test_rows_of_hash_tables_are_distinct_experts(self):
    tables = [
        _tensors()[f"layers.{i}.ffn.gate.tid2eid"] for i in _CONFIG.hash_layers
    ]
    self.assertLen(tables, 2)
    for table in tables:
      self.assertEqual(table.shape, (1024, 6))
      self.assertTrue(all(len({*row}) == 6 for row in table.tolist()))
      counts = np.bincount(table.ravel(), minlength=16)
      self.assertLen(counts, 16)
      self.assertGreater(counts.min(), 1024 * 6 / 16 * 0.8)
      self.assertGreater(len({tuple(row) for row in table.tolist()}), 1000)
    self.assertLess(np.mean(tables[0] == tables[1]), 0.1)

  def test_no_value_is_neutral_where_transformers_starts_neutral(self):
    neutral = {
        "attn_sink": 0, "ape": 0, "ffn.gate.bias": 0, "_base": 0, "_scale": 1,
        "norm.weight": 1,
    }
    for ending, value in neutral.items():
      found = [n for n in _tensors() if n.endswith(ending)]
      self.assertGreater(len(found), 5, ending)
      for name in found:
        tensor = _tensors()[name].astype(np.float32)
        self.assertLess(np.mean(tensor == value), 0.1, name)
        if tensor.size > 1:
          self.assertGreater(tensor.std(), 0.04, name)

  def test_no_two_tensors_are_alike(self):
    digests = {
        hashlib.sha256(t.tobytes()).digest()
        for t in _tensors().values()
        if t.size > 3
    }
    self.assertLen(digests, sum(t.size > 3 for t in _tensors().values()))


class FormatTest(absltest.TestCase):

  def test_transformers_takes_every_tensor_and_no_other(self):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        _SHIPPED, dtype="auto", local_files_only=True, output_loading_info=True
    )
    self.assertContainsSubset({"missing_keys", "unexpected_keys"}, info)
    for kind, names in info.items():
      self.assertEmpty(names, kind)
    self.assertEqual(model.config.layer_types[5], "compressed_sparse_attention")
    self.assertEqual(model.config.compress_rates,
                     {"compressed_sparse_attention": 4,
                      "heavily_compressed_attention": 8})
    self.assertEqual(model.generation_config.eos_token_id, 0)
    self.assertEqual(model.generation_config.pad_token_id, 1)


@absltest.skipUnless(_BFLOAT16_RUNS, "this transformers runs float32 only")
class ModelTest(parameterized.TestCase):

  @parameterized.parameters("eager", "grouped_mm")
  def test_prompts_of_every_length_run_and_do_not_repeat(self, implementation):
    captures = _reference(implementation).run(
        [_prompt(length) for length in _LENGTHS], 5,
        wanted=trajectory.keep_none,
    )
    self.assertLen(captures, len(_LENGTHS))
    for capture in captures:
      self.assertLen(capture.steps, 6)
      for step in capture.steps:
        logits = step.taps["logits"].astype(np.float32)
        self.assertTrue(np.isfinite(logits).all())
        self.assertBetween(logits.std(), 2.0, 8.0)
      self.assertGreaterEqual(len({*capture.generated}), 5)
    for left, right in itertools.combinations(captures, 2):
      self.assertNotEqual(left.generated, right.generated)

  def test_greedy_text_of_the_shipped_prompts_varies(self):
    tokens = tokenizer.Tokenizer(_SHIPPED)
    prompts = [
        trajectory.Prompt(prompt.id, tuple(tokens.encode(prompt.text)))
        for prompt in tokenizer.read_prompts(shipped.TINY_PROMPTS)
    ]
    captures = _reference().run(prompts, 15, wanted=trajectory.keep_none)
    gaps = []
    for capture in captures:
      self.assertGreaterEqual(len({*capture.generated}), 10)
      for step in capture.steps:
        second, best = np.sort(step.taps["logits"][-1].astype(np.float32))[-2:]
        gaps.append(best - second)
    self.assertLen(gaps, 6 * 16)
    self.assertBetween(np.median(gaps), 0.4, 2.0)
    # bfloat16 has steps of 1/16 at the size of these logits.
    self.assertGreater(np.mean(np.asarray(gaps) > 1 / 16), 0.8)

  def test_experts_share_the_tokens(self):
    for layer in range(_CONFIG.num_layers):
      ids = _taps()[f"layers.{layer}.moe.router.ids"]
      counts = np.bincount(ids.ravel(), minlength=16)
      self.assertGreater(counts.min(), 0, layer)
      self.assertLess(counts.max() / ids.size, 1 / 8, layer)

  def test_gates_are_not_uniform(self):
    for layer in range(_CONFIG.num_layers):
      gates = _taps()[f"layers.{layer}.moe.router.gates"].astype(np.float32)
      self.assertGreater(np.median(gates.max(1) / gates.min(1)), 1.2, layer)

  def test_the_bias_changes_the_experts_of_some_tokens(self):
    self.assertLen(_top_k_layers(), 6)
    for layer in _top_k_layers():
      at = f"layers.{layer}.moe.router"
      scores = _taps()[f"{at}.scores"].astype(np.float32)
      chosen = np.sort(_taps()[f"{at}.ids"], 1)
      without = np.sort(np.argsort(-scores, 1, kind="stable")[:, :6], 1)
      changed = np.mean((chosen != without).any(1))
      self.assertBetween(changed, 0.2, 0.9, layer)

  def test_an_indexer_leaves_entries_out_and_not_always_the_oldest(self):
    self.assertLen(_layers(_CSA), 3)
    for layer in _layers(_CSA):
      visible = _taps()[f"layers.{layer}.attention.indexer.visible"]
      self.assertEqual(visible.shape, (130, 32))
      complete = (np.arange(130) + 1) // 4
      np.testing.assert_array_equal(visible.sum(1), np.minimum(complete, 4))
      newest = (np.arange(32) < complete[:, None]) & (
          np.arange(32) >= complete[:, None] - 4
      )
      same = (visible == newest).all(1)[complete > 4]
      self.assertLess(same.mean(), 0.3, layer)
      self.assertGreater((visible.sum(0) > 0).mean(), 0.8, layer)

  def test_attention_reads_window_entries_and_sink(self):
    for layer, entries in enumerate(
        {"swa": 0, _CSA: 32, _HCA: 16}[k] for k in _CONFIG.attentions
    ):
      weights = _taps()[f"layers.{layer}.attention.softmax_with_sink"]
      weights = weights.astype(np.float32)
      self.assertEqual(weights.shape, (4, 130, 130 + entries + 1))
      last = weights[:, -1]
      np.testing.assert_array_equal((last[:, :130] > 0).sum(1), 8)
      self.assertGreater(last[:, -1].min(), 1e-4, layer)
      if entries:
        self.assertGreater(weights[:, 64:, 130:-1].sum(-1).mean(), 0.1, layer)
      # Neither uniform nor one key alone.
      self.assertBetween(last[:, :-1].max(1).mean(), 0.15, 0.9, layer)

  def test_the_limit_of_swiglu_is_met_sometimes(self):
    limit = _CONFIG.swiglu_limit
    for layer in range(_CONFIG.num_layers):
      at = f"layers.{layer}.moe"
      gate_up = _taps()[f"{at}.experts.gate_up"].astype(np.float32)
      gate, up = np.split(gate_up, 2, -1)
      shared = _taps()[f"{at}.shared.up_proj"].astype(np.float32)
      for met in (gate > limit, np.abs(up) > limit, np.abs(shared) > limit):
        self.assertBetween(met.mean(), 0.002, 0.2, layer)

  def test_hyper_connections_keep_the_streams_apart(self):
    for layer in range(_CONFIG.num_layers):
      streams = _taps()[f"layers.{layer}.streams"].astype(np.float32)
      apart = np.std(streams - streams.mean(1, keepdims=True))
      self.assertGreater(apart / streams.std(), 0.1, layer)


@absltest.skipIf(_BFLOAT16_RUNS, "this transformers runs bfloat16")
class OldVersionTest(absltest.TestCase):

  def test_a_version_that_runs_float32_only_is_named(self):
    with self.assertRaisesRegex(
        refusal.UnsupportedError, "transformers 5.17.0 cannot run"
    ):
      _reference().run([_prompt(9)], 0)


if __name__ == "__main__":
  absltest.main()
