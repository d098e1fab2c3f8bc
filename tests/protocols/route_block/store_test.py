"""A study is written whole or not at all, and never over what is not one."""

import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import refusal
from moejax.protocols.route_block import identity
from moejax.protocols.route_block import store as lib
from moejax.protocols.route_block import study
from tests.protocols.route_block import sample


def _files(folder: pathlib.Path) -> dict:
  return {
      str(p.relative_to(folder)): p.read_bytes()
      for p in sorted(folder.rglob("*"))
      if p.is_file()
  }


class StoreTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.root = sample.folder(self)

  def test_whole(self):
    sample.make(self.root / "deep" / "study")
    names = _files(self.root / "deep" / "study")
    self.assertLen(names, 31)
    self.assertEqual([p.name for p in self.root.iterdir()], ["deep"])
    self.assertEqual(
        [p.name for p in (self.root / "deep").iterdir()], ["study"]
    )

  def test_the_same_request_writes_the_same_bytes_over_an_earlier_study(self):
    before = _files(sample.make(self.root / "study"))
    (self.root / "study" / lib.CELLS).write_text("")
    self.assertEqual(_files(sample.make(self.root / "study")), before)

  def test_a_run_that_fails_leaves_the_earlier_study(self):
    before = _files(sample.make(self.root / "study"))

    def fail(surfaces, seen):
      if len(seen) > 5:
        raise RuntimeError("planted")
      return surfaces

    with self.assertRaisesRegex(RuntimeError, "planted"):
      sample.make(
          self.root / "study", how=sample.lying(lambda _: True, fail)
      )
    self.assertEqual(_files(self.root / "study"), before)
    self.assertEqual([p.name for p in self.root.iterdir()], ["study"])

  def test_a_study_that_cannot_be_moved_leaves_the_earlier_one(self):
    before = _files(sample.make(self.root / "study"))
    rename = pathlib.Path.rename

    def fail_for_the_new_one(path, target):
      if path.name == "new":
        raise OSError("planted")
      return rename(path, target)

    with mock.patch.object(pathlib.Path, "rename", fail_for_the_new_one):
      with self.assertRaisesRegex(OSError, "planted"):
        sample.make(self.root / "study")
    self.assertEqual(_files(self.root / "study"), before)

  @parameterized.parameters("notes.txt", "raw2")
  def test_a_folder_with_other_things_is_refused_untouched(self, name):
    place = self.root / "mine"
    place.mkdir()
    (place / name).write_text("x")
    with self.assertRaisesRegex(refusal.HarnessError, name):
      sample.make(place)
    self.assertEqual(_files(place), {name: b"x"})

  @parameterized.parameters(
      ("no manifest", None), ("schema", '{"schema": "capsule/1"}')
  )
  def test_a_manifest_of_something_else_is_no_study(self, message, text):
    place = self.root / "mine"
    (place / lib.RAW).mkdir(parents=True)
    if text:
      (place / lib.MANIFEST).write_text(text)
    with self.assertRaisesRegex(refusal.HarnessError, message):
      sample.make(place)

  def test_a_file_in_its_place_is_refused(self):
    (self.root / "file").write_text("x")
    with self.assertRaisesRegex(refusal.HarnessError, "not a folder"):
      sample.make(self.root / "file")

  def test_a_backend_must_be_one_of_three(self):
    with self.assertRaisesRegex(refusal.HarnessError, "'triton'"):
      study.Maker("triton", sample.compute, {}, lambda: "", {})

  def test_a_source_that_changes_meanwhile_keeps_nothing(self):
    digests = iter(("a", "b"))
    maker = sample.maker(source=lambda: next(digests))
    with self.assertRaisesRegex(refusal.HarnessError, "source file changed"):
      study.run(sample.REQUEST, maker, self.root / "study")
    self.assertEqual(list(self.root.iterdir()), [])


class IdentityTest(absltest.TestCase):

  def test_source_sees_a_byte_and_a_name(self):
    root = sample.folder(self)
    (root / "a").mkdir()
    (root / "a" / "x.py").write_text("1")
    before = identity.source(root, ["a"])
    (root / "a" / "notes.txt").write_text("1")
    self.assertEqual(identity.source(root, ["a"]), before)
    (root / "a" / "x.py").write_text("2")
    changed = identity.source(root, ["a"])
    (root / "a" / "x.py").rename(root / "a" / "y.py")
    self.assertLen({before, changed, identity.source(root, ["a"])}, 3)
    with self.assertRaisesRegex(refusal.HarnessError, "no source of b"):
      identity.source(root, ["b"])

  def test_native_files(self):
    self.assertLen(identity.native_files("numpy"), 64)
    with self.assertRaisesRegex(refusal.HarnessError, "no native library"):
      identity.native_files("absl-py")
    with self.assertRaisesRegex(refusal.HarnessError, "not installed"):
      identity.native_files("no-such-package-here")

  def test_binary_digest_covers_every_part(self):
    parts = ("oracle", {"numpy": "2"}, {"x": "0"}, "cpu")
    changed = ("vllm", {"numpy": "3"}, {"x": "1"}, "gpu")
    digests = {identity.binary(*parts)["digest"]}
    for i in range(4):
      digests.add(
          identity.binary(*parts[:i], changed[i], *parts[i + 1 :])["digest"]
      )
    self.assertLen(digests, 5)
    found = identity.binary(*parts)
    self.assertEqual(identity.binary_digest(found), found["digest"])


if __name__ == "__main__":
  absltest.main()
