"""Parameter store: all leaves, all bits, the same config, or nothing."""

import dataclasses
import json
import pathlib
import re
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from moejax.contracts import refusal
from moejax.modules import config as config_lib
from moejax.modules import decoder
from moejax.modules import parameter_store
from tests import bits

_WORDS = {
    # Signed zeros, subnormals, infinities, NaNs quiet and signalling.
    "bfloat16": (np.uint16, [0, 0x8000, 1, 0x7F80, 0x7FC1, 0x7F81, 0xFFC0]),
    "float16": (np.uint16, [0, 0x8000, 1, 0x7C00, 0x7E01, 0xFC01]),
    "float32": (np.uint32, [0, 1 << 31, 1, 0x7FC00001, 0xFFC12345, 0x7F800001]),
}


def _config(**changes):
  return config_lib.DecoderConfig(**{
      "vocab_size": 16,
      "embed": 8,
      "num_layers": 2,
      "num_heads": 2,
      "num_kv_heads": 1,
      "head_dim": 4,
      "hidden": 6,
      "expert_hidden": 3,
      "num_experts": 2,
      "top_k": 1,
      "normalize_gates": True,
      "sparse_layers": (1,),
      **changes,
  })


def _params(config):
  """Random parameters that begin with every special value of the dtype."""
  word, special = _WORDS[config.dtype]
  rng = np.random.default_rng(0)
  out = {}
  for path, shape in decoder.parameter_shapes(config).items():
    words = rng.integers(0, np.iinfo(word).max, np.prod(shape), word)
    words[: len(special)] = special[: words.size]
    out[path] = words.view(np.dtype(config.dtype)).reshape(shape)
  return out


class FolderTestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.parent = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory())
    )
    self.folder = self.parent / "saved"

  def save(self, **changes):
    config = _config(**changes)
    params = _params(config)
    parameter_store.save(self.folder, params, config)
    return config, params

  def assert_refused(self, config, *patterns):
    with self.assertRaises(refusal.HarnessError) as caught:
      parameter_store.restore(self.folder, config)
    self.assertIn(str(self.folder), str(caught.exception))
    for pattern in patterns:
      self.assertRegex(str(caught.exception), pattern)


class RoundTripTest(FolderTestCase):

  @parameterized.product(
      dtype=("bfloat16", "float16", "float32"), tied_embeddings=(False, True)
  )
  def test_every_bit_is_restored(self, **changes):
    config, params = self.save(**changes)
    restored = parameter_store.restore(self.folder, config)
    self.assertEqual(list(restored), list(decoder.parameter_shapes(config)))
    for path, array in params.items():
      bits.assert_same_bits(restored[path], array)

  @parameterized.parameters(0x8000, 0x0000, 0x7FC1)
  def test_an_array_of_one_value_keeps_it(self, word):
    config = _config()
    params = {
        path: np.full_like(
            array.view(np.uint16), word
        ).view(ml_dtypes.bfloat16)
        for path, array in _params(config).items()
    }
    parameter_store.save(self.folder, params, config)
    restored = parameter_store.restore(self.folder, config)
    for path, array in params.items():
      bits.assert_same_bits(restored[path], array)

  def test_jax_arrays_are_saved_with_their_bits(self):
    config = _config()
    params = _params(config)
    parameter_store.save(
        str(self.folder), jax.tree.map(jnp.asarray, params), config
    )
    restored = parameter_store.restore(str(self.folder), config)
    for path, array in params.items():
      bits.assert_same_bits(restored[path], array)

  def test_listing_gives_shapes_and_dtypes(self):
    config, params = self.save(dtype="float16")
    self.assertEqual(
        parameter_store.list_parameters(self.folder),
        {path: (array.shape, "float16") for path, array in params.items()},
    )

  def test_listing_reads_no_weight(self):
    self.save()
    with mock.patch.object(
        ocp.StandardCheckpointer, "restore", side_effect=AssertionError
    ):
      parameter_store.list_parameters(self.folder)

  def test_a_relative_folder_is_saved_where_it_says(self):
    config = _config()
    with mock.patch.object(
        pathlib.Path, "cwd", return_value=self.parent
    ), mock.patch("os.getcwd", return_value=str(self.parent)):
      parameter_store.save("saved", _params(config), config)
    self.assertIn("embedding", parameter_store.list_parameters(self.folder))

  @parameterized.parameters(True, False)
  def test_an_empty_folder_is_used_and_a_missing_one_is_made(self, exists):
    config = _config()
    self.folder = self.parent / "a" / "b"
    if exists:
      self.folder.mkdir(parents=True)
    parameter_store.save(self.folder, _params(config), config)
    parameter_store.restore(self.folder, config)


