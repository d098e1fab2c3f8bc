"""Packages are read whatever their form, and refused when damaged."""

import hashlib
import random
import shutil
import subprocess

from absl.testing import absltest
from absl.testing import parameterized

from experiments.corpus import documents
from experiments.corpus import licences
from experiments.corpus import packages
from experiments.corpus import place
from moejax.contracts import refusal
from tests.experiments.corpus import made_up


def _quiet(_):
  pass


def _html(path):
  return path.endswith(".html")


class PackagesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = made_up.folder(self)

  @parameterized.parameters("xz", "gz")
  def test_a_deb_gives_what_was_put_into_it(self, compression):
    content = made_up.files(random.Random(0), "book", "en", 2)
    path = made_up.deb(
        self.folder, "book", content, version="2:1.0", compression=compression
    )
    package = packages.read(path, _html)
    notice = content.pop("usr/share/doc/book/copyright")
    self.assertEqual((package.name, package.version), ("book", "2:1.0"))
    self.assertEqual(package.files, content)
    self.assertEqual(package.copyright, notice)
    self.assertEqual(
        package.digest, hashlib.sha256(path.read_bytes()).hexdigest()
    )

  def test_dpkg_reads_the_made_up_package_and_packs_one_in_zstd(self):
    # Proof that the packages of these tests are packages, and the way that
    # zstd goes.
    program = shutil.which("dpkg-deb")
    if program is None:
      with self.assertRaisesRegex(refusal.UnsupportedError, "dpkg-deb"):
        packages._through_dpkg(self.folder / "x.deb", "data.tar.zst")
      return
    content = made_up.files(random.Random(0), "book", "en", 2)
    path = made_up.deb(self.folder, "book", content)
    where = self.folder / "book"
    subprocess.run([program, "-R", str(path), str(where)], check=True)
    control = where / "DEBIAN" / "control"
    control.write_text(
        control.read_text() + "Architecture: all\nMaintainer: A <a@b.example>\n"
        "Description: made up\n"
    )
    zst = self.folder / "zst.deb"
    done = subprocess.run(
        [program, "-Zzstd", "--root-owner-group", "-b", str(where), str(zst)],
        capture_output=True, check=False,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn(b"data.tar.zst", zst.read_bytes())
    self.assertEqual(
        packages.read(zst, _html).files, packages.read(path, _html).files
    )

  def test_an_unpacked_package_is_read_as_its_deb(self):
    content = made_up.files(random.Random(0), "book", "en", 2)
    deb = packages.read(made_up.deb(self.folder, "book", content), _html)
    where = made_up.unpacked(self.folder, "book", content)
    folder = packages.read(where, _html)
    self.assertEqual(folder.files, deb.files)
    (where / "usr/share/doc/book/copyright").write_bytes(b"other")
    self.assertNotEqual(packages.read(where, _html).digest, folder.digest)

  def test_every_cut_of_a_deb_is_refused(self):
    path = made_up.deb(
        self.folder, "book", made_up.files(random.Random(0), "book", "en", 1)
    )
    whole = path.read_bytes()
    for size in [*range(0, len(whole) - 1, 37), len(whole) - 2]:
      path.write_bytes(whole[:size])
      with self.assertRaises(refusal.HarnessError, msg=f"{size} bytes"):
        packages.read(path, _html)

  def test_a_flipped_byte_in_the_data_is_refused(self):
    path = made_up.deb(
        self.folder, "book", made_up.files(random.Random(0), "book", "en", 1)
    )
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    with self.assertRaisesRegex(refusal.HarnessError, "damaged"):
      packages.read(path, _html)

  def test_an_unknown_compression_is_unsupported(self):
    path = made_up.deb(
        self.folder, "book", made_up.files(random.Random(0), "book", "en", 1)
    )
    data = path.read_bytes().replace(b"data.tar.xz ", b"data.tar.lz ")
    path.write_bytes(data)
    with self.assertRaisesRegex(refusal.UnsupportedError, "data.tar.lz"):
      packages.read(path, _html)

  def test_an_empty_or_absent_folder_is_refused(self):
    with self.assertRaisesRegex(refusal.HarnessError, "no .deb file"):
      packages.find(self.folder)
    with self.assertRaisesRegex(refusal.HarnessError, "is no folder"):
      packages.find(self.folder / "absent")


class LicencesTest(parameterized.TestCase):

  @parameterized.parameters(
      (b"License: GPL-2+ or MIT\n\nLicense: MIT\n text", ("GPL-2+", "MIT")),
      (b"under the GNU General\n Public License; either version 2 of",
       ("GPL-2",)),
      (b"Attribution-ShareAlike 3.0 Unported", ("CC-BY-SA-3.0",)),
  )
  def test_names(self, text, expected):
    self.assertEqual(licences.names("book", text), expected)

  @parameterized.parameters(
      (None, "its licence is unknown"),
      (b"Copyright 2001 Somebody", "names no licence"),
      (b"License: CC-BY-NC-4.0\n", "CC-BY-NC-4.0, which is not free"),
  )
  def test_refusals(self, text, message):
    with self.assertRaisesRegex(refusal.HarnessError, message):
      licences.names("book", text)

  def test_holders(self):
    self.assertEqual(
        licences.holders(
            b"Copyright: 2001 A\n           2002 B\nLicense: X\n 2003 no\n"
            b"Copyright (C) 2004, D.\n"
        ),
        ["2001 A", "2002 B", "2004, D"],
    )


class ReadingTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = made_up.folder(self)
    self.rng = random.Random(0)

  def _deb(self, name, language, pages=2, **kwargs):
    content = made_up.files(self.rng, name, language, pages)
    content |= kwargs.pop("add", {})
    for path in kwargs.pop("drop", ()):
      del content[path]
    return made_up.deb(self.folder, name, content, **kwargs)

  def test_both_languages_are_told_apart(self):
    self._deb("book", "en")
    self._deb("book-zh-cn", "zh")
    found = documents.read(self.folder, _quiet).documents
    self.assertEqual(
        [(x.package, x.language, x.key) for x in found],
        [("book-zh-cn", "zh", "book/html/ch00"),
         ("book-zh-cn", "zh", "book/html/ch01"),
         ("book", "en", "book/html/ch00"),
         ("book", "en", "book/html/ch01")],
    )

  def test_a_missing_language_is_refused(self):
    self._deb("book", "en")
    with self.assertRaisesRegex(refusal.HarnessError, "no document of .* zh"):
      documents.read(self.folder, _quiet)

  def test_english_under_a_chinese_name_is_dropped(self):
    self._deb("book", "en")
    self._deb("book-zh-cn", "en")
    with self.assertRaisesRegex(refusal.HarnessError, "no document of .* zh"):
      documents.read(self.folder, _quiet)

  def test_a_package_without_a_licence_is_refused(self):
    self._deb("book", "en")
    self._deb("book-zh-cn", "zh", drop=["usr/share/doc/book-zh-cn/copyright"])
    with self.assertRaisesRegex(refusal.HarnessError, "book-zh-cn has no usr"):
      documents.read(self.folder, _quiet)

  def test_a_documentation_folder_that_is_a_link_shares_the_licence(self):
    self._deb("book", "en")
    page = made_up.page(self.rng, "zh")
    made_up.deb(
        self.folder, "book-zh-cn", {"usr/share/book/html/ch00.html": page},
        links={"usr/share/doc/book-zh-cn": "book"},
    )
    sources = documents.read(self.folder, _quiet).sources
    self.assertEqual([x["licences"] for x in sources], [["GPL-2+"]] * 2)

  def test_bytes_that_are_no_text_are_refused(self):
    self._deb("book-zh-cn", "zh")
    for bad, message in ((b"<p>\xff\xfe\x01</p>", "no text in UTF-8"),
                         (b"<p>a\0b</p>", "holds a null")):
      path = self._deb(
          "book", "en", add={"usr/share/doc/book/html/bad.html": bad}
      )
      with self.assertRaisesRegex(refusal.HarnessError, message):
        documents.read(self.folder, _quiet)
      path.unlink()

  def test_a_package_that_is_there_twice_is_refused(self):
    self._deb("book", "en")
    self._deb("book", "en", version="2.0")
    with self.assertRaisesRegex(refusal.HarnessError, "book twice"):
      documents.read(self.folder, _quiet)

  def test_plain_text_counts_only_where_nothing_else_is(self):
    text = "\n\n".join(made_up.english(self.rng, 30) for _ in range(6))
    self._deb("book", "en", add={"usr/share/doc/book/a.txt": text.encode()})
    self._deb("book-zh-cn", "zh")
    made_up.deb(self.folder, "plain", {
        "usr/share/doc/plain/copyright": made_up.NOTICE,
        "usr/share/doc/plain/a.txt": text.encode(),
    })
    found = documents.read(self.folder, _quiet).documents
    self.assertEqual(
        [x.package for x in found if x.path.endswith(".txt")], ["plain"]
    )


class PlaceTest(parameterized.TestCase):

  @parameterized.parameters(
      ("book", "usr/share/doc/book/html/zh-CN/a.html", "zh"),
      ("book", "usr/share/doc/book/html/zh-TW/a.html", None),
      ("book", "usr/share/doc/book/a.de.html", None),
      ("book", "usr/share/doc/book/a.zh-cn.html", "zh"),
      ("book", "usr/share/doc/book/html/en-US/a.html", "en"),
      ("book", "usr/share/doc/book/id.html", "en"),
      ("book-zh-cn", "usr/share/doc/book/a.html", "zh"),
      ("book-zh-cn", "usr/share/man/zh_TW/man1/ls.1", None),
      ("book", "usr/share/man/man1/ls.1", "en"),
      ("book", "usr/share/man/pt_BR/man1/ls.1", None),
  )
  def test_language(self, package, path, expected):
    self.assertEqual(place.language(package, path), expected)

  @parameterized.parameters(
      (("coreutils", "usr/share/man/man1/ls.1"),
       ("manpages-zh", "usr/share/man/zh_CN/man1/ls.1")),
      (("faq", "usr/share/doc/debian/FAQ/a.en.html"),
       ("faq-zh-cn", "usr/share/doc/debian/FAQ/zh-cn/a.zh-cn.html")),
      (("edu-en", "usr/share/doc/edu-en/a.html"),
       ("edu-zh-cn", "usr/share/doc/edu-zh-cn/a.html")),
  )
  def test_counterparts_share_a_key(self, one, other):
    self.assertEqual(place.key(*one), place.key(*other))

  def test_other_pages_have_other_keys(self):
    keys = {
        place.key("manpages", f"usr/share/man/man{n}/{name}.{n}")
        for n in (1, 7) for name in ("ls", "id", "tar")
    }
    self.assertLen(keys, 6)


if __name__ == "__main__":
  absltest.main()
