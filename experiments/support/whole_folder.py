"""A folder of files, made whole or not at all.

Layer: experiments.
"""

from collections.abc import Mapping
import pathlib
import tempfile


def replace(out: pathlib.Path, content: Mapping[str, bytes]) -> None:
  """Makes a folder of files in the place of whatever stands there.

  The folder is whole or not there: it is written beside its place, and an
  older one is deleted only after the new one is in place.

  Args:
    out: The folder; its parents are made.
    content: {name: bytes}.
  """
  out.parent.mkdir(parents=True, exist_ok=True)
  # The folder itself is made inside, because a temporary directory is private
  # to its owner and what is made here is not.
  with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as d:
    fresh, old = pathlib.Path(d) / "fresh", pathlib.Path(d) / "old"
    fresh.mkdir()
    for name, data in content.items():
      (fresh / name).write_bytes(data)
    if out.exists():
      out.rename(old)
    try:
      fresh.rename(out)
    except BaseException:
      # Leaving this block deletes whatever still lies in it.
      if old.exists():
        old.rename(out)
      raise
