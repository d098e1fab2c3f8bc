"""Which documents are trained on, which are held out.

The rule. Keys (see `place.key`) are taken in ascending order of
SHA-256("<seed>\\n<key>"). A key goes to the test part if that part then holds
at most its share of the characters of every language in it; else to the
validation part by the same rule; else to the training part. So parts are
declared by share, documents of one key stay together, translations of each
other among them, and no order of reading has a say.

A paragraph of a held-out document that a training document has as well, short
ones included, is taken out of the held-out one.

Layer: experiments.
"""

from collections.abc import Mapping
import hashlib

from moejax.contracts import refusal

TRAIN, VALIDATION, TEST = "train", "validation", "test"
PARTS = (TRAIN, VALIDATION, TEST)


def rank(seed: int, key: str) -> bytes:
  """Returns what keys are ordered by."""
  return hashlib.sha256(f"{seed}\n{key}".encode()).digest()


def assign(
    sizes: Mapping[str, Mapping[str, int]], seed: int, share: float
) -> dict[str, str]:
  """Assigns every key to a part.

  Args:
    sizes: {key: {language: characters}}.
    seed: Chooses the order of the keys.
    share: What the test part may have of each language's characters, and the
      validation part.

  Raises:
    ValueError: the share is not above 0 and below 0.5.
    refusal.HarnessError: a part is left without one of the languages.
  """
  if not 0.0 < share < 0.5:
    raise ValueError(f"share={share} is not above 0 and below 0.5.")
  total: dict[str, int] = {}
  for languages in sizes.values():
    for language, count in languages.items():
      total[language] = total.get(language, 0) + count
  held = {part: dict.fromkeys(total, 0) for part in PARTS}
  assigned = {}
  for key in sorted(sizes, key=lambda k: rank(seed, k)):
    part = next(
        (
            part
            for part in (TEST, VALIDATION)
            if all(
                held[part][x] + n <= share * total[x]
                for x, n in sizes[key].items()
            )
        ),
        TRAIN,
    )
    assigned[key] = part
    for language, count in sizes[key].items():
      held[part][language] += count
  for part in PARTS:
    for language, count in held[part].items():
      if not count:
        raise refusal.HarnessError(
            f"no document of language {language} fits the {part} part with a"
            f" share of {share}: there are {len(sizes)} documents with"
            f" {total[language]} characters of it. Give more documents or a"
            " larger share."
        )
  return assigned
