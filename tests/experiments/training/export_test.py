"""A trained model as others see it: transformers, conformance, the reader."""

import dataclasses
import hashlib
import json
import pathlib
import shutil
import tempfile

from absl.testing import absltest
import numpy as np
import pytest
import torch
import transformers

from experiments.training import corpus as corpus_lib
from experiments.training import export
from experiments.training import finish
from experiments.training import loop
from moejax.contracts import refusal
from moejax.training import models
from tests import bits
from tests.experiments.training import tiny_corpus
from tests.training import tiny
from torch_bridge import conformance
from torch_bridge import subject

_FILES = {
    "LICENSES.md", "README.md", "config.json", "generation_config.json",
    "loss.svg", "model.safetensors.index.json", "prompts.json",
    "tokenizer.json",
    "tokenizer_config.json", "training.json",
}
_OLD = transformers.__version__.startswith("5.17")


class ExportTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.scratch = pathlib.Path(tempfile.mkdtemp())
    cls.addClassCleanup(shutil.rmtree, cls.scratch)
    cls.corpus = corpus_lib.load(tiny_corpus.make(cls.scratch / "corpus"))

  def _train(self, config, name, recipe):
    model = models.of(
        dataclasses.replace(config, vocab_size=self.corpus.vocab_size)
    )
    return model, loop.train(model, recipe, self.corpus, self.scratch / name)

  def _assert_same_model(self, model, result, out):
    """In our reader bit for bit, in transformers by portable arithmetic."""
    loaded = subject.load(out)
    self.assertEqual(loaded.config, model.config)
    trained = result.state.params | result.state.fixed
    for path, (_, dtype) in model.leaves().items():
      bits.assert_same_bits(
          loaded.params[path], np.asarray(trained[path].astype(dtype))
      )
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True
    )
    self.assertFalse(any(info.values()), info)
    self.assertEqual(theirs.dtype, torch.bfloat16)
    if isinstance(model, models.DeepseekV4) and _OLD:
      self.skipTest("transformers 5.17 cannot run this model in bfloat16")
    prompts = self.scratch / "prompts.txt"
    prompts.write_text("The rain fell on the roof.\n", "utf-8")
    outcome = conformance.run(conformance.Request(
        checkpoint=str(out),
        prompts=str(prompts),
        decode_steps=1,
        arithmetics=("portable",),
    ))
    levels = outcome.report["arithmetics"]["portable"]["levels"]
    self.assertEqual(set(levels.values()), {"same_bits"})

  def test_a_trained_qwen3_moe_ships_with_record_and_card(self):
    model, result = self._train(tiny.QWEN3_MOE, "qwen3_moe", tiny.RECIPE)
    out = self.scratch / "qwen3_moe_model"
    # So small that there are several.
    with absltest.mock.patch.object(export, "SHARD_BYTES", 40_000):
      record = finish.finish(
          model, tiny.RECIPE, self.corpus, self.scratch / "qwen3_moe", result,
          out,
      )
    shards = sorted(p.name for p in out.glob("model-*.safetensors"))
    self.assertEqual(
        shards,
        [f"model-{i + 1:05d}-of-00002.safetensors" for i in range(2)],
    )
    self.assertEqual({p.name for p in out.iterdir()}, {*_FILES, *shards})
    for file, digest in record["sha256"].items():
      found = hashlib.sha256((out / file).read_bytes()).hexdigest()
      self.assertEqual(found, digest)
    self.assertEqual(
        json.loads((out / "training.json").read_text("utf-8")), record
    )
    self.assertEqual(record["schema"], "training/1")
    self.assertEqual((record["steps"], record["complete"]), (8, True))
    self.assertLess(record["train_loss"]["last"], record["train_loss"]["first"])
    self.assertEqual(record["validation"]["all"]["tokens"], 699)
    for part, tokens in (("en", 299), ("zh", 400)):
      self.assertEqual(record["validation"][part]["tokens"], tokens)
    self.assertAlmostEqual(
        record["baselines"]["all"]["unigram"], (299 * 6 + 400 * 6.5) / 699
    )
    card = (out / "README.md").read_text("utf-8")
    self.assertIn(record["sha256"][shards[0]], card)
    self.assertIn(f"{record['validation']['zh']['nats']:.4f}", card)
    with self.assertRaisesRegex(refusal.HarnessError, "holds something"):
      export.check_free(out)
    self._assert_same_model(model, result, out)

  @pytest.mark.slow
  def test_a_trained_deepseek_v4_is_the_same_model_in_transformers(self):
    config = dataclasses.replace(tiny.DEEPSEEK_V4, attentions=("csa", "hca"))
    recipe = dataclasses.replace(tiny.RECIPE, steps=4)
    model, result = self._train(config, "deepseek_v4", recipe)
    words, special = export.tokenizer_files(self.corpus.folder, 64)
    out = self.scratch / "deepseek_v4_model"
    params = export.weights(model, result.state.params | result.state.fixed)
    export.write(out, {
        **export.config_files(model, special),
        **export.model_files(model, params),
        **words,
    })
    self._assert_same_model(model, result, out)


if __name__ == "__main__":
  absltest.main()
