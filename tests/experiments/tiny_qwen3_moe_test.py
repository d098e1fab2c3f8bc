"""Tests of the tiny Qwen3-MoE checkpoint: the shipped files and their maker.

Why this file exists: experiments rest on properties of the checkpoint that
nobody sees by looking at it: that it can be remade bit for bit, that
transformers loads every tensor of it, and that its routes, its attention and
its greedy text are varied enough to tell a right implementation from a wrong
one. The bounds leave room for machines that round bfloat16 products in another
order, since a near tie can send a greedy continuation elsewhere.
"""

import hashlib
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
import ml_dtypes
import numpy as np
import safetensors.numpy

from experiments.tiny import checkpoint_folder
from experiments.tiny import qwen3_moe as tiny_qwen3_moe
from experiments.tiny import tokenizer

_ROOT = pathlib.Path(__file__).parents[2]
_SHIPPED = tiny_qwen3_moe.SHIPPED
_STEPS = 16
_MAX_BYTES = 4_000_000


def _content(folder: pathlib.Path) -> dict[str, bytes]:
  """Reads every file of a folder; returns the bytes by relative path."""
  return {
    str(p.relative_to(folder)): p.read_bytes()
    for p in folder.rglob("*")
    if not p.is_dir()
  }


def _prompts() -> list[str]:
  """Returns the texts of the shipped prompts."""
  document = json.loads((_SHIPPED / "prompts.json").read_text("utf-8"))
  return [prompt["text"] for prompt in document["prompts"]]


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
        sys.executable, "-m", "experiments.make_tiny_qwen3_moe",
        f"--out={out}",
      ],
      cwd=_ROOT, check=True, capture_output=True, text=True,
    )
    made = _content(out)
    self.assertEqual(
      sorted(made),
      sorted((*tiny_qwen3_moe.SOURCES, *checkpoint_folder.GENERATED)),
    )
    shipped = _content(_SHIPPED)
    self.assertEqual(sorted(made), sorted(shipped))
    # Names, not contents, so that a failure does not print a megabyte.
    self.assertEmpty([name for name in made if made[name] != shipped[name]])
    summary = json.loads(run.stdout.splitlines()[-1])
    shapes = tiny_qwen3_moe.tensor_shapes().values()
    self.assertEqual(
      summary,
      {
        "schema": "make_checkpoint/1",
        "out": str(out),
        "num_parameters": sum(math.prod(shape) for shape in shapes),
        "sha256": {
          name: hashlib.sha256(shipped[name]).hexdigest()
          for name in ("model.safetensors", "tokenizer.json", "config.json")
        },
      },
    )

  def test_replaces_an_earlier_result_and_leaves_nothing_beside_it(self):
    out = self.parent / "made"
    tiny_qwen3_moe.make(out, seed=1)
    first = _content(out)
    tiny_qwen3_moe.make(out, seed=2)
    second = _content(out)
    self.assertEqual(
      [name for name in first if first[name] != second[name]],
      ["model.safetensors"],
    )
    self.assertEqual(list(self.parent.iterdir()), [out])

  def test_files_are_as_readable_as_any_new_file(self):
    out = self.parent / "made"
    tiny_qwen3_moe.make(out)
    usual = self.parent / "usual"
    usual.mkdir()
    (usual / "file").touch()
    self.assertEqual(out.stat().st_mode, usual.stat().st_mode)
    self.assertEqual(
      {path.stat().st_mode for path in out.iterdir()},
      {(usual / "file").stat().st_mode},
    )

  def test_refuses_a_folder_of_another_origin(self):
    made = self.parent / "made"
    tiny_qwen3_moe.make(made)
    cases = {
      "unknown_file": {**_content(made), "notes.txt": b"mine"},
      "nested_folder": {**_content(made), "old/config.json": b"{}"},
      "other_checkpoint": {"config.json": b"{}", "model.safetensors": b""},
      "other_readme": {**_content(made), "README.md": b"mine"},
    }
    for name, files in cases.items():
      with self.subTest(name):
        out = self.parent / name
        for path, content in files.items():
          (out / path).parent.mkdir(parents=True, exist_ok=True)
          (out / path).write_bytes(content)
        with self.assertRaisesRegex(ValueError, name):
          tiny_qwen3_moe.make(out)
        self.assertEqual(_content(out), files)

  def test_refuses_a_file(self):
    out = self.parent / "file"
    out.write_bytes(b"mine")
    with self.assertRaisesRegex(ValueError, "not a folder"):
      tiny_qwen3_moe.make(out)
    self.assertEqual(out.read_bytes(), b"mine")

  def test_failure_leaves_the_earlier_result_and_nothing_else(self):
    out = self.parent / "made"
    tiny_qwen3_moe.make(out, seed=1)
    before = _content(self.parent)
    failure = OSError("disk full")
    rename = pathlib.Path.rename

    def rename_all_but_the_new(path, target):
      if path.name == "fresh":
        raise failure
      return rename(path, target)

    faults = {
      "writing": mock.patch.object(
        safetensors.numpy, "save", side_effect=failure
      ),
      "renaming": mock.patch.object(
        pathlib.Path, "rename", rename_all_but_the_new
      ),
    }
    for name, fault in faults.items():
      with self.subTest(name):
        with fault, self.assertRaisesRegex(OSError, "disk full"):
          tiny_qwen3_moe.make(out, seed=2)
        self.assertEqual(
          {k: hashlib.sha256(v).digest() for k, v in before.items()},
          {
            k: hashlib.sha256(v).digest()
            for k, v in _content(self.parent).items()
          },
        )
        self.assertEqual(list(self.parent.iterdir()), [out])


