"""Packed experts: both ways have the bits of their oracle, and say they ran.

Needs no accelerator, and float64.
"""

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.contracts import decoder as decoder_contract
from moejax.contracts import named_combines
from moejax.contracts import packed_moe
from moejax.contracts import refusal
from moejax.contracts import route as route_contract
from moejax.modules import experts
from moejax.modules import moe
from moejax.modules import packed_experts as lib
from moejax.modules import tap as tap_lib
from moejax.numerics import router
from moejax.numerics.packed import alignment
from moejax.numerics.packed import awq_format
from moejax.numerics.packed import oracle
from moejax.numerics.packed import packed_ops
from moejax.numerics.portable import portable_ops
from moejax.protocols import packed_fixture
from tests import bits

_SHAPE = packed_fixture.LayerShape(
    experts=6, embed=128, hidden=64, group_size=64
)
_TOP_K = 2
_BASE = decoder_contract.portable(
    route_contract.RouterContract("r", top_k=_TOP_K, normalize=True),
    named_combines.named("transformers_grouped_mm"),
)
_DEQUANTIZED = packed_moe.dequantized_decoder(
    _BASE, dtype="bfloat16", group_size=64
)
_MARLIN = packed_moe.marlin_decoder(
    _BASE,
    packed_moe.marlin(
        dtype="bfloat16", thread_k=64, thread_n=64, grid=5, group_size=64
    ),
)


class _Recorder(tap_lib.Tap):

  def __init__(self):
    super().__init__()
    self.seen = {}

  def observe(self, name, value):
    self.seen[name] = np.asarray(value)
    return value


def _layer():
  return packed_fixture.layer(3, _SHAPE, "bfloat16")


def _params():
  return {
      name: {
          leaf: jnp.asarray(np.stack(arrays))
          for leaf, arrays in zip(
              ("qweight", "qzeros", "scales"),
              zip(*map(awq_format.to_checkpoint, operands), strict=True),
              strict=True,
          )
      }
      for name, operands in zip(("gate_up", "down"), _layer(), strict=True)
  }


def _inputs(gate_dtype, tokens=5):
  """Token 3 is padding."""
  request = packed_fixture.request(4, tokens, _TOP_K, _SHAPE, "bfloat16")
  ids = request.expert_ids.astype(np.int32)
  ids[3] = _SHAPE.experts
  return request.x, router.Route(
      jnp.asarray(ids), jnp.asarray(request.gates.astype(gate_dtype))
  )


def _run(contract, params, x, route):
  module = lib.build(params, contract, 0, packed_ops.operations(contract))
  tap = _Recorder()
  return module(jnp.asarray(x), route, tap), tap.seen, module


class DequantizedTest(absltest.TestCase):

  def test_has_the_bits_of_experts_over_the_wide_weights(self):
    x, route = _inputs(ml_dtypes.bfloat16)
    out, seen, _ = _run(_DEQUANTIZED, _params(), x, route)
    wide = {
        name: jnp.asarray(np.stack([
            awq_format.dequantize(o, "bfloat16").T for o in operands
        ]))
        for name, operands in zip(("gate_up", "down"), _layer(), strict=True)
    }
    tap = _Recorder()
    plain = experts.Experts(
        wide, _BASE.combine, 0, portable_ops.PortableOperations()
    )
    bits.assert_same_bits(out, plain(jnp.asarray(x), route, tap))
    self.assertEqual(set(seen) - set(tap.seen), {"packed_elements"})
    for name, value in tap.seen.items():
      bits.assert_same_bits(seen[name], value)

  def test_keeps_words_and_nothing_wide(self):
    _, _, module = _run(_DEQUANTIZED, _params(), *_inputs(ml_dtypes.bfloat16))
    held = jax.tree.leaves(nnx.state(module))
    self.assertEqual(
        sum(leaf.nbytes for leaf in held),
        sum(leaf.nbytes for leaf in jax.tree.leaves(_params())),
    )


class MarlinTest(absltest.TestCase):

  def test_has_the_bits_of_the_oracle_of_all_experts(self):
    x, route = _inputs(np.float32)
    out, seen, _ = _run(_MARLIN, _params(), x, route)
    valid = np.array([True, True, True, False, True])
    ids, gates = (np.asarray(a)[valid] for a in route)
    blocks = alignment.route_blocks(
        ids, _SHAPE.experts, alignment.block_rows_for(ids.size, _SHAPE.experts)
    )
    expected = oracle.packed_moe_oracle(
        x[valid], gates, *_layer(), blocks, _MARLIN.experts
    )
    bits.assert_same_bits(out[valid], expected.final)
    for name, surface in (
        ("gate_up", expected.w13),
        ("activation", expected.activation),
        ("terms", expected.routed_w2),
    ):
      rows = seen[name][valid]
      bits.assert_same_bits(rows.reshape(-1, rows.shape[-1]), surface)
    bits.assert_same_bits(out[3], np.zeros(128, ml_dtypes.bfloat16))

  def test_padding_changes_no_bit(self):
    x, route = _inputs(np.float32)
    out, _, _ = _run(_MARLIN, _params(), x, route)
    valid = np.array([0, 1, 2, 4])
    alone, _, _ = _run(
        _MARLIN, _params(), x[valid], router.Route(*(a[valid] for a in route))
    )
    bits.assert_same_bits(np.asarray(out)[valid], alone)

  def test_refuses_a_step_of_padding_alone(self):
    x, route = _inputs(np.float32)
    with self.assertRaisesRegex(ValueError, "none of 1 tokens"):
      _run(
          _MARLIN, _params(), x[3:4], router.Route(*(a[3:4] for a in route))
      )


