"""Checkpoints: bits as in the file, and nothing missing, twice or left over."""

import hashlib
import json
import pathlib
import re
import shutil
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import numpy as np
import safetensors.numpy

from moejax.contracts import refusal
from moejax.numerics import fingerprint
from tests import bits
from tests.torch_bridge.hf import tiny_models
from torch_bridge.hf import checkpoint
from torch_bridge import tensor_bits

_CASES = pathlib.Path(__file__).parents[2] / "cases" / "files"
_EXPECTED = json.loads((_CASES / "special_values_expected.json").read_text())


class FolderTestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory())
    )

  def write(self, name, *tensors):
    """Writes a file that holds named float32 tensors of two elements."""
    arrays = {t: np.arange(2, dtype=np.float32) for t in tensors}
    safetensors.numpy.save_file(arrays, self.folder / name)

  def write_index(self, **shard_of):
    index = {"metadata": {"total_size": 8}, "weight_map": shard_of}
    (self.folder / checkpoint.INDEX).write_text(json.dumps(index))

  def assert_refused(self, *patterns):
    with self.assertRaises(refusal.HarnessError) as caught:
      checkpoint.Checkpoint(self.folder)
    for pattern in patterns:
      self.assertRegex(str(caught.exception), pattern)


class BitsTest(FolderTestCase):

  @parameterized.parameters(*_EXPECTED)
  def test_special_values_keep_their_bit_patterns(self, name):
    shutil.copy(
        _CASES / "special_values.safetensors", self.folder / checkpoint.SINGLE
    )
    opened = checkpoint.Checkpoint(self.folder)
    expected = _EXPECTED[name]
    array = opened.array(name)
    words = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    self.assertEqual(
        [f"{w:0{2 * array.dtype.itemsize}x}" for w in words.ravel()],
        expected["bits_hex"],
    )
    self.assertEqual(
        hashlib.sha256(array.tobytes()).hexdigest(),
        expected["sha256_raw_le_bytes"],
    )
    self.assertEqual(opened.shape(name), tuple(expected["shape"]))
    self.assertEqual(array.shape, tuple(expected["shape"]))
    self.assertEqual(opened.dtype(name), array.dtype.name)

  @parameterized.parameters(
      ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
  )
  def test_eight_bit_floats_have_the_bytes_of_the_file(self, dtype):
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    arrays = {
        "a": np.arange(3, dtype=np.float32),
        "b": codes.view(dtype),
        "c": codes[::-1].copy().view(dtype),
        "empty": codes[:0].view(dtype),
    }
    path = self.folder / checkpoint.SINGLE
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    opened = checkpoint.Checkpoint(self.folder)
    for name, array in arrays.items():
      bits.assert_same_bits(opened.array(name), array)
    self.assertEqual(
        opened.digest(), fingerprint.checkpoint_digest(arrays.items())
    )

  def test_all_tensors_of_the_file_were_compared(self):
    shutil.copy(
        _CASES / "special_values.safetensors", self.folder / checkpoint.SINGLE
    )
    self.assertEqual(
        checkpoint.Checkpoint(self.folder).names(), tuple(sorted(_EXPECTED))
    )

  def test_shards_hold_the_bits_and_the_digest_of_a_single_file(self):
    made = tiny_models.model()
    single = checkpoint.Checkpoint(
        tiny_models.save(made, self.folder / "single")
    )
    sharded = checkpoint.Checkpoint(
        tiny_models.save(made, self.folder / "sharded", max_shard_size="4KB")
    )
    self.assertLen(single.files, 1)
    self.assertGreater(len(sharded.files), 2)
    self.assertEqual(sharded.names(), single.names())
    for name, array in sharded.items():
      bits.assert_same_bits(array, single.array(name))
    self.assertEqual(sharded.digest(), single.digest())
    bits.assert_same_bits(
        single.array("model.norm.weight"),
        tensor_bits.to_numpy(made.model.norm.weight),
    )

  def test_digest_is_that_of_all_tensors_and_is_computed_once(self):
    self.write(checkpoint.SINGLE, "b", "a")
    opened = checkpoint.Checkpoint(self.folder)
    arange = np.arange(2, dtype=np.float32)
    expected = fingerprint.checkpoint_digest([("a", arange), ("b", arange)])
    with mock.patch.object(
        fingerprint, "checkpoint_digest", wraps=fingerprint.checkpoint_digest
    ) as digest:
      self.assertEqual(opened.digest(), expected)
      self.assertEqual(opened.digest(), expected)
    self.assertEqual(digest.call_count, 1)

  def test_opening_and_headers_read_no_tensor(self):
    self.write(checkpoint.SINGLE, "a")
    with mock.patch.object(checkpoint.safetensors, "safe_open") as safe_open:
      handle = safe_open.return_value
      handle.keys.return_value = ["a"]
      handle.get_slice.return_value.get_shape.return_value = [2]
      handle.get_slice.return_value.get_dtype.return_value = "F32"
      opened = checkpoint.Checkpoint(self.folder)
      self.assertEqual(opened.shape("a"), (2,))
      self.assertEqual(opened.dtype("a"), "float32")
      next(opened.items())
    handle.get_tensor.assert_called_once_with("a")

  def test_refuses_a_name_that_is_not_there(self):
    self.write(checkpoint.SINGLE, "a")
    opened = checkpoint.Checkpoint(self.folder)
    for read in (opened.array, opened.shape, opened.dtype):
      with self.assertRaisesRegex(ValueError, "no tensor 'b'"):
        read("b")

  def test_refuses_a_dtype_that_numpy_lacks(self):
    path = self.folder / checkpoint.SINGLE
    array = np.zeros(4, ml_dtypes.float8_e5m2)
    safetensors.numpy.save_file({"w": array.view(np.uint8)}, path)
    path.write_bytes(path.read_bytes().replace(b'"U8"', b'"F8_E5M2"', 1))
    content = path.read_bytes()
    header = content.index(b"}}") + 2 - 8
    path.write_bytes(
        header.to_bytes(8, "little") + content[8 : 8 + header] + bytes(4)
    )
    opened = checkpoint.Checkpoint(self.folder)
    self.assertEqual(opened.dtype("w"), "float8_e5m2")
    with self.assertRaisesRegex(refusal.HarnessError, "w of dtype float8_e5m2"):
      opened.array("w")