class TensorsTest(absltest.TestCase):

  def test_stored_under_the_classic_names_in_bfloat16(self):
    tensors = safetensors.numpy.load_file(_SHIPPED / "model.safetensors")
    self.assertEqual(
      {name: tensor.shape for name, tensor in tensors.items()},
      tiny_qwen3_moe.tensor_shapes(),
    )
    self.assertEqual(
      {tensor.dtype for tensor in tensors.values()},
      {np.dtype(ml_dtypes.bfloat16)},
    )
    self.assertLen([n for n in tensors if ".experts." in n], 4 * 16 * 3)

  def test_spread_follows_the_kind(self):
    tensors = safetensors.numpy.load_file(_SHIPPED / "model.safetensors")
    for name, centre, spread in (
      ("model.embed_tokens.weight", 0.0, 0.478),
      ("model.layers.1.mlp.gate.weight", 0.0, 0.153),
      ("model.layers.2.mlp.experts.7.down_proj.weight", 0.0, 0.298),
      ("model.layers.3.post_attention_layernorm.weight", 1.0, 0.099),
      ("model.layers.0.self_attn.q_norm.weight", 1.5, 0.099),
    ):
      with self.subTest(name):
        values = tensors[name].astype(np.float64)
        error = 4.0 * spread / values.size**0.5
        self.assertAlmostEqual(values.mean(), centre, delta=error)
        self.assertAlmostEqual(values.std(), spread, delta=error)
        self.assertGreater(len(np.unique(values)), values.size**0.5)

  def test_every_tensor_has_its_own_stream(self):
    shape = (4, 8)
    stem = "model.layers.0.mlp.experts."
    draws = [
      tiny_qwen3_moe.draw(f"{stem}{expert}.up_proj.weight", shape, seed)
      for expert, seed in ((0, 5), (1, 5), (0, 6))
    ]
    for left, right in itertools.combinations(draws, 2):
      self.assertFalse(np.array_equal(left, right))

  def test_refuses_an_unknown_kind(self):
    for name in ("model.layers.0.mlp.gate.bias", "model.lm_tail.weight"):
      with self.subTest(name), self.assertRaisesRegex(ValueError, name):
        tiny_qwen3_moe.draw(name, (1,), 0)


