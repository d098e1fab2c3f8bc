"""The table of files in WORKSPACE_NOTES.md is the tree."""

import pathlib
import re

from absl.testing import absltest

_ROOT = pathlib.Path(__file__).parents[1]
_FOLDERS = ("moejax", "pallas_kernels", "torch_bridge", "experiments")


def listed(notes: str) -> set[str]:
  """Returns the paths in the notes: a bold folder, then its rows."""
  found, folder = set(), None
  for line in notes.splitlines():
    heading = re.match(r"\*\*([a-z0-9_/]+)\*\*:", line)
    row = re.match(r"\| `([\w.]+)` \|", line)
    if heading:
      folder = heading[1]
    elif row and folder:
      found.add(f"{folder}/{row[1]}")
  return found


class WorkspaceNotesTest(absltest.TestCase):

  def test_every_file_has_its_phrase_and_every_phrase_its_file(self):
    tree = {
        str(path.relative_to(_ROOT))
        for folder in _FOLDERS
        for path in (_ROOT / folder).rglob("*")
        if path.suffix in (".py", ".html") and path.name != "__init__.py"
    }
    notes = (_ROOT / "WORKSPACE_NOTES.md").read_text("utf-8")
    self.assertEqual(listed(notes), tree)

  def test_a_row_belongs_to_the_folder_above_it(self):
    self.assertEqual(
        listed("**a/b**: why.\n\n| `c.py` | x |\n**d**: y.\n| `e.py` | z |"),
        {"a/b/c.py", "d/e.py"},
    )


if __name__ == "__main__":
  absltest.main()
