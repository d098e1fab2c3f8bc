"""A layer of the full shape, 128 experts of 2,048 by 768, from file to output.

The words are random bits of a seed; 320 MB lie in a temporary folder. Needs no
accelerator, and float64.
"""

import json
import pathlib
import tempfile

from absl.testing import absltest
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy

from moejax.contracts import decoder as decoder_contract
from moejax.contracts import named_combines
from moejax.contracts import packed_moe
from moejax.modules import config as config_lib
from moejax.modules import decoder as decoder_lib
from moejax.modules import tap as tap_lib
from moejax.numerics.packed import packed_ops
from tests import bits
from tests.torch_bridge.hf.awq import independent
from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf import hf_config
from torch_bridge.hf import parameter_map
from torch_bridge.hf.awq import config as awq_config
from torch_bridge.hf.awq import loader

_CONFIG = config_lib.DecoderConfig(
    vocab_size=32,
    embed=2048,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    hidden=64,
    expert_hidden=768,
    num_experts=128,
    top_k=8,
    normalize_gates=True,
    sparse_layers=(0,),
)
_AWQ = awq_config.AwqConfig(128, ("self_attn", "mlp.gate", "lm_head"))
_LEAVES = ("qweight", "qzeros", "scales")
_TOKENS = np.int32([[3, 29]])


def _bfloat16(rng, shape, scale):
  values = rng.standard_normal(shape, np.float32) * np.float32(scale)
  return values.astype(ml_dtypes.bfloat16)


def _tensors():
  """Yields every tensor of the checkpoint."""
  rng = np.random.default_rng(20261130)
  for row in parameter_map.table(_CONFIG):
    for name in row.names:
      if ".experts." not in name:
        scale = 1.0 if len(row.source_shape) == 1 else 0.05
        yield name, _bfloat16(rng, row.source_shape, scale)
        continue
      (n, k), module = row.source_shape, name.removesuffix(".weight")
      for leaf, rows in (("qweight", k), ("qzeros", k // 128)):
        words = rng.integers(-2**31, 2**31, (rows, n // 8), np.int32)
        yield f"{module}.{leaf}", words
      scales = rng.uniform(0.001, 0.004, (k // 128, n))
      yield f"{module}.scales", scales.astype(ml_dtypes.bfloat16)


class _Recorder(tap_lib.Tap):

  def __init__(self):
    super().__init__()
    self.seen = {}

  def observe(self, name, value):
    if ".moe." in name or ".mlp_norm.output" in name:
      self.seen[name.removeprefix("layers.0.")] = np.asarray(value)
    return value


class FullShapeTest(absltest.TestCase):

  def test_c13_a_full_layer_is_loaded_and_runs_packed(self):
    with tempfile.TemporaryDirectory() as name:
      folder = pathlib.Path(name)
      (folder / "model.safetensors").write_bytes(
          safetensors.numpy.save(dict(_tensors()))
      )
      fields = hf_config.to_hf(_CONFIG) | {
          awq_config.FIELD: awq_config.to_hf(_AWQ)
      }
      (folder / "config.json").write_text(json.dumps(fields))
      checkpoint = checkpoint_lib.Checkpoint(folder)
      for module, k, n in (
          ("model.layers.0.mlp.experts.127.up_proj", 2048, 768),
          ("model.layers.0.mlp.experts.0.down_proj", 768, 2048),
      ):
        self.assertEqual(
            [checkpoint.shape(f"{module}.{leaf}") for leaf in _LEAVES],
            [(k, n // 8), (k // 128, n // 8), (k // 128, n)],
        )
      loaded = loader.load(checkpoint)
      self.assertLen(loaded.packed, 128 * 3)
      self._run(loaded, checkpoint)

  def _run(self, loaded, checkpoint):
    contract = packed_moe.marlin_decoder(
        decoder_contract.native(
            config_lib.router_contract(loaded.config),
            named_combines.named("transformers_grouped_mm"),
        ),
        packed_moe.marlin(
            dtype="bfloat16", thread_k=128, thread_n=64, grid=528
        ),
    )
    params = {path: jnp.asarray(a) for path, a in loaded.params.items()}
    decoder = decoder_lib.Decoder(
        loaded.config, decoder_lib.nest(params), contract,
        packed_ops.operations(contract),
    )
    tap = _Recorder()
    logits, _ = decoder(
        jnp.asarray(_TOKENS), decoder_lib.empty_state(loaded.config, 1, 2),
        tap=tap,
    )
    self.assertTrue(np.isfinite(np.asarray(logits, np.float32)).all())
    elements = tap.seen["moe.experts.packed_elements"]
    bits.assert_same_bits(
        elements, np.broadcast_to(np.int32([1536, 2048]), (2, 8, 2))
    )
    for slot in (0, 7):
      self._assert_near(tap.seen, checkpoint, slot)

  def _assert_near(self, seen, checkpoint, slot):
    """W13 of a route against float64 over independently decoded weights."""
    x = seen["mlp_norm.output"].reshape(2, 2048)[1].astype(np.float64)
    expert = int(seen["moe.router.ids"][1, slot])
    at = f"model.layers.0.mlp.experts.{expert}"
    weight = np.concatenate([
        independent.weight(
            *(checkpoint.array(f"{at}.{p}.{leaf}") for leaf in _LEAVES),
            "bfloat16",
        )
        for p in ("gate_proj", "up_proj")
    ], axis=1).astype(np.float64)
    exact, absolute = x @ weight, np.abs(x) @ np.abs(weight)
    found = seen["moe.experts.gate_up"][1, slot].astype(np.float64)
    # One rounding to bfloat16, and 128 k16 steps and some merges that cut at
    # most 17 terms each at 2**-23 of the largest.
    rule = 2.0**-8 * np.abs(exact) + 136 * 18 * 2.0**-23 * absolute
    self.assertTrue((np.abs(found - exact) <= rule).all())
    # The rule is no excuse: another expert's output is far outside it.
    wrong = seen["moe.experts.gate_up"][1, 7 - slot].astype(np.float64)
    self.assertGreater((np.abs(wrong - exact) > rule).mean(), 0.9)


if __name__ == "__main__":
  absltest.main()
