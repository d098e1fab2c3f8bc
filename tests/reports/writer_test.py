"""The writer: whole or not at all, and never over what is not ours.

Needs no accelerator.
"""

import json
import os
import pathlib
import stat
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import refusal
from moejax.reports import writer as lib
from tests.reports import samples

_FILES = ["junit.xml", "report.html", "report.json", "report.md"]


def _tree(root: pathlib.Path) -> dict[str, bytes]:
  return {
      str(p.relative_to(root)): p.read_bytes()
      for p in root.rglob("*") if p.is_file()
  }


class FolderTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory())
    ).resolve()
    self.out = self.root / "out"

  def _write(self, text: str = "new", out=None) -> None:
    with lib.folder(out or self.out) as fresh:
      (fresh / "report.json").write_text(
          json.dumps({"schema": "conformance/1", "text": text})
      )
      (fresh / "capsule_ours").mkdir()
      (fresh / "capsule_ours" / "manifest.json").write_text(text)

  def test_a_report_appears_at_once_and_alone(self):
    with lib.folder(self.out) as fresh:
      self.assertEqual(fresh.parent, self.root)
      self.assertEqual(list(fresh.iterdir()), [])
      (fresh / "report.json").write_text("{}")
      self.assertFalse(self.out.exists())
    self.assertEqual(_tree(self.root), {"out/report.json": b"{}"})

  def test_an_earlier_report_is_replaced_whole(self):
    self._write("old")
    (self.out / "junit.xml").write_text("old")
    self._write("new")
    self.assertEqual(
        sorted(_tree(self.root)),
        ["out/capsule_ours/manifest.json", "out/report.json"],
    )
    self.assertIn("new", (self.out / "report.json").read_text())

  def test_an_empty_folder_is_taken(self):
    self.out.mkdir()
    self._write()
    self.assertTrue((self.out / "report.json").is_file())

  def test_a_link_to_a_report_stays_a_link(self):
    self._write("old")
    link = self.root / "link"
    link.symlink_to(self.out)
    self._write("new", link)
    self.assertTrue(link.is_symlink())
    self.assertIn("new", (self.out / "report.json").read_text())

  def test_missing_parents_are_made(self):
    self._write(out=self.root / "a" / "b" / "out")
    self.assertTrue((self.root / "a" / "b" / "out" / "report.json").is_file())

  @parameterized.parameters(KeyError, KeyboardInterrupt, SystemExit)
  def test_an_exception_leaves_nothing_behind(self, error):
    with self.assertRaises(error):
      with lib.folder(self.root / "a" / "b") as fresh:
        (fresh / "report.json").write_text("{}")
        raise error("stop")
    self.assertEqual(list(self.root.iterdir()), [])

  def test_an_exception_leaves_the_earlier_report_intact(self):
    self._write("old")
    before = _tree(self.root)
    with self.assertRaises(KeyError):
      with lib.folder(self.out) as fresh:
        (fresh / "report.json").write_text("{}")
        raise KeyError("stop")
    self.assertEqual(_tree(self.root), before)

  def test_refuses_what_is_not_ours_before_the_body_runs(self):
    self._write("old")
    for name in "dcba":
      (self.out / name).write_text("mine")
    before = _tree(self.root)
    ran = False
    with self.assertRaisesRegex(
        refusal.HarnessError, "out holds .*: a, b, c and 1 more"
    ):
      with lib.folder(self.out):
        ran = True
    self.assertFalse(ran)
    self.assertEqual(_tree(self.root), before)

  @parameterized.parameters(
      "{}", "[]", "", '{"schema": 1}', '{"schema": "capsule/1"}', "\xff"
  )
  def test_refuses_another_report_json(self, text):
    self.out.mkdir()
    (self.out / "report.json").write_bytes(text.encode("latin-1"))
    with self.assertRaisesRegex(refusal.HarnessError, "out holds report.json"):
      self._write()
    self.assertEqual((self.out / "report.json").read_bytes(),
                     text.encode("latin-1"))

  def test_refuses_our_names_without_a_report_json(self):
    self.out.mkdir()
    (self.out / "report.html").write_text("mine")
    with self.assertRaisesRegex(refusal.HarnessError, "no report.json"):
      self._write()

  def test_refuses_a_file(self):
    self.out.write_text("mine")
    with self.assertRaisesRegex(refusal.HarnessError, "not a folder"):
      self._write()
    self.assertEqual(self.out.read_text(), "mine")

  def test_refuses_a_parent_that_is_a_file(self):
    self.out.write_text("mine")
    with self.assertRaisesRegex(refusal.HarnessError, "out"):
      self._write(out=self.out / "a" / "b")

  def test_refuses_a_parent_that_cannot_be_written(self):
    error = PermissionError("no")
    with mock.patch.object(lib.tempfile, "mkdtemp", side_effect=error):
      with self.assertRaisesRegex(refusal.HarnessError, "cannot be written"):
        self._write(out=self.root / "a" / "out")
    self.assertEqual(list(self.root.iterdir()), [])

  def test_refuses_a_mount_point(self):
    self.out.mkdir()
    with mock.patch.object(pathlib.Path, "is_mount", return_value=True):
      with self.assertRaisesRegex(refusal.HarnessError, "mount point"):
        self._write()

  def test_foreign_files_that_came_meanwhile_are_kept_as_is_the_report(self):
    with self.assertRaisesRegex(refusal.HarnessError, "kept in") as caught:
      with lib.folder(self.out) as fresh:
        (fresh / "report.json").write_text("{}")
        self.out.mkdir()
        (self.out / "mine").write_text("mine")
    self.assertIn(str(fresh), str(caught.exception))
    self.assertEqual((self.out / "mine").read_text(), "mine")
    self.assertEqual((fresh / "report.json").read_text(), "{}")

  def test_a_failed_move_puts_the_earlier_report_back(self):
    self._write("old")
    before = _tree(self.out)
    rename = pathlib.Path.rename

    def fail(path, target):
      if target == self.out and path.name != "earlier":
        raise OSError("full")
      return rename(path, target)

    with mock.patch.object(pathlib.Path, "rename", fail):
      with self.assertRaisesRegex(refusal.HarnessError, "kept in"):
        self._write("new")
    self.assertEqual(_tree(self.out), before)
    self.assertLen(list(self.root.iterdir()), 2)

  def test_everybody_may_read_it(self):
    mask = os.umask(0o077)
    try:
      self._write()
    finally:
      os.umask(mask)
    for path in (self.out, *self.out.rglob("*")):
      mode = stat.S_IMODE(path.stat().st_mode)
      self.assertEqual(mode, 0o755 if path.is_dir() else 0o644, path)


class WriteTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.out = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory())
    ).resolve()

  def test_four_files_that_all_may_read(self):
    mask = os.umask(0o077)
    try:
      lib.write(samples.conformant(), self.out)
    finally:
      os.umask(mask)
    self.assertEqual(sorted(p.name for p in self.out.iterdir()), _FILES)
    for path in self.out.iterdir():
      self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o644)

  def test_the_document_is_the_report(self):
    report = samples.not_conformant()
    lib.write(report, self.out)
    text = (self.out / "report.json").read_text("utf-8")
    self.assertEqual(
        text,
        json.dumps(report, indent=1, sort_keys=True, ensure_ascii=False) + "\n",
    )
    self.assertIn(samples.CHINESE, text)

  def test_two_writes_give_equal_bytes(self):
    lib.write(samples.not_conformant(), self.out)
    before = _tree(self.out)
    lib.write(samples.not_conformant(), self.out)
    self.assertEqual(_tree(self.out), before)

  def test_a_written_report_is_ours_to_replace(self):
    out = self.out / "report"
    for _ in range(2):
      with lib.folder(out) as fresh:
        lib.write(samples.conformant(), fresh)
    self.assertEqual(sorted(p.name for p in out.iterdir()), _FILES)

  def test_half_a_character_is_written_as_its_escape(self):
    report = samples.conformant()
    report["prompts"][0]["text"] = "a\ud83d"
    lib.write(report, self.out)
    read = json.loads((self.out / "report.json").read_text("utf-8"))
    self.assertEqual(read["prompts"][0]["text"], "a\ud83d")


if __name__ == "__main__":
  absltest.main()
