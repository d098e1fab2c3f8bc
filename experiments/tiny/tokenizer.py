"""A byte-level BPE tokenizer trained on the text that ships beside it.

Why this file exists: the tiny checkpoint needs a tokenizer that is small, that
knows both English and Chinese, and that comes out the same byte for byte every
time it is trained. Being byte-level, it can encode any text at all, so no
unknown token is needed and every encoded text decodes back to itself.

Training is deterministic because nothing that could vary decides anything: the
256 byte symbols are all given beforehand (so the text does not choose the
alphabet), word counts are sums, and pairs of equal count are merged in the
order of their ids. Threads only share out the counting; one or many give the
same file.
"""

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

VOCAB_SIZE = 1024
END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
END_OF_TEXT_ID = 0
PAD_ID = 1


def train(text: str, vocab_size: int = VOCAB_SIZE) -> str:
  """Trains the tokenizer on a text.

  Args:
    text: The training text, newlines included. It is cut into lines first, and
      a newline stays with the line that it ends.
    vocab_size: Number of tokens, the special ones included.

  Returns:
    The content of a tokenizer.json, ending in a newline.

  Raises:
    ValueError: If the text is too short to yield vocab_size tokens, or if a
      special token did not receive the id that this module names.
  """
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[END_OF_TEXT, PAD],
    # alphabet() returns another order in every process; the trainer sorts it
    # again, but nothing says that it always will.
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
  size = tokenizer.get_vocab_size()
  if size != vocab_size:
    raise ValueError(
      f"a text of {len(text)} characters yields {size} tokens, but the "
      f"checkpoint needs exactly {vocab_size}"
    )
  for token, wanted in ((END_OF_TEXT, END_OF_TEXT_ID), (PAD, PAD_ID)):
    found = tokenizer.token_to_id(token)
    if found != wanted:
      raise ValueError(f"token {token} has id {found}, not {wanted}")
  return tokenizer.to_str(pretty=True) + "\n"


def tokenizer_config(model_max_length: int) -> dict[str, object]:
  """Builds what tokenizer_config.json says.

  Args:
    model_max_length: The longest sequence, in tokens, that the model takes.

  Returns:
    A JSON-serialisable dict. It names the generic tokenizer class, because the
    class that transformers would pick for the model type brings its own
    pre-tokenizer instead of reading the one in tokenizer.json.
  """
  return {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "pad_token": PAD,
    "unk_token": None,
    "clean_up_tokenization_spaces": False,
    "model_max_length": model_max_length,
  }