class SingleFileRefusalTest(FolderTestCase):

  def test_refuses_a_folder_that_is_absent(self):
    with self.assertRaisesRegex(refusal.HarnessError, "absent is not a folder"):
      checkpoint.Checkpoint(self.folder / "absent")

  def test_refuses_a_folder_without_weights(self):
    (self.folder / "config.json").write_text("{}")
    self.assert_refused("holds neither model.safetensors nor")

  @parameterized.parameters(
      "pytorch_model.bin", "model.pt", "model.pth", "model.pkl", "last.ckpt"
  )
  def test_refuses_pickled_weights_unread(self, name):
    # A pickle that would raise if anything read it.
    (self.folder / name).write_bytes(b"cbuiltins\nexit\n(I7\ntR.")
    self.assert_refused(
        re.escape(name), "pickled checkpoints are refused and never loaded"
    )

  @parameterized.parameters(0, 3, 40, -1)
  def test_refuses_a_truncated_file_by_name(self, end):
    self.write(checkpoint.SINGLE, "a")
    path = self.folder / checkpoint.SINGLE
    path.write_bytes(path.read_bytes()[:end])
    self.assert_refused(r"model\.safetensors \(\d+ bytes\) is truncated")

  def test_refuses_a_file_with_a_tail(self):
    self.write(checkpoint.SINGLE, "a")
    with (self.folder / checkpoint.SINGLE).open("ab") as file:
      file.write(b"x")
    self.assert_refused("damaged")

  def test_refuses_a_file_of_another_kind(self):
    (self.folder / checkpoint.SINGLE).write_bytes(bytes(range(256)))
    self.assert_refused("no safetensors file")

  def test_refuses_a_folder_in_the_place_of_the_file(self):
    (self.folder / checkpoint.SINGLE).mkdir()
    self.assert_refused(r"model\.safetensors .*damaged")

  def test_refuses_a_file_without_tensors(self):
    safetensors.numpy.save_file({}, self.folder / checkpoint.SINGLE)
    self.assert_refused("holds no tensor")

  def test_refuses_shards_without_an_index(self):
    self.write("model-00001-of-00002.safetensors", "a")
    self.assert_refused(
        "model-00001-of-00002", r"model\.safetensors\.index\.json.* is absent"
    )


