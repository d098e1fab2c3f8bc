"""A packed folder made wide: weights by a second reading, all else as it is."""

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import numpy as np

from moejax.numerics import fingerprint
from tests import bits
from tests.torch_bridge.hf.awq import independent
from tests.torch_bridge.hf.awq import packed_models
from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf import hf_config
from torch_bridge.hf.awq import config as awq_config
from torch_bridge.hf.awq import packer
from torch_bridge.hf.awq import wide as lib

_LEAVES = ("qweight", "qzeros", "scales")


class WideTest(packed_models.PackedModelTestCase):

  @parameterized.parameters(
      dict(group_size=16, modules_to_not_convert=("mlp.gate",)),
      dict(group_size=-1),
      dict(group_size=16, scales="float16"),
  )
  def test_words_become_weights_and_the_rest_keeps_its_bits(self, **fields):
    self.pack(packer.Request(**fields))
    packed = checkpoint_lib.Checkpoint(self.folder)
    modules = sorted(
        n.removesuffix(".qweight")
        for n in packed.names() if n.endswith(".qweight")
    )
    with lib.folder(self.folder) as made:
      found = dict(checkpoint_lib.Checkpoint(made.folder).items())
      config = hf_config.read(made.folder)
    self.assertFalse(made.folder.exists())
    self.assertEqual(config, awq_config.read(self.folder)[0])
    want = {
        name: array for name, array in packed.items()
        if not name.endswith(_LEAVES)
    }
    for module in modules:
      *words, scales = (packed.array(f"{module}.{leaf}") for leaf in _LEAVES)
      # A scale of another dtype is rounded once before it multiplies.
      scales = scales.astype(np.float32).astype(ml_dtypes.bfloat16)
      want[f"{module}.weight"] = independent.weight(
          *words, scales, "bfloat16"
      ).T
    self.assertEqual(set(found), set(want))
    for name, array in want.items():
      bits.assert_same_bits(found[name], np.ascontiguousarray(array))
    self.assertEqual(made.modules, len(modules))
    self.assertEqual(
        made.wide_weights,
        fingerprint.checkpoint_digest(
            (n, a) for n, a in found.items()
            if n.removesuffix(".weight") in modules
        ),
    )

  def test_one_nibble_changes_both_digests_and_one_bit_of_the_rest_none(self):
    self.pack()
    digests = []
    for change in (
        lambda tensors: None,
        lambda t: t[f"{packed_models.GATE}.qweight"].__ixor__(
            np.eye(*t[f"{packed_models.GATE}.qweight"].shape, dtype=np.int32)
        ),
        lambda t: t["model.norm.weight"].view(np.uint16).__ixor__(1),
    ):
      self.rewrite(change)
      with lib.folder(self.folder) as made:
        digests.append((made.packed_words, made.wide_weights))
    first, nibble, other = digests
    self.assertNotEqual(first[0], nibble[0])
    self.assertNotEqual(first[1], nibble[1])
    self.assertEqual(nibble, other)


if __name__ == "__main__":
  absltest.main()
