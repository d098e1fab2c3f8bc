"""The words of a verdict, and the exit codes they become.

Layer: contracts. Imports nothing from this project.
"""

SAME_BITS = "same_bits"
WITHIN_RULE = "within_rule"
BEYOND_RULE = "beyond_rule"
MISSING = "missing"
UNSUPPORTED = "unsupported"

# From best to worst: a level is as good as its worst tap.
ORDER = (SAME_BITS, WITHIN_RULE, UNSUPPORTED, MISSING, BEYOND_RULE)
LEVELS = ("L0", "L1", "L2", "L3", "L4")

CONFORMANT = "conformant"
NOT_CONFORMANT = "not_conformant"
INCOMPLETE = "incomplete"

EXIT_CODES = {
    CONFORMANT: 0,
    NOT_CONFORMANT: 1,
    # 2 is a usage or harness error: no verdict.
    INCOMPLETE: 3,
    UNSUPPORTED: 4,
}


def worst(verdicts) -> str:
  """Returns the worst of some verdicts; MISSING if there are none."""
  found = set(verdicts)
  return max(found, key=ORDER.index) if found else MISSING


def overall(verdicts) -> str:
  """Returns the verdict of a whole comparison from those of its levels."""
  bad = worst(verdicts)
  return {
      SAME_BITS: CONFORMANT,
      WITHIN_RULE: CONFORMANT,
      UNSUPPORTED: UNSUPPORTED,
      MISSING: INCOMPLETE,
      BEYOND_RULE: NOT_CONFORMANT,
  }[bad]
