"""A corpus of made-up packages: split, tokens, digests, bits, refusals."""

import errno
import hashlib
import io
import json
import os
import pathlib
import random
import resource
import subprocess
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import transformers

from experiments.corpus import balance
from experiments.corpus import build
from experiments.corpus import documents
from experiments.corpus import duplicates
from experiments.corpus import paragraph
from experiments.corpus import split
from experiments.corpus import store
from moejax.contracts import refusal
from tests.experiments.corpus import made_up
from torch_bridge.hf import tokenizer as bridge

_REQUEST = build.Request(vocab_size=400, seed=3, share=0.15, max_length=128)
_ROOT = pathlib.Path(__file__).parents[3]


def _quiet(_):
  pass


def _packages(test, pages: int = 24) -> pathlib.Path:
  folder = made_up.folder(test)
  rng = random.Random(1)
  for name, language in (("book", "en"), ("book-zh-cn", "zh")):
    made_up.deb(folder, name, made_up.files(rng, name, language, pages))
  return folder


class BuildTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    case = cls("test_the_files_are_accounted_for")
    cls.folder = _packages(case)
    cls.addClassCleanup(case.doCleanups)
    cls.files = build.build(cls.folder, _REQUEST, _quiet)
    cls.corpus = json.loads(cls.files["corpus.json"])

  def _tokens(self, part):
    return np.load(io.BytesIO(self.files[f"{part}.tokens.npy"]))

  def test_the_files_are_accounted_for(self):
    self.assertEqual(
        {*self.corpus["files"], "corpus.json"}, set(self.files)
    )
    for name, entry in self.corpus["files"].items():
      data = self.files[name]
      self.assertEqual(
          entry,
          {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
      )

  def test_the_same_input_gives_the_same_bytes_in_another_process(self):
    out = made_up.folder(self) / "corpus"
    done = subprocess.run(
        [sys.executable, "-m", "experiments.build_corpus",
         f"--packages={self.folder}", f"--out={out}", "--vocab_size=400",
         "--seed=3", "--held_out_share=0.15", "--model_max_length=128"],
        cwd=_ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONHASHSEED": "77", "JAX_PLATFORMS": "cpu",
             "RAYON_NUM_THREADS": "1"},
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(
        {path.name: path.read_bytes() for path in out.iterdir()}, self.files
    )
    summary = json.loads(done.stdout.splitlines()[-1])
    self.assertEqual(summary["schema"], "build_corpus/1")

  def test_another_seed_holds_out_other_documents(self):
    request = build.Request(vocab_size=400, seed=4, share=0.15)
    other = json.loads(
        build.build(self.folder, request, _quiet)["corpus.json"]
    )

    def held(corpus):
      return {x["path"] for x in corpus["documents"] if x["part"] == "test"}

    self.assertNotEqual(held(other), held(self.corpus))

  def test_tokens_decode_to_the_text_between_ends(self):
    out = made_up.folder(self) / "corpus"
    store.write(out, self.files)
    reader = bridge.Tokenizer(out)
    self.assertEqual(reader.vocab_size, 400)
    auto = transformers.AutoTokenizer.from_pretrained(str(out))
    special = self.corpus["special_tokens"]
    self.assertEqual(
        (auto.bos_token_id, auto.eos_token_id, auto.pad_token_id),
        (special["bos"], special["eos"], special["pad"]),
    )
    for part in split.PARTS:
      tokens = np.load(out / f"{part}.tokens.npy", mmap_mode="r")
      self.assertEqual(tokens.dtype, np.dtype("<u2"))
      spans = [x for x in self.corpus["documents"] if x["part"] == part]
      self.assertEqual(tokens[0], special["bos"])
      self.assertEqual(
          [x["start"] for x in spans], [1] + [x["stop"] for x in spans[:-1]]
      )
      self.assertEqual(spans[-1]["stop"], len(tokens))
      text = ""
      for x in spans:
        body = tokens[x["start"] : x["stop"] - 1]
        self.assertNotIn(special["eos"], body)
        self.assertEqual(tokens[x["stop"] - 1], special["eos"])
        text += reader.decode(body)
        self.assertEqual(
            auto.encode(reader.decode(body), add_special_tokens=False),
            list(body),
        )
      self.assertEqual(text.encode(), self.files[f"{part}.txt"])

  def test_no_held_out_paragraph_is_trained_on(self):
    def units(part):
      text = self.files[f"{part}.txt"].decode()
      return {duplicates.units(x) for x in text.split("\n\n")} - {()}

    for part in (split.VALIDATION, split.TEST):
      self.assertNotEmpty(units(part))
      self.assertEmpty(units(part) & units(split.TRAIN))

  def test_a_title_of_every_document_is_taken_out_of_held_out_ones(self):
    self.assertIn(b"Title", self.files["train.txt"])
    self.assertNotIn(b"Title", self.files["validation.txt"])
    self.assertNotIn(b"Title", self.files["test.txt"])

  def test_counterparts_are_on_one_side(self):
    sides = {}
    for x in self.corpus["documents"]:
      sides.setdefault(x["key"], []).append((x["part"], x["language"]))
    for key, found in sides.items():
      self.assertLen({part for part, _ in found}, 1, key)
      self.assertLen({language for _, language in found}, 2, key)

  def test_counts_are_those_of_the_tokens(self):
    for part in split.PARTS:
      rows = self.corpus["counts"][part].values()
      self.assertEqual(
          sum(row["tokens"] for row in rows), len(self._tokens(part)) - 1
      )

  def test_baselines_are_below_a_guess_and_ordered(self):
    for part in (split.VALIDATION, split.TEST):
      for row in self.corpus["baselines"][part].values():
        self.assertLess(row["bigram"], row["unigram"])
        self.assertLess(row["unigram"], np.log(400))

  def test_the_sources_are_named(self):
    for source in self.corpus["sources"]:
      deb = self.folder / f"{source['name']}_{source['version']}_all.deb"
      self.assertEqual(
          source["sha256"], hashlib.sha256(deb.read_bytes()).hexdigest()
      )
      self.assertEqual(source["licences"], ["GPL-2+"])
      self.assertEqual(
          source["copyright_sha256"],
          hashlib.sha256(made_up.NOTICE).hexdigest(),
      )
      for said in (source["name"], "GPL-2+", source["sha256"], "A. Writer"):
        self.assertIn(said, self.files["LICENSES.md"].decode())

  def test_a_text_too_short_for_the_vocabulary_is_refused(self):
    request = build.Request(vocab_size=60000, share=0.15)
    with self.assertRaisesRegex(refusal.HarnessError, "too little training"):
      build.build(self.folder, request, _quiet)

  def test_too_few_documents_to_split_are_refused(self):
    with self.assertRaisesRegex(refusal.HarnessError, "larger share"):
      build.build(_packages(self, pages=2), _REQUEST, _quiet)


class RequestTest(parameterized.TestCase):

  @parameterized.parameters(258, 65537)
  def test_vocabularies_that_do_not_fit(self, size):
    with self.assertRaisesRegex(ValueError, f"vocab_size={size}"):
      build.Request(vocab_size=size)

  def test_the_binary_refuses_with_code_2(self):
    done = subprocess.run(
        [sys.executable, "-m", "experiments.build_corpus", "--out=x",
         f"--packages={made_up.folder(self)}"],
        cwd=_ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    self.assertEqual(done.returncode, 2)
    self.assertIn("holds no .deb file", done.stderr)
    self.assertEmpty(done.stdout)


class SplitTest(parameterized.TestCase):

  @parameterized.parameters(*range(5))
  def test_shares_hold_for_each_language(self, seed):
    rng = random.Random(seed)
    sizes = {
        f"k{i}": {x: rng.randint(50, 150) for x in ("en", "zh")}
        for i in range(200)
    }
    parts = split.assign(sizes, seed, 0.1)
    for language in ("en", "zh"):
      total = sum(x[language] for x in sizes.values())
      for part in (split.VALIDATION, split.TEST):
        held = sum(
            sizes[key][language] for key, p in parts.items() if p == part
        )
        self.assertBetween(held, 0.08 * total, 0.1 * total)

  def test_the_order_of_reading_has_no_say(self):
    sizes = {f"k{i}": {"en": 10 + i, "zh": 10} for i in range(50)}
    turned = dict(reversed(sizes.items()))
    self.assertEqual(split.assign(sizes, 0, 0.2), split.assign(turned, 0, 0.2))

  @parameterized.parameters(0.0, 0.5)
  def test_shares_that_make_no_sense(self, share):
    with self.assertRaisesRegex(ValueError, f"share={share}"):
      split.assign({"k": {"en": 1}}, 0, share)


class BalanceTest(absltest.TestCase):

  def test_only_single_documents_of_the_larger_language_go(self):
    def make(language, key, size):
      text = paragraph.Paragraph("text", "x" * size)
      return documents.Document("p" + language, key, language, key, (text,))

    pairs = [make(x, f"k{i}", 99) for i in range(4) for x in ("en", "zh")]
    single = [make("en", f"s{i}", 99) for i in range(10)]
    stay, gone = balance.balance(pairs + single, 0)
    self.assertEqual(stay[:8], pairs)
    # 14 documents of 100 bytes against 4: 5 are 1.25 times as many.
    self.assertLen(stay, 9)
    self.assertEqual(gone, 9)
    self.assertEqual(balance.balance(pairs, 0), (pairs, 0))


class StoreTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.out = made_up.folder(self) / "corpus"
    self.files = {
        "a.txt": b"a" * 5000,
        "corpus.json": b'{"schema": "corpus/1", "files": {"a.txt": 0}}',
    }

  def _content(self):
    return {path.name: path.read_bytes() for path in self.out.iterdir()}

  def test_an_earlier_corpus_is_replaced(self):
    store.write(self.out, self.files)
    self.files["a.txt"] = b"new"
    store.write(self.out, self.files)
    self.assertEqual(self._content(), self.files)
    self.assertLen(list(self.out.parent.iterdir()), 1)

  def test_anything_else_is_left_alone(self):
    store.write(self.out, self.files)
    (self.out / "mine.txt").write_bytes(b"mine")
    with self.assertRaisesRegex(refusal.HarnessError, "mine.txt"):
      store.write(self.out, self.files)
    self.assertEqual(self._content()["mine.txt"], b"mine")
    with self.assertRaisesRegex(refusal.HarnessError, "is no folder"):
      store.check(self.out / "mine.txt")

  def test_a_write_that_fails_leaves_the_earlier_corpus(self):
    store.write(self.out, self.files)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may grow beyond this, as on a disk that is full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
      with self.assertRaisesRegex(refusal.HarnessError, "cannot be written"):
        store.write(self.out, {**self.files, "a.txt": b"b" * 5000})
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    self.assertEqual(self._content(), self.files)
    self.assertLen(list(self.out.parent.iterdir()), 1)

  def test_a_rename_that_fails_brings_the_earlier_corpus_back(self):
    store.write(self.out, self.files)
    rename = pathlib.Path.rename

    def fails(path, target):
      if path.name == "fresh":
        raise OSError(errno.ENOSPC, "no space left")
      return rename(path, target)

    with mock.patch.object(pathlib.Path, "rename", fails):
      with self.assertRaisesRegex(refusal.HarnessError, "no space left"):
        store.write(self.out, {**self.files, "a.txt": b"new"})
    self.assertEqual(self._content(), self.files)


if __name__ == "__main__":
  absltest.main()
