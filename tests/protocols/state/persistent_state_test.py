"""The object: files, digests, comparison, bisection, substitution.

Needs no accelerator.
"""

import dataclasses
import hashlib
import json
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import safetensors.numpy

from moejax.contracts import refusal
from moejax.protocols.state import difference
from moejax.protocols.state import digests
from moejax.protocols.state import layout as layout_lib
from moejax.protocols.state import persistent_state as lib
from moejax.protocols.state import substitution
from tests import bits
from tests.protocols.state import sample


def _folder(test) -> pathlib.Path:
  folder = tempfile.TemporaryDirectory()
  test.addCleanup(folder.cleanup)
  return pathlib.Path(folder.name)


class FileTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.path = _folder(self) / "s.safetensors"

  @parameterized.parameters(*layout_lib.LAYOUTS)
  def test_a_state_comes_back_whole(self, layout):
    state = sample.state(layout=layout, checkpoint="c" * 64, decoding="{}")
    lib.write(self.path, state)
    again = lib.read(self.path)
    self.assertEqual(again.identity, state.identity)
    self.assertEqual(again.config, state.config)
    self.assertEqual(list(again.arrays), list(state.arrays))
    self.assertTrue(lib.same_bits(again, state))
    self.assertEqual(digests.tree(again), digests.tree(state))

  def test_two_writes_have_the_same_bytes(self):
    lib.write(self.path, sample.state())
    first = self.path.read_bytes()
    lib.write(self.path, sample.state())
    self.assertEqual(self.path.read_bytes(), first)

  def test_refuses_a_changed_bit_and_what_is_no_state(self):
    lib.write(self.path, sample.state())
    data = bytearray(self.path.read_bytes())
    data[-1] ^= 1
    self.path.write_bytes(data)
    with self.assertRaisesRegex(refusal.HarnessError, "its digest"):
      lib.read(self.path)
    self.path.write_bytes(data[:-9])
    with self.assertRaisesRegex(refusal.HarnessError, "s.safetensors"):
      lib.read(self.path)
    self.path.write_bytes(safetensors.numpy.save({"x": np.zeros(2)}))
    with self.assertRaisesRegex(refusal.HarnessError, "schema None"):
      lib.read(self.path)
    with self.assertRaisesRegex(refusal.HarnessError, "FileNotFound"):
      lib.read(self.path.with_suffix(".no"))

  def test_refuses_arrays_that_are_not_the_layout(self):
    state = sample.state()
    name = "layers.0.window_kv"
    for wrong in (
        {**state.arrays, name: state.arrays[name][:-1]},
        {**state.arrays, name: state.arrays[name].astype(np.float64)},
        {k: v for k, v in state.arrays.items() if k != name},
        {**state.arrays, "layers.0.compressed_kv": np.zeros((3, 6), "f4")},
    ):
      with self.assertRaisesRegex(refusal.HarnessError, "layers.0"):
        dataclasses.replace(state, arrays=wrong)
    with self.assertRaisesRegex(refusal.HarnessError, "configuration"):
      dataclasses.replace(state, config=sample.CONFIGS[1])

  def test_payload_is_the_bytes_in_canonical_order(self):
    state = sample.state()
    names = [part.name for part in state.parts()]
    data = b"".join(state.arrays[n].astype("<f4").tobytes() for n in names)
    self.assertEqual(
        lib.payload_digest(state), hashlib.sha256(data).hexdigest()
    )


