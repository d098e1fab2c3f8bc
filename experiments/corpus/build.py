"""A corpus from packages: documents, split, tokenizer, tokens, baselines.

Each part is one stream of token ids: the end-of-text token, then every
document followed by that token, so that it stands before every document as
well. Documents lie in the order of their keys in `split`, which mixes
languages and packages.

Layer: experiments.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import hashlib
import io
import json
import pathlib
from typing import Any

import numpy as np
import tokenizers

from experiments.corpus import balance
from experiments.corpus import baselines
from experiments.corpus import clean
from experiments.corpus import documents
from experiments.corpus import duplicates
from experiments.corpus import licences
from experiments.corpus import place
from experiments.corpus import split
from experiments.corpus import store
from experiments.tiny import tokenizer as bpe
from moejax.contracts import refusal

LICENCES = "LICENSES.md"
_MAX_VOCAB = 1 << 16  # ids are uint16


@dataclasses.dataclass(frozen=True)
class Request:
  """What a corpus is asked for.

  Attributes:
    vocab_size: Number of tokens, special ones included.
    seed: Chooses which documents are held out, and their order.
    share: Share of each language's characters in the validation part, and in
      the test part.
    max_length: model_max_length of the tokenizer.
  """

  vocab_size: int = 6144
  seed: int = 20260101
  share: float = 0.04
  max_length: int = 2048

  def __post_init__(self):
    if not 258 < self.vocab_size <= _MAX_VOCAB:
      raise ValueError(
          f"vocab_size={self.vocab_size} is not above 258 (256 bytes and two"
          f" special tokens) and at most {_MAX_VOCAB}."
      )
    if self.max_length < 1:
      raise ValueError(f"max_length={self.max_length} is below 1.")


def build(
    folder: str | pathlib.Path,
    request: Request,
    report: Callable[[str], None],
) -> dict[str, bytes]:
  """Builds a corpus.

  Args:
    folder: Holds the packages.
    request: What is asked for.
    report: Is told of progress.

  Returns:
    {name: content} of all files: corpus.json, LICENSES.md, tokenizer.json,
    tokenizer_config.json, and of each part <part>.tokens.npy (uint16 [N]) and
    <part>.txt (its documents, for the eye). The same input gives the same
    bytes.

  Raises:
    ValueError: see `split.assign`.
    refusal.HarnessError: see `documents.read` and `split.assign`; or the text
      is too short for the vocabulary.
  """
  reading = documents.read(folder, report)
  found, gone = balance.balance(reading.documents, request.seed)
  parts = _split(found, request)
  text = {p: "".join(x.text for x in parts[p]) for p in split.PARTS}
  report(f"training the tokenizer on {len(text['train'])} characters")
  try:
    trained = bpe.train(text[split.TRAIN], request.vocab_size)
  except ValueError as error:
    raise refusal.HarnessError(f"too little training text: {error}") from error
  files = {
      "tokenizer.json": trained.encode(),
      "tokenizer_config.json": _json(bpe.tokenizer_config(request.max_length)),
  }
  report("encoding")
  encoder = tokenizers.Tokenizer.from_str(trained)
  streams, spans = {}, []
  for part in split.PARTS:
    streams[part], rows = _encode(encoder, part, parts[part])
    spans += rows
    files[f"{part}.tokens.npy"] = _npy(streams[part])
    files[f"{part}.txt"] = text[part].encode()
  sources = [
      {
          **source,
          "documents": sum(x["package"] == source["name"] for x in spans),
      }
      for source in reading.sources
  ]
  files[LICENCES] = licences.notice(
      x for x in sources if x["documents"]
  ).encode()
  content = {
      "schema": store.SCHEMA,
      "request": dataclasses.asdict(request),
      "special_tokens": {
          "bos": bpe.END_OF_TEXT_ID, "eos": bpe.END_OF_TEXT_ID,
          "pad": bpe.PAD_ID,
      },
      "files": {
          name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
          for name, data in sorted(files.items())
      },
      "dropped": {**reading.dropped, "unbalanced": gone},
      "counts": _counts(spans),
      "baselines": _baselines(streams, spans, request.vocab_size),
      "sources": sources,
      "documents": spans,
  }
  files[store.DOCUMENT] = _json(content)
  return files


def _split(
    found: Sequence[documents.Document], request: Request
) -> dict[str, list[documents.Document]]:
  """Returns the documents of each part, ordered, held-out ones cleaned."""
  sizes: dict[str, dict[str, int]] = {}
  for x in found:
    of_key = sizes.setdefault(x.key, {})
    of_key[x.language] = of_key.get(x.language, 0) + len(x.text)
  assigned = split.assign(sizes, request.seed, request.share)
  ordered = sorted(
      found,
      key=lambda x: (split.rank(request.seed, x.key), x.language, x.package,
                     x.path),
  )
  parts = {
      p: [x for x in ordered if assigned[x.key] == p] for p in split.PARTS
  }
  trained = {
      duplicates.units(y.text) for x in parts["train"] for y in x.paragraphs
  }
  for part in (split.VALIDATION, split.TEST):
    fresh = []
    for x in parts[part]:
      kept = clean.document(
          [y for y in x.paragraphs if duplicates.units(y.text) not in trained],
          x.language,
      )
      if kept:
        fresh.append(dataclasses.replace(x, paragraphs=tuple(kept)))
    parts[part] = fresh
    for language in place.LANGUAGES:
      if not any(x.language == language for x in fresh):
        raise refusal.HarnessError(
            f"the {part} part has no text of language {language} that the"
            " training part lacks. Give more documents or a larger share."
        )
  return parts


def _encode(encoder, part: str, found: Sequence[documents.Document]):
  """Returns the stream of a part and, per document, where it lies there."""
  end = bpe.END_OF_TEXT_ID
  texts = [x.text for x in found]
  stream, rows = [end], []
  for x, text, encoded in zip(
      found, texts, encoder.encode_batch(texts, add_special_tokens=False)
  ):
    if end in encoded.ids or bpe.PAD_ID in encoded.ids:
      raise refusal.HarnessError(
          f"package {x.package}: {x.path} holds a special token as text."
      )
    rows.append({
        "part": part, "language": x.language, "package": x.package,
        "path": x.path, "key": x.key, "start": len(stream),
        "stop": len(stream) + len(encoded.ids) + 1, "characters": len(text),
    })
    stream += [*encoded.ids, end]
  return np.array(stream, "<u2"), rows


def _counts(spans: Sequence[dict]) -> dict[str, Any]:
  """Sums documents, characters and tokens by part, language and package."""
  counts: dict[str, Any] = {}
  for x in spans:
    for group in (x["part"], f"package {x['package']}"):
      row = counts.setdefault(group, {}).setdefault(
          x["language"], {"documents": 0, "characters": 0, "tokens": 0}
      )
      row["documents"] += 1
      row["characters"] += x["characters"]
      row["tokens"] += x["stop"] - x["start"]
  for group in counts.values():
    for row in group.values():
      row["tokens_per_character"] = row["tokens"] / row["characters"]
  return counts


def _baselines(streams, spans, vocab_size: int) -> dict[str, Any]:
  """Returns mean losses by held-out part and language; see `baselines`."""
  counts = baselines.fit(streams[split.TRAIN], vocab_size)
  result: dict[str, Any] = {
      "unit": "nats per token, the end-of-text token of documents included",
      "unigram": "one added to each count",
      "bigram": "interpolated after Witten and Bell",
  }
  for part in (split.VALIDATION, split.TEST):
    nats = {
        "unigram": baselines.unigram_nats(counts, streams[part]),
        "bigram": baselines.bigram_nats(counts, streams[part]),
    }
    result[part] = {
        language: {
            name: float(
                np.concatenate([
                    values[x["start"] - 1 : x["stop"] - 1]
                    for x in spans
                    if x["part"] == part and x["language"] == language
                ]).mean()
            )
            for name, values in nats.items()
        }
        for language in place.LANGUAGES
    }
  return result


def _npy(array: np.ndarray) -> bytes:
  buffer = io.BytesIO()
  np.save(buffer, array, allow_pickle=False)
  return buffer.getvalue()


def _json(content: Any) -> bytes:
  text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
  return (text + "\n").encode()