class RefusalTest(FolderTestCase):

  def test_refuses_fewer_layers_and_names_their_leaves(self):
    layers = tuple(range(12))
    self.save(num_layers=12, sparse_layers=layers)
    target = _config(num_layers=16, sparse_layers=tuple(range(16)))
    missing = [
        path
        for path in decoder.parameter_shapes(target)
        if path.startswith(tuple(f"layers.{i}." for i in (12, 13, 14, 15)))
    ]
    self.assertLen(missing, 44)
    self.assert_refused(
        target,
        "num_layers is 12, not 16",
        r"missing leaves \(44\): " + re.escape(", ".join(missing)) + r"\.$",
    )

  def test_refuses_more_layers_and_names_their_leaves(self):
    self.save()
    self.assert_refused(
        _config(num_layers=1, sparse_layers=()),
        "num_layers is 2, not 1",
        r"left-over leaves \(11\): .*layers\.1\.moe\.router",
    )

  def test_refuses_other_shapes(self):
    self.save()
    self.assert_refused(
        _config(vocab_size=17),
        r"embedding is \(\(16, 8\), 'bfloat16'\), not \(\(17, 8\), 'bf",
    )

  def test_refuses_another_dtype(self):
    self.save()
    self.assert_refused(
        _config(dtype="float16"),
        "dtype is 'bfloat16', not 'float16'",
        r"final_norm is \(\(8,\), 'bfloat16'\), not \(\(8,\), 'float16'\)",
    )

  @parameterized.parameters(
      ({"norm_epsilon": 1e-5}, "norm_epsilon is 1e-06, not 1e-05"),
      ({"normalize_gates": False}, "normalize_gates is True, not False"),
      ({"rope_scaling": config_lib.RopeScaling("linear", 2.0)},
       "rope_scaling is {.*'default'.*not {.*'linear'"),
  )
  def test_refuses_a_config_that_no_shape_shows(self, changes, pattern):
    self.save()
    self.assert_refused(_config(**changes), pattern)

  def test_refuses_leaves_that_the_manifest_does_not_know(self):
    config, params = self.save()
    arrays = self.folder / parameter_store.ARRAYS
    params["other"] = np.zeros(3, np.float32)
    del params["final_norm"]
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(arrays, params, force=True)
    self.assert_refused(
        config, r"missing leaves \(1\): final_norm; left-over .*: other"
    )

  def test_refuses_weights_of_other_bits(self):
    config, params = self.save()
    params["final_norm"] = params["final_norm"][::-1].copy()
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(
          self.folder / parameter_store.ARRAYS, params, force=True
      )
    self.assert_refused(config, "have the digest [0-9a-f]{64}, saved was")

  def test_refuses_one_damaged_byte_of_a_weight(self):
    config, _ = self.save(vocab_size=4096)
    arrays = self.folder / parameter_store.ARRAYS
    damaged = [p for p in arrays.rglob("d/*") if p.stat().st_size > 60_000]
    self.assertNotEmpty(damaged)
    for path in damaged:
      content = bytearray(path.read_bytes())
      content[len(content) // 2] ^= 0xFF
      path.write_bytes(content)
    # orbax notices nothing; the digest does.
    self.assert_refused(config, "have the digest [0-9a-f]{64}, saved was")

  def test_refuses_arrays_that_cannot_be_listed(self):
    config, _ = self.save()
    (self.folder / parameter_store.ARRAYS / "_METADATA").unlink()
    self.assert_refused(config, "arrays is damaged: no array can be listed")

  def test_refuses_arrays_that_cannot_be_read(self):
    config, _ = self.save()
    with mock.patch.object(
        ocp.StandardCheckpointer, "restore", side_effect=ValueError("checksum")
    ):
      self.assert_refused(config, "arrays is damaged: checksum")

  def test_refuses_a_folder_of_something_else(self):
    for folder in (self.parent, self.folder):
      with self.assertRaisesRegex(
          refusal.HarnessError, r"holds no saved parameters: .*\.json is absent"
      ):
        parameter_store.list_parameters(folder)
    self.assert_refused(_config(), "holds no saved parameters")

  @parameterized.parameters(
      ("{", "damaged JSON"),
      ("[]", "not of schema 'parameters/1'"),
      ('{"schema": "parameters/2"}', "not of schema 'parameters/1'"),
      ('{"schema": "parameters/1", "config": {}}', "lacks config or digest"),
  )
  def test_refuses_a_damaged_manifest(self, text, pattern):
    config, _ = self.save()
    (self.folder / parameter_store.MANIFEST).write_text(text)
    self.assert_refused(config, r"parameters\.json", pattern)

  def test_refuses_a_manifest_without_arrays(self):
    config, _ = self.save()
    (self.folder / parameter_store.ARRAYS).rename(self.parent / "elsewhere")
    self.assert_refused(config, "arrays is damaged")


class SaveRefusalTest(FolderTestCase):

  def test_refuses_to_overwrite(self):
    config, params = self.save()
    manifest = self.folder / parameter_store.MANIFEST
    before = manifest.read_bytes()
    with self.assertRaisesRegex(
        refusal.HarnessError, "saved holds something already"
    ):
      parameter_store.save(self.folder, params, config)
    self.assertEqual(manifest.read_bytes(), before)

  def test_refuses_a_folder_that_holds_something_else(self):
    (self.parent / "note.txt").write_text("mine")
    config = _config()
    for target in (self.parent, self.parent / "note.txt"):
      with self.assertRaisesRegex(refusal.HarnessError, "something already"):
        parameter_store.save(target, _params(config), config)
    self.assertEqual((self.parent / "note.txt").read_text(), "mine")

  @parameterized.parameters(
      ("missing", r"missing leaves \(1\): final_norm"),
      ("unknown", r"left-over leaves \(1\): other"),
      ("shape", r"final_norm is \(\(2, 4\), 'bfloat16'\), not \(\(8,\)"),
      ("dtype", r"final_norm is \(\(8,\), 'float32'\), not"),
  )
  def test_refuses_parameters_of_another_config(self, fault, pattern):
    config = _config()
    params = _params(config)
    norm = params.pop("final_norm")
    if fault == "unknown":
      params |= {"final_norm": norm, "other": norm}
    elif fault == "shape":
      params["final_norm"] = norm.reshape(2, 4)
    elif fault == "dtype":
      params["final_norm"] = np.zeros(8, np.float32)
    with self.assertRaisesRegex(ValueError, pattern):
      parameter_store.save(self.folder, params, config)
    self.assertEmpty(list(self.parent.iterdir()))

  @parameterized.parameters("arrays", "manifest", "rename")
  def test_nothing_is_left_of_a_save_that_fails(self, moment):
    config = _config()
    failing = {
        "arrays": (ocp.StandardCheckpointer, "save"),
        "manifest": (pathlib.Path, "write_text"),
        "rename": (parameter_store.os, "rename"),
    }[moment]
    with mock.patch.object(*failing, side_effect=OSError("disk full")):
      with self.assertRaisesRegex(OSError, "disk full"):
        parameter_store.save(self.folder, _params(config), config)
    self.assertEmpty(list(self.parent.iterdir()))

  def test_the_folder_is_as_readable_as_its_parent(self):
    self.save()
    plain = self.parent / "plain"
    plain.mkdir()
    self.assertEqual(self.folder.stat().st_mode, plain.stat().st_mode)

  def test_the_manifest_states_the_config(self):
    config, _ = self.save(num_layers=3, sparse_layers=(0, 2))
    manifest = json.loads(
        (self.folder / parameter_store.MANIFEST).read_text()
    )
    self.assertEqual(manifest["config"]["sparse_layers"], [0, 2])
    self.assertLen(manifest["config"], len(dataclasses.fields(config)))


if __name__ == "__main__":
  absltest.main()