class DigestTest(parameterized.TestCase):

  def test_every_field_of_the_identity_enters_every_digest(self):
    state = sample.state()
    part = state.parts()[0]
    seen = {lib.part_digest(state, part)}
    roots = {digests.root(state)}
    for field, value in (
        ("prompt", "x"), ("checkpoint", "x"), ("tokenizer", "x"),
        ("decoding", "x"),
    ):
      other = dataclasses.replace(
          state, identity=dataclasses.replace(state.identity, **{field: value})
      )
      seen.add(lib.part_digest(other, part))
      roots.add(digests.root(other))
    self.assertLen(seen, 5)
    self.assertLen(roots, 5)

  def test_one_bit_anywhere_changes_its_digests_and_no_other(self):
    state = sample.state()
    before = digests.tree(state)
    for part in state.parts():
      other = _with_flipped_bit(state, part.name)
      found = digests.bisect(before, digests.tree(other))
      self.assertEqual(
          (found.component, found.layer, found.array),
          (part.component, part.layer, part.array or "array"),
      )
      self.assertLessEqual(found.digests_read, 1 + 4 + 5 + 3)
      self.assertEqual(found.digests, 1 + 4 + 13 + 20)
      self.assertNotEqual(
          lib.payload_digest(state), lib.payload_digest(other)
      )

  def test_equal_trees_cost_one_digest(self):
    tree = digests.tree(sample.state())
    found = digests.bisect(tree, digests.tree(sample.state()))
    self.assertIsNone(found.component)
    self.assertEqual(found.digests_read, 1)

  def test_the_first_difference_of_a_fork_is_found_from_files(self):
    folder = _folder(self)
    for name, fork in (("a", None), ("b", 1)):
      digests.write(folder / name, sample.state(length=12, fork=fork))
    found = digests.bisect(
        digests.read(folder / "a"), digests.read(folder / "b")
    )
    # Root; window_kv; its layers 0, 1, 2; its only array.
    self.assertEqual(
        (found.component, found.layer, found.digests_read),
        (layout_lib.WINDOW, 2, 1 + 1 + 3 + 1),
    )

  @parameterized.parameters("root", "component", "layer", "array", "schema")
  def test_refuses_a_damaged_tree(self, level):
    path = _folder(self) / "tree.json"
    tree = digests.write(path, sample.state())
    digests.read(path)
    component = tree["components"][2]
    layer = component["layers"][1]
    if level == "array":
      layer["arrays"][0][1] = "0" * 64
    else:
      node = {"component": component, "layer": layer}.get(level, tree)
      node["digest" if level in ("component", "layer") else level] = "0" * 64
    path.write_text(json.dumps(tree))
    with self.assertRaisesRegex(refusal.HarnessError, "tree.json"):
      digests.read(path)

  def test_refuses_trees_of_different_things(self):
    a = digests.tree(sample.state(length=12))
    b = digests.tree(sample.state(length=13))
    with self.assertRaisesRegex(refusal.HarnessError, "length 12 against 13"):
      digests.bisect(a, b)


def _with_flipped_bit(state, name):
  array = state.arrays[name].copy()
  array.view("u4")[-1, -1] ^= 1
  return dataclasses.replace(state, arrays={**state.arrays, name: array})


