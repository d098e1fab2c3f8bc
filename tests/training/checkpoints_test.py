"""A checkpoint comes back bit for bit, or says why not."""

import collections
import json
import pathlib
import shutil
import tempfile
from unittest import mock

from absl.testing import absltest
import jax.numpy as jnp
import numpy as np
import optax

from moejax.contracts import refusal
from moejax.training import checkpoints as lib
from moejax.training import step as step_lib
from tests import bits

_WHO = {"model": "Qwen3Moe", "config": {"embed": 16}, "recipe": {"seed": 1}}
_AT = {"pass": 0, "window": 3}


def _state(step, shift=0.0):
  rng = np.random.default_rng(0)
  params = {
      "layers.0.a": jnp.asarray(rng.standard_normal((3, 4)), jnp.float32),
      # What only bits tell from something else.
      "odd": jnp.asarray([-0.0, np.nan, 1e-45, shift], jnp.float32),
  }
  fixed = {
      "layers.0.moe.bias": jnp.asarray([0.5, -0.5], jnp.float32),
      "layers.0.moe.table": jnp.asarray([[3, 1]], jnp.int32),
  }
  optimiser = optax.chain(
      optax.clip_by_global_norm(1.0), optax.adamw(lambda step: 0.1)
  ).init(params)
  return step_lib.State(params, fixed, optimiser, jnp.asarray(step, jnp.int32))


class CheckpointsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    scratch = pathlib.Path(tempfile.mkdtemp())
    self.addCleanup(shutil.rmtree, scratch)
    self.folder = scratch / "run"

  def _refused(self, message, who=None, template=None):
    with self.assertRaisesRegex(refusal.HarnessError, message):
      lib.restore(self.folder, template or _state(0), who or _WHO)

  def test_comes_back_bit_for_bit_and_the_last_two_are_kept(self):
    self.assertIsNone(lib.restore(self.folder, _state(0), _WHO))
    for step in (4, 8, 12):
      lib.save(self.folder, _state(step, step / 8), _WHO, _AT)
    names = sorted(path.name for path in self.folder.iterdir())
    self.assertEqual(names, ["step_00000008", "step_00000012"])
    found = lib.restore(self.folder, _state(0), _WHO)
    self.assertIsInstance(found, step_lib.State)
    expected = lib.flatten(_state(12, 1.5))
    actual = lib.flatten(found)
    self.assertEqual(list(actual), list(expected))
    for name in expected:
      bits.assert_same_bits(actual[name], expected[name])
    # params, biases, tables, two moments and two counts, step.
    self.assertLen(expected, 2 + 2 + 2 * 2 + 2 + 1)

  def test_what_a_killed_process_left_is_no_checkpoint(self):
    lib.save(self.folder, _state(4), _WHO, _AT)
    half = self.folder / ".step_abc" / "made"
    shutil.copytree(self.folder / "step_00000004", half)
    self.assertEqual(int(lib.restore(self.folder, _state(0), _WHO).step), 4)
    self.assertFalse(half.parent.exists())

  def test_another_run_is_refused_with_each_field(self):
    lib.save(self.folder, _state(4), _WHO, _AT)
    other = {**_WHO, "config": {"embed": 32}, "recipe": {"seed": 1, "steps": 9}}
    self._refused(
        r"another run: config\.embed was 16, not 32; recipe\.steps was None,"
        r" not 9\.",
        other,
    )
    larger = _state(0)
    larger.params["b"] = jnp.zeros((1,), jnp.float32)
    self._refused(r"other leaves: \.params\['b'\]", template=larger)

  def test_damage_is_refused_and_the_one_before_still_stands(self):
    lib.save(self.folder, _state(4), _WHO, _AT)
    last = lib.save(self.folder, _state(8), _WHO, _AT)
    manifest = json.loads((last / lib.MANIFEST).read_text("utf-8"))
    manifest["digest"] = manifest["digest"][::-1]
    (last / lib.MANIFEST).write_text(json.dumps(manifest), "utf-8")
    self._refused("00000008 is damaged: digest .* Remove it to go on from")
    (last / lib.MANIFEST).write_text("{", "utf-8")
    self._refused("is damaged")
    shutil.rmtree(last / lib.ARRAYS)
    lib.save(self.folder, _state(12), _WHO, _AT)
    shutil.rmtree(self.folder / "step_00000012" / lib.ARRAYS)
    self._refused("00000012 is damaged")
    shutil.rmtree(self.folder / "step_00000012")
    shutil.rmtree(last)

  def test_a_full_disk_leaves_the_last_one(self):
    lib.save(self.folder, _state(4), _WHO, _AT)
    usage = collections.namedtuple("usage", "total used free")
    with mock.patch.object(
        shutil, "disk_usage", return_value=usage(10, 10, 300)
    ), self.assertRaisesRegex(refusal.HarnessError, "300 are free"):
      lib.save(self.folder, _state(8), _WHO, _AT)
    with mock.patch.object(
        pathlib.Path, "write_text", side_effect=OSError(28, "No space left")
    ), self.assertRaisesRegex(refusal.HarnessError, "the disk is full"):
      lib.save(self.folder, _state(8), _WHO, _AT)
    names = sorted(path.name for path in self.folder.iterdir())
    self.assertEqual(names, ["step_00000004"])
    self.assertEqual(int(lib.restore(self.folder, _state(0), _WHO).step), 4)


if __name__ == "__main__":
  absltest.main()