class IndexRefusalTest(FolderTestCase):

  def setUp(self):
    super().setUp()
    self.one = "model-00001-of-00002.safetensors"
    self.two = "model-00002-of-00002.safetensors"

  def test_refuses_an_index_whose_shard_is_absent(self):
    self.folder = _CASES / "sharded_missing"
    experts = [
        rf"model\.layers\.0\.mlp\.experts\.{e}\.{p}_proj\.weight"
        for e in (0, 1)
        for p in ("gate", "up", "down")
    ]
    self.assert_refused(
        r"model-00002-of-00003\.safetensors, which should hold "
        + ", ".join(experts),
        "index states 296 bytes in total",
        "shards present hold 152 bytes",
    )

  def test_accepts_an_index_that_agrees(self):
    self.write(self.one, "a")
    self.write(self.two, "b")
    self.write_index(a=self.one, b=self.two)
    opened = checkpoint.Checkpoint(self.folder)
    self.assertEqual(opened.names(), ("a", "b"))
    self.assertEqual([f.name for f in opened.files], [self.one, self.two])

  def test_refuses_a_truncated_shard_by_name(self):
    self.write(self.one, "a")
    self.write(self.two, "b")
    self.write_index(a=self.one, b=self.two)
    path = self.folder / self.two
    path.write_bytes(path.read_bytes()[:-3])
    self.assert_refused(r"model-00002-of-00002\.safetensors \(\d+ bytes\)")

  def test_refuses_a_tensor_that_its_shard_lacks(self):
    self.write(self.one, "a")
    self.write_index(a=self.one, b=self.one)
    self.assert_refused("b is not in model-00001-of-00002")

  def test_refuses_a_tensor_that_the_index_lacks(self):
    self.write(self.one, "a", "b")
    self.write_index(a=self.one)
    self.assert_refused("b lies in model-00001.* and is not in the index")

  def test_refuses_a_tensor_in_another_shard_than_the_index_says(self):
    self.write(self.one, "a", "b")
    self.write(self.two, "c")
    self.write_index(a=self.one, b=self.two, c=self.two)
    self.assert_refused("b lies in model-00001.*the index says model-00002")

  def test_refuses_a_tensor_in_two_shards(self):
    self.write(self.one, "a", "b")
    self.write(self.two, "b")
    self.write_index(a=self.one, b=self.two)
    self.assert_refused("b lies in model-00001.* and in model-00002")

  def test_refuses_a_shard_that_the_index_does_not_name(self):
    self.write(self.one, "a")
    self.write(self.two, "b")
    self.write_index(a=self.one)
    self.assert_refused("model-00002-of-00002.*does not name")

  def test_refuses_a_single_file_beside_an_index(self):
    self.write(self.one, "a")
    self.write(checkpoint.SINGLE, "a")
    self.write_index(a=self.one)
    self.assert_refused(r"model\.safetensors, which .*does not name")

  def test_shows_the_first_of_many_faults_and_counts_the_rest(self):
    self.write(self.one, "a")
    self.write_index(
        a=self.one, **{f"t{i:02}": self.one for i in range(25)}
    )
    self.assert_refused("t19 is not in", "and 5 more")

  @parameterized.parameters("../other.safetensors", "/x.safetensors", 3, None)
  def test_refuses_an_index_that_leaves_the_folder(self, shard):
    self.write_index(a=shard)
    self.assert_refused("a lies in .*not the name of a file in this folder")

  @parameterized.parameters(
      ("{", "damaged JSON"),
      ("[]", "a JSON list, not an object"),
      ("{}", "no weight_map"),
      ('{"weight_map": {}}', "no weight_map"),
      ('{"weight_map": {"a": "x", "a": "y"}}', "'a' occurs twice"),
      ('{"metadata": {"total_size": NaN}}', "NaN is not a JSON number"),
  )
  def test_refuses_a_damaged_index(self, text, pattern):
    self.write(self.one, "a")
    (self.folder / checkpoint.INDEX).write_text(text)
    self.assert_refused(r"model\.safetensors\.index\.json", pattern)


if __name__ == "__main__":
  absltest.main()