class TokenizerTest(absltest.TestCase):

  def test_training_does_not_depend_on_threads(self):
    text = (_SHIPPED / "corpus.txt").read_text("utf-8")
    shipped = (_SHIPPED / "tokenizer.json").read_text("utf-8")
    for parallel in ("false", "true"):
      environ = {"TOKENIZERS_PARALLELISM": parallel}
      with self.subTest(parallel), mock.patch.dict(os.environ, environ):
        self.assertTrue(tokenizer.train(text) == shipped)

  def test_refuses_a_short_text(self):
    with self.assertRaisesRegex(ValueError, "1024"):
      tokenizer.train("why the sheep")

  def test_both_languages_are_in_the_text(self):
    lines = (_SHIPPED / "corpus.txt").read_text("utf-8").split("\n")
    total = sum(len(line.encode()) for line in lines)
    english = sum(len(line) for line in lines if line.isascii())
    self.assertBetween(total, 12_000, 20_000)
    self.assertBetween(english / total, 0.4, 0.6)


class ModelTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    import torch
    import transformers

    cls.model, cls.loading_info = (
      transformers.AutoModelForCausalLM.from_pretrained(
        _SHIPPED,
        dtype="auto",
        attn_implementation="eager",
        experts_implementation="grouped_mm",
        local_files_only=True,
        output_loading_info=True,
      )
    )
    cls.model.eval()
    cls.tokenizer = transformers.AutoTokenizer.from_pretrained(
      _SHIPPED, local_files_only=True
    )
    layers = cls.model.model.layers
    chosen = [[] for _ in layers]
    hooks = [
      layer.mlp.gate.register_forward_hook(
        lambda module, inputs, output, into=into: into.append(
          output[2].numpy()
        )
      )
      for layer, into in zip(layers, chosen, strict=True)
    ]
    cls.continuations, cls.gaps = [], []
    for prompt in _prompts():
      batch = cls.tokenizer(prompt, return_tensors="pt")
      # One token more than is looked at, so that the last of them, too, goes
      # through the routers.
      result = cls.model.generate(
        **batch,
        max_new_tokens=_STEPS + 1,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
      )
      new = result.sequences[0, batch["input_ids"].shape[1] :]
      cls.continuations.append(new[:_STEPS].tolist())
      for logits in result.logits[:_STEPS]:
        best = torch.topk(logits[0].float(), 2).values
        cls.gaps.append(float(best[0] - best[1]))
    for hook in hooks:
      hook.remove()
    # int64[tokens, 6] for each layer.
    cls.routes = [np.concatenate(parts) for parts in chosen]

  def test_folder_is_small(self):
    size = sum(len(content) for content in _content(_SHIPPED).values())
    self.assertLess(size, _MAX_BYTES)

  def test_loads_every_tensor_and_no_other(self):
    import torch

    for kind, names in self.loading_info.items():
      self.assertEmpty(names, kind)
    self.assertIn("missing_keys", self.loading_info)
    self.assertIn("unexpected_keys", self.loading_info)
    self.assertEqual(
      {p.dtype for p in self.model.parameters()}, {torch.bfloat16}
    )
    stored = safetensors.numpy.load_file(_SHIPPED / "model.safetensors")
    self.assertEqual(
      sum(p.numel() for p in self.model.parameters()),
      sum(tensor.size for tensor in stored.values()),
    )
    state = self.model.state_dict()
    for layer, expert in ((0, 0), (3, 15)):
      stem = f"model.layers.{layer}.mlp.experts."
      fused = state[f"{stem}gate_up_proj"][expert].float().numpy()
      parts = [
        stored[f"{stem}{expert}.{name}.weight"].astype(np.float32)
        for name in ("gate_proj", "up_proj")
      ]
      np.testing.assert_array_equal(fused, np.concatenate(parts))

  def test_config_is_understood(self):
    config = self.model.config
    self.assertEqual(config.rope_parameters["rope_theta"], 1000000.0)
    self.assertEqual(config.num_experts, 16)
    self.assertEqual(config.num_experts_per_tok, 6)
    self.assertTrue(config.norm_topk_prob)
    self.assertEqual(config._attn_implementation, "eager")
    self.assertEqual(config._experts_implementation, "grouped_mm")
    self.assertEqual(self.model.generation_config.eos_token_id, 0)
    self.assertEqual(self.model.generation_config.pad_token_id, 1)

  def test_tokenizer_is_the_one_in_the_file(self):
    import tokenizers

    plain = tokenizers.Tokenizer.from_file(str(_SHIPPED / "tokenizer.json"))
    self.assertEqual(plain.get_vocab_size(), self.model.config.vocab_size)
    self.assertLen(self.tokenizer, self.model.config.vocab_size)
    self.assertEqual(self.tokenizer.eos_token_id, 0)
    self.assertEqual(self.tokenizer.pad_token_id, 1)
    # All 256 bytes are tokens, so any text comes back, seen before or not.
    for text in (*_prompts(), "Ångström 🐑\t\r\n  $€ 羴"):
      with self.subTest(text):
        ids = plain.encode(text).ids
        self.assertEqual(plain.decode(ids), text)
        self.assertEqual(self.tokenizer(text)["input_ids"], ids)
        self.assertEqual(self.tokenizer.decode(ids), text)

  def test_prompts(self):
    document = json.loads((_SHIPPED / "prompts.json").read_text("utf-8"))
    self.assertEqual(document["schema"], "prompts/1")
    prompts = document["prompts"]
    self.assertLen({prompt["id"] for prompt in prompts}, 6)
    self.assertLen({prompt["text"] for prompt in prompts}, 6)
    lengths = [len(self.tokenizer(p)["input_ids"]) for p in _prompts()]
    self.assertBetween(max(lengths), 25, 40)
    self.assertLess(min(lengths), 8)

  def test_routes_vary(self):
    tokens = sum(len(self.tokenizer(p)["input_ids"]) for p in _prompts())
    tokens += _STEPS * len(_prompts())
    for layer, routes in enumerate(self.routes):
      with self.subTest(layer=layer):
        self.assertEqual(routes.shape, (tokens, 6))
        counts = np.bincount(routes.ravel(), minlength=16)
        self.assertLen(counts, 16)
        self.assertGreater(counts.min(), 0)
        # A token has six different experts, so one expert can take a sixth of
        # the slots at most. An even share is a sixteenth.
        self.assertLess(counts.max() / routes.size, 1 / 8)
        sets = {tuple(sorted(row)) for row in routes.tolist()}
        self.assertGreater(len(sets), tokens / 2)

  def test_tokens_vary(self):
    for prompt, ids in zip(_prompts(), self.continuations, strict=True):
      with self.subTest(prompt):
        self.assertLen(ids, _STEPS)
        self.assertGreaterEqual(len(set(ids)), 10)
        self.assertNoCommonElements(ids, self.tokenizer.all_special_ids)
        for token in ids:
          self.assertNotEmpty(self.tokenizer.decode([token]))
    for left, right in itertools.combinations(self.continuations, 2):
      self.assertNotEqual(left, right)

  def test_best_token_leads_by_a_realistic_distance(self):
    self.assertLen(self.gaps, 6 * _STEPS)
    self.assertBetween(float(np.median(self.gaps)), 0.4, 2.0)
    # bfloat16 has steps of 1/16 at the size of these logits.
    self.assertGreater(np.mean(np.asarray(self.gaps) > 1 / 16), 0.8)

  def test_attention_is_not_uniform(self):
    import torch

    longest = max(_prompts(), key=len)
    batch = self.tokenizer(longest, return_tensors="pt")
    with torch.no_grad():
      output = self.model(**batch, output_attentions=True)
    length = batch["input_ids"].shape[1]
    for layer, weights in enumerate(output.attentions):
      with self.subTest(layer=layer):
        # float32[heads], the largest weight of the last position.
        peaks = weights[0, :, -1].float().max(dim=-1).values
        self.assertGreater(float(peaks.mean()) * length, 3.0)
        self.assertLess(float(peaks.mean()), 0.9)


if __name__ == "__main__":
  absltest.main()
