"""A folder that transformers wrote, and how a test changes and loads it."""

import pathlib
import tempfile

from absl.testing import parameterized
import numpy as np
import safetensors.numpy

from moejax.contracts import refusal
from tests.torch_bridge.hf import tiny_models
from torch_bridge.hf import checkpoint
from torch_bridge.hf import hf_config
from torch_bridge.hf import parameter_map


class SavedModelTestCase(parameterized.TestCase):
  """Each test has a folder of its own; `save` fills it."""

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory())
    )

  def save(self, made, **options):
    """Has transformers write a model; returns our config of it."""
    tiny_models.save(made, self.folder, **options)
    return hf_config.read(self.folder)

  def load(self, config, **options):
    """Loads the folder's parameters."""
    return parameter_map.load_parameters(
        checkpoint.Checkpoint(self.folder), config, **options
    )

  def rewrite(self, change):
    """Changes the {name: array} of the saved file."""
    path = self.folder / checkpoint.SINGLE
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    tensors = {k: np.ascontiguousarray(v) for k, v in tensors.items()}
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})

  def assert_refused(self, config, *patterns):
    """Fails unless loading is refused with the folder and all patterns."""
    with self.assertRaises(refusal.HarnessError) as caught:
      self.load(config)
    self.assertIn(str(self.folder), str(caught.exception))
    for pattern in patterns:
      self.assertRegex(str(caught.exception), pattern)
