"""Builds the bilingual training text from Debian documentation packages.

Reads a folder of .deb files or unpacked packages that somebody has put there;
nothing is fetched. English and Simplified Chinese documents are cleaned to
prose, deduplicated, balanced, split by document, and encoded by a byte-level
BPE tokenizer trained on the training part. The rules are in experiments/corpus:
`place` (what is a document, and of which language), `html_text` and
`roff_text` (what is read), `clean` and `duplicates` (what stays), `balance`
and `split`, `baselines`.

  python -m experiments.build_corpus --packages=DIR --out=DIR

`out` holds corpus.json (counts, digests, sources, where each document lies),
LICENSES.md for a model card, the tokenizer, and of each part the tokens
(.tokens.npy, little-endian uint16, may be memory-mapped) and the text. The
last line of stdout is one JSON document, "build_corpus/1". Exit codes: 0
built, 2 usage or input at fault, 4 a package that cannot be read here.

Layer: experiments.
"""

import hashlib
import sys

from absl import flags

from experiments.corpus import build
from experiments.corpus import store
from experiments.support import binary
from moejax.contracts import refusal

_PACKAGES = flags.DEFINE_string(
    "packages", None, "Folder of .deb files or unpacked packages."
)
_OUT = flags.DEFINE_string(
    "out", None, "Folder to make: absent, empty, or an earlier corpus."
)
_DEFAULT = build.Request()
_VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", _DEFAULT.vocab_size, "Number of tokens."
)
_SEED = flags.DEFINE_integer(
    "seed", _DEFAULT.seed, "Chooses which documents are held out."
)
_SHARE = flags.DEFINE_float(
    "held_out_share",
    _DEFAULT.share,
    "Share of each language in the validation part, and in the test part.",
)
_MAX_LENGTH = flags.DEFINE_integer(
    "model_max_length", _DEFAULT.max_length, "What the tokenizer says of it."
)


def main() -> int:
  """Builds, writes, and prints the summary."""
  if not _PACKAGES.value or not _OUT.value:
    raise refusal.HarnessError("--packages and --out are needed.")
  store.check(_OUT.value)
  try:
    request = build.Request(
        _VOCAB_SIZE.value, _SEED.value, _SHARE.value, _MAX_LENGTH.value
    )
    files = build.build(
        _PACKAGES.value,
        request,
        lambda text: print(text, file=sys.stderr, flush=True),
    )
  except ValueError as error:
    raise refusal.HarnessError(str(error)) from error
  store.write(_OUT.value, files)
  binary.last_line({
      "schema": "build_corpus/1",
      "out": str(_OUT.value),
      "sha256": {
          name: hashlib.sha256(content).hexdigest()
          for name, content in sorted(files.items())
      },
  })
  return 0


if __name__ == "__main__":
  binary.run(main)
