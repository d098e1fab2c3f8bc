"""As much of one language as of the other, nearly.

Layer: experiments.
"""

from collections.abc import Sequence

from experiments.corpus import documents
from experiments.corpus import place
from experiments.corpus import split

RATIO = 1.25


def balance(
    found: Sequence[documents.Document], seed: int
) -> tuple[list[documents.Document], int]:
  """Drops documents of the larger language until it is at most 1.25 times.

  Sizes are bytes of UTF-8, since a Chinese character says as much as a few
  letters. Only documents without a counterpart go, those of the last keys
  first (the order of `split`).

  Returns:
    The documents that stay, in their order, and how many went.
  """
  sizes = dict.fromkeys(place.LANGUAGES, 0)
  languages: dict[str, set[str]] = {}
  for document in found:
    sizes[document.language] += _size(document)
    languages.setdefault(document.key, set()).add(document.language)
  larger = max(sizes, key=sizes.get)
  limit = RATIO * min(sizes.values())
  single = [
      document
      for document in found
      if document.language == larger and len(languages[document.key]) == 1
  ]
  single.sort(key=lambda x: split.rank(seed, x.key), reverse=True)
  gone = set()
  for document in single:
    if sizes[larger] <= limit:
      break
    sizes[larger] -= _size(document)
    gone.add((document.package, document.path))
  stay = [x for x in found if (x.package, x.path) not in gone]
  return stay, len(gone)


def _size(document: documents.Document) -> int:
  return len(document.text.encode())