class DeltaTest(parameterized.TestCase):

  def test_is_zero_where_bits_are_equal_infinities_included(self):
    a = sample.state(length=3, fork=None)
    b = sample.state(length=3, fork=1)
    name = "layers.2.compressor_state.score"
    self.assertTrue(np.isneginf(a.arrays[name]).any())
    a.arrays["layers.2.window_kv"][0, 0] = np.nan
    b.arrays["layers.2.window_kv"][0, 0] = np.nan
    found = difference.delta(b, a)
    for key, array in found.arrays.items():
      self.assertFalse(np.isnan(array).any(), key)
      differs = a.arrays[key].view("u4") != b.arrays[key].view("u4")
      bits.assert_same_bits(array[~differs], np.zeros((~differs).sum(), "f4"))
      bits.assert_same_bits(
          array[differs], b.arrays[key][differs] - a.arrays[key][differs]
      )
    # Layers 2 to 4 at position 2: window rows, and rows of kv and score.
    self.assertEqual(
        {k: v for k, v in found.counts.items() if v},
        {
            ("window_kv", 2): 6, ("window_kv", 3): 6, ("window_kv", 4): 6,
            ("compressor_state", 2): 12, ("compressor_state", 3): 24,
            ("indexer_state", 3): 16,
        },
    )
    self.assertEqual(found.differing, 70)

  def test_float64_brings_the_branch_back_and_float32_need_not(self):
    a, b = sample.state(fork=None), sample.state(fork=0)
    exact = difference.add(a, difference.delta(b, a, "float64"))
    self.assertEqual(digests.root(exact), digests.root(b))
    self.assertNotEqual(digests.root(a), digests.root(b))
    literal = difference.add(a, difference.delta(b, a, "float32"))
    self.assertFalse(lib.same_bits(literal, b))

  def test_signed_zeros_are_counted_though_their_difference_is_zero(self):
    a, b = sample.state(), sample.state()
    a.arrays["layers.0.window_kv"][0, 0] = 0.0
    b.arrays["layers.0.window_kv"][0, 0] = -0.0
    self.assertEqual(difference.delta(b, a).differing, 1)
    self.assertFalse(lib.same_bits(a, b))

  @parameterized.parameters(
      (dict(length=14), "length 13 against 14"),
      (dict(layout="live"), "layout 'raw' against 'live'"),
      (dict(config=sample.CONFIGS[1]), "config"),
      (dict(checkpoint="x"), "checkpoint '' against 'x'"),
  )
  def test_refuses_a_state_of_something_else(self, change, text):
    a, b = sample.state(), sample.state(**change)
    for compare in (difference.delta, lib.same_bits, substitution.substitute):
      with self.assertRaisesRegex(refusal.HarnessError, text):
        compare(a, b)
    with self.assertRaisesRegex(refusal.HarnessError, text):
      list(difference.rows(a, b))


class RowsTest(absltest.TestCase):

  def test_every_differing_row_has_its_reason(self):
    a, b = sample.state(length=9), sample.state(length=9)
    # T = 9, W = 8: position 1 leaves. CSA, r = 4: rows 0..3 are complete, row
    # 4 is open. HCA, r = 8: row 0 is open.
    want = [
        ("window_kv", 0, 1, 0, "leaving"),
        ("window_kv", 0, 2, 0, "live"),
        ("compressor_state", 1, 3, 0, "live"),
        ("compressor_state", 1, 3, 6, "stale"),
        ("compressor_state", 1, 4, 11, "live"),
        ("compressor_state", 1, 5, 0, "stale"),
        ("compressor_state", 2, 0, 0, "live"),
        ("compressor_state", 2, 1, 0, "stale"),
    ]
    for component, layer, row, channel, _ in want:
      kv = ".kv" if component == "compressor_state" else ""
      b.arrays[f"layers.{layer}.{component}{kv}"][row, channel] += 1
    found = list(difference.rows(a, b))
    self.assertEqual(
        [(r.component, r.layer, r.row, r.channel, r.status) for r in found],
        want,
    )
    self.assertEqual(found[0].position, 1)
    self.assertIn("overwrites", found[0].why)
    self.assertIn("nothing reads", found[3].why)

  def test_unwritten_rows_are_named(self):
    a, b = sample.state(length=3), sample.state(length=3)
    b.arrays["layers.2.compressor_state.score"][5, 1] = 1
    (found,) = difference.rows(a, b)
    self.assertEqual((found.status, found.position), ("unwritten", -1))


class SameLiveTest(absltest.TestCase):

  def test_dead_rows_do_not_matter_and_live_ones_do(self):
    a, b = sample.state(length=9), sample.state(length=9)
    for name, mark in layout_lib.status(a.config, 9).items():
      dead = (mark == layout_lib.STALE) | (mark == layout_lib.UNWRITTEN)
      b.arrays[name].reshape(*mark.shape, -1)[dead] += 1
    self.assertFalse(lib.same_bits(a, b))
    self.assertIsNone(difference.same_live(a, b))
    self.assertIsNone(difference.same_live(lib.narrow(a, "live"), b))
    b.arrays["layers.3.compressor_state.score"][4, 2] += 1
    b.arrays["layers.3.indexer_state.keys"][1, 2] += 1
    found = difference.same_live(a, b)
    self.assertEqual(
        (found.component, found.layer, found.array, found.position,
         found.channel),
        ("compressor_state", 3, "score", 8, 2),
    )

  def test_carried_leaves_out_the_row_that_leaves(self):
    a, b = sample.state(length=9), sample.state(length=9)
    b.arrays["layers.0.window_kv"][1, 0] += 1
    self.assertEqual(difference.same_live(a, b).position, 1)
    self.assertIsNone(difference.same_live(a, b, layout_lib.CARRIED))
    carried = lib.narrow(b, layout_lib.CARRIED)
    self.assertIsNone(difference.same_live(a, carried, layout_lib.CARRIED))
    with self.assertRaisesRegex(refusal.HarnessError, "cannot be narrowed"):
      difference.same_live(a, carried)
    with self.assertRaisesRegex(refusal.HarnessError, "path"):
      difference.same_live(a, b, layout_lib.RAW)


