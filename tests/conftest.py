"""What every test runs under.

float64 is on (portable arithmetic needs it), so every array states its dtype;
mixing dtypes by accident raises. Property tests are repeatable.
"""

import os

import hypothesis as hp
import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

hp.settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=25,
)
hp.settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
  """Drops programs after each file: few are shared, all take memory."""
  yield
  jax.clear_caches()
