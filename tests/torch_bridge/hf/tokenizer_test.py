"""Tokenizer and prompts: nothing is added, cut, repaired or let through."""

import hashlib
import json
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import transformers

from moejax.contracts import refusal
from torch_bridge.hf import tokenizer

_SHIPPED = (
    pathlib.Path(__file__).parents[3]
    / "experiments/checkpoints/tiny_qwen3_moe"
)


class FolderTestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory())
    )

  def write(self, name, content):
    path = self.folder / name
    if not isinstance(content, bytes):
      content = content.encode("utf-8")
    path.write_bytes(content)
    return path

  def write_prompts(self, *prompts, **changes):
    content = {"schema": "prompts/1", "prompts": list(prompts), **changes}
    return self.write("prompts.json", json.dumps(content))


class TokenizerTest(FolderTestCase):

  @parameterized.parameters(
      "why the sheep",
      "朋友昨天打来电话",
      "<|endoftext|> stays a token",
      " spaces \t and\r\nlines ",
      "\U0001f411 é",
  )
  def test_ids_and_text_are_those_of_transformers(self, text):
    ours = tokenizer.Tokenizer(_SHIPPED)
    theirs = transformers.AutoTokenizer.from_pretrained(
        _SHIPPED, local_files_only=True
    )
    ids = ours.encode(text)
    self.assertEqual(ids, theirs.encode(text, add_special_tokens=False))
    self.assertEqual(ours.decode(ids), theirs.decode(ids))
    self.assertEqual(ours.decode(ids), text)

  def test_special_tokens_are_shown_and_not_added(self):
    ours = tokenizer.Tokenizer(_SHIPPED)
    self.assertEqual(ours.decode([0]), "<|endoftext|>")
    self.assertNotIn(0, ours.encode("why the sheep"))

  def test_a_template_of_the_file_adds_no_token(self):
    content = json.loads((_SHIPPED / "tokenizer.json").read_text("utf-8"))
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {
            "<|endoftext|>": {
                "id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"],
            }
        },
    }
    self.write("tokenizer.json", json.dumps(content))
    self.assertEqual(
        tokenizer.Tokenizer(self.folder).encode("Morning"),
        tokenizer.Tokenizer(_SHIPPED).encode("Morning"),
    )

  def test_truncation_and_padding_of_the_file_change_no_prompt(self):
    content = json.loads((_SHIPPED / "tokenizer.json").read_text("utf-8"))
    content["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right",
        "pad_to_multiple_of": None, "pad_id": 1, "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }
    self.write("tokenizer.json", json.dumps(content))
    ours = tokenizer.Tokenizer(self.folder)
    self.assertEqual(
        ours.encode("why the sheep"),
        tokenizer.Tokenizer(_SHIPPED).encode("why the sheep"),
    )

  def test_digest_is_that_of_the_file(self):
    content = (_SHIPPED / "tokenizer.json").read_bytes()
    ours = tokenizer.Tokenizer(_SHIPPED)
    self.assertEqual(ours.digest, hashlib.sha256(content).hexdigest())
    self.assertEqual(ours.vocab_size, 1024)

  def test_refuses_a_folder_without_tokenizer(self):
    with self.assertRaisesRegex(
        refusal.HarnessError, r"tokenizer\.json is absent"
    ):
      tokenizer.Tokenizer(self.folder)

  @parameterized.parameters("{", "{}", '{"model": {"type": "?"}}')
  def test_refuses_a_damaged_tokenizer(self, text):
    self.write("tokenizer.json", text)
    with self.assertRaisesRegex(
        refusal.HarnessError, r"tokenizer\.json is no tokenizer"
    ):
      tokenizer.Tokenizer(self.folder)


class ReadPromptsTest(FolderTestCase):

  def assert_refused(self, path, pattern):
    with self.assertRaisesRegex(refusal.HarnessError, pattern) as caught:
      tokenizer.read_prompts(path)
    self.assertIn(str(path), str(caught.exception))

  def test_the_shipped_prompts_are_read(self):
    prompts = tokenizer.read_prompts(_SHIPPED / "prompts.json")
    self.assertLen(prompts, 6)
    self.assertEqual(
        prompts[0], tokenizer.Prompt("en_sheep", "why the sheep")
    )

  def test_lines_are_prompts_and_keep_what_is_in_them(self):
    path = self.write("p.txt", "\ufeffone\r\n two\u2028still two \n三")
    self.assertEqual(
        tokenizer.read_prompts(str(path)),
        [
            tokenizer.Prompt("line_1", "one"),
            tokenizer.Prompt("line_2", " two\u2028still two "),
            tokenizer.Prompt("line_3", "三"),
        ],
    )

  def test_the_end_of_the_last_line_is_no_prompt(self):
    self.assertLen(tokenizer.read_prompts(self.write("p.txt", "a\nb\n")), 2)

  @parameterized.parameters(
      ("a\n\nb", "prompt line_2 is empty"),
      ("a\nb\n \t\n", "prompt line_3 is empty"),
      ("\n", "prompt line_1 is empty"),
      ("", "holds no prompt"),
      (b"a\n\xff\n", "is not UTF-8"),
  )
  def test_refuses_lines(self, content, pattern):
    self.assert_refused(self.write("p.txt", content), pattern)

  @parameterized.parameters(
      ([{"id": "a", "text": ""}], "prompt a is empty"),
      ([{"id": "a", "text": "x"}, {"id": "a", "text": "y"}],
       "id 'a' occurs twice"),
      ([], "holds no prompt"),
      ([{"id": "a"}], "{'id': 'a'} is not an id and a text"),
      ([{"id": "", "text": "x"}], "is not an id and a text"),
      ([{"id": 3, "text": "x"}], "is not an id and a text"),
      ([{"id": "a", "text": "x", "seed": 1}], "'seed': 1} is not an id"),
      (["x"], "prompt 'x' is not"),
      ([{"id": "a", "text": "\ud83d"}], "prompt a holds half a surrogate"),
  )
  def test_refuses_entries(self, prompts, pattern):
    self.assert_refused(self.write_prompts(*prompts), pattern)

  @parameterized.parameters(
      ({"schema": "prompts/2"}, "schema 'prompts/2' is not 'prompts/1'"),
      ({"prompts": {"a": "x"}}, "expected schema and a list of prompts"),
      ({"more": 1}, "holds schema, prompts, more"),
  )
  def test_refuses_another_schema(self, changes, pattern):
    self.assert_refused(self.write_prompts(**changes), pattern)

  @parameterized.parameters(
      ("absent.json", "is absent"),
      ("absent.txt", "is absent"),
      ("prompts.csv", r"neither \.json nor \.txt"),
  )
  def test_refuses_a_file_that_it_cannot_read(self, name, pattern):
    self.assert_refused(self.folder / name, pattern)

  def test_refuses_damaged_json(self):
    self.assert_refused(self.write("p.json", "{"), "damaged JSON")


class EncodePromptsTest(FolderTestCase):

  def setUp(self):
    super().setUp()
    self.tokenizer = tokenizer.Tokenizer(_SHIPPED)
    self.sheep = tokenizer.Prompt("sheep", "why the sheep")

  def encode(self, *prompts, max_positions=1024, steps=16, vocab_size=1024):
    return tokenizer.encode_prompts(
        prompts, self.tokenizer, max_positions, steps, vocab_size
    )

  def test_prompts_are_encoded_in_their_order(self):
    other = tokenizer.Prompt("other", "Morning")
    self.assertEqual(
        self.encode(other, self.sheep),
        [
            tuple(self.tokenizer.encode("Morning")),
            tuple(self.tokenizer.encode("why the sheep")),
        ],
    )

  def test_a_prompt_may_fill_the_positions_and_no_more(self):
    self.assertLen(self.encode(self.sheep, max_positions=21, steps=16), 1)
    with self.assertRaisesRegex(
        refusal.HarnessError,
        "prompt sheep: 5 tokens and 16 decode steps exceed the model's 20",
    ):
      self.encode(self.sheep, max_positions=20, steps=16)

  def test_refuses_an_id_that_the_model_does_not_know(self):
    last = max(self.tokenizer.encode(self.sheep.text))
    self.assertLen(self.encode(self.sheep, vocab_size=last + 1), 1)
    with self.assertRaisesRegex(
        refusal.HarnessError,
        f"prompt sheep: token id {last} of .* vocabulary of {last}",
    ):
      self.encode(self.sheep, vocab_size=last)

  def test_refuses_a_prompt_that_encodes_to_nothing(self):
    content = json.loads((_SHIPPED / "tokenizer.json").read_text("utf-8"))
    content["normalizer"] = {
        "type": "Replace", "pattern": {"String": "x"}, "content": "",
    }
    self.write("tokenizer.json", json.dumps(content))
    self.tokenizer = tokenizer.Tokenizer(self.folder)
    with self.assertRaisesRegex(
        refusal.HarnessError, "prompt gone: 'xx' has no token"
    ):
      self.encode(tokenizer.Prompt("gone", "xx"))

  def test_refuses_negative_steps(self):
    with self.assertRaisesRegex(ValueError, "decode_steps=-1"):
      self.encode(self.sheep, steps=-1)


if __name__ == "__main__":
  absltest.main()
