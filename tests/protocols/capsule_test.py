"""Capsules: written, read, verified."""

import json
import pathlib
import shutil
import tempfile

from absl.testing import absltest

from moejax.contracts import refusal
from moejax.protocols import capsule
from moejax.protocols import compare
from moejax.protocols import trajectory
from tests.protocols import sample

_IDENTITIES = {"portable": {
    "model": "qwen3_moe",
    "checkpoint": "c" * 64,
    "tokenizer": "t" * 64,
    "decoding": {"strategy": "greedy", "steps": 1},
    "contract": "d" * 64,
}}


class CapsuleTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp()) / "capsule"
    self.addCleanup(shutil.rmtree, self.folder.parent)
    self.run_ = trajectory.run(sample.decoder(), sample.PROMPTS, 1)
    self.digest = capsule.write(
        self.folder, {"portable": self.run_}, {"backend": {}}, _IDENTITIES
    )

  def test_what_was_written_is_read_back_bit_for_bit(self):
    back = capsule.read(self.folder, "portable")
    found = compare.compare(back, self.run_)
    self.assertEqual(set(found.levels().values()), {"same_bits"})
    self.assertEmpty(found.missing)
    self.assertEqual(
        list(back[0].steps[0].taps), list(self.run_[0].steps[0].taps)
    )
    self.assertEqual(back[1].generated, self.run_[1].generated)

  def test_the_same_run_gives_the_same_bytes(self):
    other = self.folder.parent / "other"
    digest = capsule.write(
        other, {"portable": self.run_}, {"backend": {}}, _IDENTITIES
    )
    self.assertEqual(digest, self.digest)
    for path in sorted(self.folder.rglob("*.*")):
      twin = other / path.relative_to(self.folder)
      self.assertEqual(path.read_bytes(), twin.read_bytes(), path.name)

  def test_no_file_is_a_pickle(self):
    names = {p.name for p in self.folder.rglob("*") if p.is_file()}
    self.assertEqual(
        names, {"manifest.json", "long.safetensors", "short.safetensors"}
    )

  def test_one_changed_bit_is_refused(self):
    path = self.folder / "portable" / "short.safetensors"
    content = bytearray(path.read_bytes())
    content[-200] ^= 1
    path.write_bytes(content)
    with self.assertRaisesRegex(refusal.HarnessError, "short.*fingerprint"):
      capsule.read(self.folder, "portable")

  def test_a_truncated_file_is_refused(self):
    path = self.folder / "portable" / "long.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with self.assertRaisesRegex(refusal.HarnessError, "long.safetensors"):
      capsule.read(self.folder, "portable")

  def test_a_value_of_another_identity_is_refused(self):
    path = self.folder / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    manifest["identities"]["portable"]["checkpoint"] = "e" * 64
    path.write_text(json.dumps(manifest), "utf-8")
    with self.assertRaisesRegex(refusal.HarnessError, "fingerprint"):
      capsule.read(self.folder, "portable")

  def test_what_is_no_capsule_is_refused(self):
    with self.assertRaisesRegex(refusal.HarnessError, "no manifest.json"):
      capsule.read_manifest(self.folder / "portable")
    with self.assertRaisesRegex(refusal.HarnessError, "not 'native'"):
      capsule.read(self.folder, "native")
    (self.folder / "manifest.json").write_text('{"schema": "x"}', "utf-8")
    with self.assertRaisesRegex(refusal.HarnessError, "capsule/1"):
      capsule.read_manifest(self.folder)

  def test_a_prompt_id_never_becomes_a_path(self):
    one = self.run_[0]
    one.prompt_id = "../../evil id"
    other = self.folder.parent / "other"
    capsule.write(other, {"portable": [one]}, {"backend": {}}, _IDENTITIES)
    files = [p.parent.name for p in other.rglob("*.safetensors")]
    self.assertEqual(files, ["portable"])
    self.assertEqual(
        capsule.read(other, "portable")[0].prompt_id, "../../evil id"
    )


if __name__ == "__main__":
  absltest.main()
