"""A small folder that transformers wrote, packed; and how a test changes it."""

import json
import pathlib
import tempfile

from absl.testing import parameterized
import numpy as np
import safetensors.numpy

from moejax.contracts import refusal
from tests.torch_bridge.hf import tiny_models
from torch_bridge.hf import checkpoint
from torch_bridge.hf.awq import loader
from torch_bridge.hf.awq import packer

# Widths that fill words of eight codes, and tell the axes apart.
SIZES = dict(
    hidden_size=32,
    moe_intermediate_size=16,
    intermediate_size=48,
    num_hidden_layers=2,
    mlp_only_layers=[],
)
GATE = "model.layers.0.mlp.experts.1.gate_proj"


class PackedModelTestCase(parameterized.TestCase):
  """Each test has folders of its own: `plain`, and `folder`, packed."""

  def setUp(self):
    super().setUp()
    parent = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.plain, self.folder = parent / "plain", parent / "packed"

  def pack(self, request=packer.Request(group_size=16), **changes):
    """Has transformers write a model and packs it; returns the summary."""
    if not self.plain.exists():
      tiny_models.save(tiny_models.model(**SIZES | changes), self.plain)
    return packer.pack(self.plain, self.folder, request)

  def load(self, **options):
    """Loads the packed folder."""
    return loader.load(checkpoint.Checkpoint(self.folder), **options)

  def original(self):
    """Opens the folder that was packed, as one matrix an expert."""
    return checkpoint.Checkpoint(self.plain)

  def rewrite(self, change, folder=None):
    """Changes the {name: array} of the packed file."""
    path = (folder or self.folder) / checkpoint.SINGLE
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    tensors = {k: np.ascontiguousarray(v) for k, v in tensors.items()}
    path.write_bytes(safetensors.numpy.save(tensors, metadata={"format": "pt"}))

  def rewrite_packing(self, **changes):
    """Changes the quantization_config; None removes a field."""
    path = self.folder / "config.json"
    fields = json.loads(path.read_text())
    packing = fields["quantization_config"] | changes
    fields["quantization_config"] = {
        k: v for k, v in packing.items() if v is not None
    }
    path.write_text(json.dumps(fields))

  def assert_refused(self, *patterns, error=refusal.HarnessError, **options):
    """Fails unless loading is refused with the folder and all patterns."""
    with self.assertRaises(error) as caught:
      self.load(**options)
    self.assertIs(type(caught.exception), error)
    self.assertIn(str(self.folder.parent), str(caught.exception))
    for pattern in patterns:
      self.assertRegex(str(caught.exception), pattern)
