"""How a binary of this project starts and ends.

Exit codes: 0 conformant, 1 beyond the rule, 2 usage or harness error, 3
incomplete, 4 unsupported. Python and absl end with 1 when anything goes wrong,
which would read as a verdict; everything unexpected becomes 2 here.

Layer: experiments.
"""

from collections.abc import Callable
from collections.abc import Sequence
import json
import sys
import traceback

from absl import app
from absl import flags
from absl import logging
import jax

from moejax.contracts import refusal

HARNESS_ERROR = 2
UNSUPPORTED = 4


def run(main: Callable[[], int]) -> None:
  """Parses flags, runs `main` in float64-capable JAX, exits with its code."""

  def guarded(argv: Sequence[str]) -> None:
    if len(argv) > 1:
      _fail(HARNESS_ERROR, f"unexpected arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)  # JAX reports absent backends.
    jax.config.update("jax_enable_x64", True)
    try:
      code = main()
    except refusal.UnsupportedError as error:
      _fail(UNSUPPORTED, str(error))
    except refusal.HarnessError as error:
      _fail(HARNESS_ERROR, str(error))
    except KeyboardInterrupt:
      _fail(HARNESS_ERROR, "interrupted")
    except Exception:  # pylint: disable=broad-exception-caught
      traceback.print_exc()
      _fail(HARNESS_ERROR, "unexpected error, see above")
    sys.exit(code)

  app.run(guarded, flags_parser=_parse)


def last_line(document: dict) -> None:
  """Prints a JSON document as the last line of stdout."""
  print(json.dumps(document, ensure_ascii=False), flush=True)


def _parse(argv: Sequence[str]) -> list[str]:
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    _fail(HARNESS_ERROR, f"{error}\nTry --help.")


def _fail(code: int, message: str) -> None:
  print(f"error: {message}", file=sys.stderr, flush=True)
  sys.exit(code)