class SubstitutionTest(parameterized.TestCase):

  @parameterized.parameters(*layout_lib.LAYOUTS)
  def test_all_of_a_branch_is_the_branch(self, layout):
    a = sample.state(length=12, layout=layout)
    b = sample.state(length=12, layout=layout, fork=0)
    result, proof = substitution.substitute(a, b)
    self.assertEqual(digests.root(result), digests.root(b))
    self.assertEqual(
        (proof.before, proof.source, proof.after),
        (digests.root(a), digests.root(b), digests.root(b)),
    )
    differing = difference.delta(a, b).differing
    self.assertEqual(proof.values_changed, differing)

  def test_exactly_what_was_asked_changes(self):
    a, b = sample.state(length=12), sample.state(length=12, fork=0)
    result, proof = substitution.substitute(
        a, b,
        substitution.Selection(
            components=["window_kv", "indexer_state"], layers=[1, 2],
            positions=[11],
        ),
    )
    # The window rows of layers 1 and 2; kv and score of indexer rows 3 and 7
    # of layer 1; its last key.
    self.assertEqual(proof.values_changed, 2 * 6 + 2 * 2 * 8 + 4)
    self.assertEqual(proof.values_asked, proof.values_changed)
    self.assertEqual(
        list(proof.changed),
        ["layers.1.window_kv", "layers.2.window_kv",
         "layers.1.indexer_state.kv", "layers.1.indexer_state.score",
         "layers.1.indexer_state.keys"],
    )
    for name, array in result.arrays.items():
      if name not in proof.changed:
        bits.assert_same_bits(array, a.arrays[name])
      else:
        bits.assert_same_bits(array, b.arrays[name])
    self.assertNotEqual(proof.after, proof.before)

  def test_a_proof_sees_too_much_and_too_little(self):
    a, b = sample.state(length=12), sample.state(length=12, fork=0)
    asked = substitution.selected_values(
        a, substitution.Selection(layers=[1])
    )
    whole, _ = substitution.substitute(a, b)
    self.assertGreater(substitution.prove(a, b, whole, asked).foreign, 0)
    nothing = substitution.prove(a, b, a, asked)
    self.assertGreater(nothing.unlike_source, 0)
    self.assertFalse(nothing.holds)
    self.assertFalse(substitution.prove(a, b, whole, asked).holds)

  @parameterized.parameters(
      (dict(layers=[5]), r"layers \[5\]"),
      (dict(positions=[12]), r"positions \[12\]"),
      (dict(components=["keys"]), "'keys'"),
      (dict(layers=[0], components=["indexer_state"]), "selects nothing"),
      (dict(layers=[]), "selects nothing"),
  )
  def test_refuses_what_the_state_does_not_hold(self, fields, text):
    a = sample.state(length=12)
    with self.assertRaisesRegex(refusal.HarnessError, text):
      substitution.substitute(a, a, substitution.Selection(**fields))

  def test_refuses_another_prompt(self):
    a = sample.state()
    other = dataclasses.replace(a.identity, prompt=lib.prompt_digest((1, 2)))
    b = dataclasses.replace(a, identity=other)
    with self.assertRaisesRegex(refusal.HarnessError, "prompt"):
      substitution.substitute(a, b)


if __name__ == "__main__":
  absltest.main()