class BothTest(parameterized.TestCase):

  @parameterized.parameters(
      (_DEQUANTIZED, ml_dtypes.bfloat16), (_MARLIN, np.float32)
  )
  def test_counts_the_elements_of_every_route(self, contract, gates):
    _, seen, _ = _run(contract, _params(), *_inputs(gates))
    expected = np.full((5, _TOP_K, 2), 128, np.int32)
    expected[3] = 0
    bits.assert_same_bits(seen["packed_elements"], expected)

  @parameterized.parameters(
      (_DEQUANTIZED, ml_dtypes.bfloat16), (_MARLIN, np.float32)
  )
  def test_one_nibble_of_a_used_word_is_seen(self, contract, gates):
    x, route = _inputs(gates)
    expert = int(route.ids[0, 0])
    out, _, module = _run(contract, _params(), x, route)
    params = _params()
    # Row k of the largest input, the sixteenth column of the up half.
    k = int(np.argmax(np.abs(x[0].astype(np.float32))))
    words = params["gate_up"]["qweight"]
    changed = words.at[expert, k, 9].set(words[expert, k, 9] ^ jnp.int32(8))
    params["gate_up"]["qweight"] = changed
    other, _, changed_module = _run(contract, params, x, route)
    self.assertTrue((np.asarray(out[0]) != np.asarray(other[0])).any())
    summaries = [
        lib.summary({0: m})["layers.0"] for m in (module, changed_module)
    ]
    self.assertEqual(*(s["down"] for s in summaries))
    self.assertNotEqual(*(s["gate_up"]["digest"] for s in summaries))

  def test_the_summary_has_the_packed_layers_alone(self):
    _, _, module = _run(_MARLIN, _params(), *_inputs(np.float32))
    plain = experts.Experts(
        {"gate_up": jnp.zeros((1, 2, 1)), "down": jnp.zeros((1, 1, 1))},
        _BASE.combine, 0, portable_ops.PortableOperations(),
    )
    found = lib.summary({0: plain, 4: module})
    self.assertEqual(list(found), ["layers.4"])
    self.assertEqual(found["layers.4"]["module"], "PackedExperts")
    down = found["layers.4"]["down"]
    self.assertEqual(
        (down["experts"], down["k"], down["n"], down["group_size"]),
        (6, 64, 128, 64),
    )
    # Half a byte a code; a zero point and a 16-bit scale a group and column.
    self.assertEqual(down["bytes"], 6 * (64 * 64 + 64 + 256))


class RefusalTest(parameterized.TestCase):

  def _build(self, contract, params):
    return lib.build(params, contract, 0, packed_ops.operations(contract))

  def test_tiles_that_do_not_fit_are_unsupported(self):
    contract = packed_moe.marlin_decoder(
        _BASE,
        packed_moe.marlin(
            dtype="bfloat16", thread_k=128, thread_n=256, grid=5,
            group_size=64,
        ),
    )
    with self.assertRaisesRegex(
        refusal.UnsupportedError, "gate_up .*n=128 is no multiple of thread_n="
    ):
      self._build(contract, _params())
    contract = packed_moe.marlin_decoder(
        _BASE,
        packed_moe.marlin(
            dtype="bfloat16", thread_k=128, thread_n=64, grid=5, group_size=64
        ),
    )
    with self.assertRaisesRegex(
        refusal.UnsupportedError, "down .*k=64 is no multiple of thread_k=128"
    ):
      self._build(contract, _params())

  @parameterized.parameters(32, -1)
  def test_groups_other_than_the_contract_says(self, group_size):
    contract = packed_moe.dequantized_decoder(
        _BASE, dtype="bfloat16", group_size=group_size
    )
    with self.assertRaisesRegex(
        ValueError, f"groups of 64 .*group_size={group_size}"
    ):
      self._build(contract, _params())

  def test_groups_other_than_marlins(self):
    contract = packed_moe.marlin_decoder(
        _BASE,
        packed_moe.marlin(
            dtype="bfloat16", thread_k=64, thread_n=64, grid=5, group_size=32
        ),
    )
    with self.assertRaisesRegex(ValueError, "groups of 64 .*group_size=32"):
      self._build(contract, _params())

  def test_tensors_that_do_not_belong_together(self):
    params = _params()
    params["down"]["qzeros"] = params["down"]["qzeros"][:, :, :-1]
    with self.assertRaisesRegex(ValueError, "down: .*no AWQ tensors"):
      self._build(_DEQUANTIZED, params)
    params = _params()
    del params["down"]["scales"]
    with self.assertRaisesRegex(ValueError, "down holds"):
      self._build(_DEQUANTIZED, params)
    params = _params()
    params["down"] = params["gate_up"]
    with self.assertRaisesRegex(ValueError, "no experts of one layer"):
      self._build(_DEQUANTIZED, params)

  def test_a_contract_that_does_not_know_packed_experts(self):
    params = _params() | {"router": jnp.zeros((6, 128), jnp.bfloat16)}
    with self.assertRaisesRegex(
        ValueError, "layer 5: the experts are packed, and contract 'portable'"
    ):
      moe.MoE(params, _BASE, 5, portable_ops.PortableOperations())


if __name__ == "__main__":
  absltest.main()
