"""The expert MLP and its hand-written gradient, case by case.

Every form (split, merged, eager; weight before and after fc2) against the dense
reference, values and finiteness. Most cases share one shape, so that they share
programs; of the others three forms run here, and all six in a slow test. Needs
no accelerator.
"""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.contracts import grouped_mlp
from moejax.numerics.grouped import mlp as lib
from moejax.numerics.grouped import mlp_oracle
from tests import bits
from tests.numerics.grouped import cases

_ONE = cases.one_expert
_THREE = cases.FORMS[1:3] + cases.FORMS[4:5]
# 6 tokens, 2 slots, 4 experts; 4 says none.
_MIXED = np.int32([[0, 4], [4, 4], [2, 1], [4, 0], [1, 1], [2, 0]])


def _distinct(seed, tokens, top_k, experts):
  order = np.argsort(np.random.default_rng(seed).random((tokens, experts)))
  return order[:, :top_k].astype(np.int32)


def _operation(case, contract):
  return lambda *a: lib.moe_mlp(*a, jnp.asarray(case.ids), contract)


class FormsTest(parameterized.TestCase):

  @parameterized.parameters(8, 64, 128)
  def test_m10_distinct_experts(self, experts):
    case = cases.problem(
        _distinct(0, 24, 4, experts), experts=experts, embed=4, hidden=4
    )
    cases.assert_right(case, forms=cases.FORMS if experts == 8 else _THREE)

  def test_m11_partial_duplicates(self):
    cases.assert_right(cases.problem([[0, 0], [1, 2], [3, 3]] * 2))

  def test_m11_more_slots_than_experts(self):
    ids = np.random.default_rng(0).integers(0, 3, (9, 5))
    ids[0] = 2
    case = cases.problem(ids, experts=3)
    cases.assert_right(case, forms=_THREE)
    # Every slot keeps its own gradient: equal for equal experts of a token.
    found = cases.results(case, grouped_mlp.GroupedMlpContract())["d_gates"]
    for slots, got in zip(case.ids, found, strict=True):
      for expert in np.unique(slots):
        same = got[slots == expert]
        np.testing.assert_array_equal(same, same[0])

  @parameterized.parameters(*cases.FORMS)
  def test_m11_a_case_by_hand(self, *form):
    one = np.ones((1, 1))
    case = cases.Problem(
        one, np.float64([[0.25, 0.75]]), np.float64([[[16], [2]]]),
        np.float64([[[3]]]), _ONE(1), one,
    )
    found = cases.results(case, cases.contract_of("native", form), form[0])
    wanted = {
        "y": 96, "dx": 192.00015, "d_gates": [96, 96],
        "d_gate_up": [6.00001, 48], "d_down": 32,
    }
    for name, value in wanted.items():
      np.testing.assert_allclose(
          found[name].reshape(-1), np.ravel(value), rtol=1e-6, err_msg=name
      )
    flat = case._replace(gate_up=np.float64([[[0], [2]]]))
    found = cases.results(flat, cases.contract_of("native", form), form[0])
    self.assertEqual(found.pop("d_gate_up").reshape(-1).tolist(), [3, 0])
    self.assertFalse(any(v.any() for v in found.values()))

  def test_m12_experts_without_tokens(self):
    # First, last, middle, all but one: one shape, one program a form.
    for ids in ([1, 2, 3], [0, 1, 2], [0, 2, 3], [2, 2, 2]):
      ids = np.int32(ids)[np.arange(12).reshape(6, 2) % 3]
      case = cases.problem(ids)
      cases.assert_right(case)
      found = cases.results(case, grouped_mlp.GroupedMlpContract())
      for expert in set(range(4)) - set(ids.reshape(-1).tolist()):
        for name in ("d_gate_up", "d_down"):
          bits.assert_same_bits(
              found[name][expert], np.zeros_like(found[name][expert])
          )

  @parameterized.named_parameters(
      ("no_token", np.zeros((0, 2), np.int32), 4),
      ("one_token", np.int32([[1, 1]]), 4),
      ("one_expert", np.zeros((5, 2), np.int32), 1),
      ("one_slot", np.int32([[3], [0], [0]]), 4),
  )
  def test_m13_small_batches(self, ids, experts):
    case = cases.problem(ids, experts=experts)
    cases.assert_right(case, forms=_THREE)
    cases.assert_right(
        case, chain="sequential", forms=cases.FORMS[2:3], block_rows=16
    )

  def test_m13_no_token_has_zero_gradients(self):
    case = cases.problem(np.zeros((0, 2), np.int32))
    for chain in ("native", "sequential"):
      found = cases.results(case, grouped_mlp.of_chain(chain))
      self.assertEqual(found["y"].shape, (0, 8))
      for name in ("d_gate_up", "d_down"):
        bits.assert_same_bits(found[name], np.zeros_like(found[name]))

  @parameterized.parameters((1, 43), (43, 1))
  def test_m14_widths(self, embed, hidden):
    case = cases.problem(
        np.int32([[0, 1], [1, 1], [3, 0]]), embed=embed, hidden=hidden
    )
    cases.assert_right(case, chain="sequential", forms=cases.FORMS[2:4],
                       block_rows=2)

  @pytest.mark.slow
  @parameterized.named_parameters(
      ("m07_t100", _ONE(100), 4, 8, 8),
      ("m07_t129", _ONE(129), 4, 8, 8),
      ("m07_three_slots", _ONE(128, 3), 4, 8, 8),
      ("m10_64", _distinct(0, 24, 4, 64), 64, 4, 4),
      ("m10_128", _distinct(0, 24, 4, 128), 128, 4, 4),
      ("m11", np.int32([[2] * 5, [0, 1, 2, 0, 1], [1, 1, 0, 2, 2]]), 3, 8, 8),
      ("m13_no_token", np.zeros((0, 2), np.int32), 4, 8, 8),
      ("m13_one_token", np.int32([[1, 1]]), 4, 8, 8),
      ("m13_one_expert", np.zeros((5, 2), np.int32), 1, 8, 8),
      ("m13_one_slot", np.int32([[3], [0], [0]]), 4, 8, 8),
      ("m14_1_43", np.int32([[0, 1], [1, 1], [3, 0]]), 4, 1, 43),
      ("m14_43_16", np.int32([[0, 1], [1, 1], [3, 0]]), 4, 43, 16),
      ("m14_130_1", np.int32([[0, 1], [1, 1], [3, 0]]), 4, 130, 1),
  )
  def test_in_every_form(self, ids, experts, embed, hidden):
    cases.assert_right(
        cases.problem(ids, experts=experts, embed=embed, hidden=hidden)
    )

  def test_m16_gates_of_zero_negative_and_tiny(self):
    ids = np.int32([[0, 1], [1, 1], [2, 3], [3, 0], [2, 2], [0, 3]])
    for gates in (0.0, -0.5, 1e-30):
      case = cases.problem(ids, gates=np.full((6, 2), gates))
      cases.assert_right(case)
    mixed = np.float64([[0, -1], [1e-30, 2], [-3, 0], [0, 0], [1, 1], [0, 9]])
    cases.assert_right(cases.problem(ids, gates=mixed))

  @parameterized.parameters("nan", "finite")
  def test_m18_slots_without_an_expert(self, kind):
    ids, case = _MIXED, cases.problem(_MIXED)
    wanted = cases.reference(case)
    if kind == "nan":  # Neither the gates nor the rows of these may be read.
      gates = np.where(ids == 4, np.nan, case.gates)
      x, dy = case.x.copy(), case.dy.copy()
      x[1], dy[1] = np.nan, np.nan
      case = case._replace(x=x, dy=dy, gates=gates)
    for form, chain in (
        *((form, "native") for form in cases.FORMS[:4]),
        (("merged", "before_fc2"), "sequential"),
    ):
      contract = cases.contract_of(chain, form, block_rows=4)
      found = cases.results(case, contract)
      self.assertEmpty(cases.beyond(found, wanted, "float64"), (form, chain))
      bits.assert_same_bits(found["d_gates"][ids == 4], np.zeros(4))
      for name in ("y", "dx"):
        bits.assert_same_bits(found[name][1], np.zeros(8))

  def test_hidden_slots_give_the_router_no_gradient(self):
    """Public case: placeholder slots of expert parallelism, two shards."""
    total = np.zeros((1, 2))
    for mine, output in ((0, [1.0, 2.0]), (1, [5.0, -1.0])):
      ids = np.full((1, 2), 1, np.int32)  # One expert here; 1 says none.
      ids[0, mine] = 0
      # gate = 1 and up = 1 / silu(1) by the weights: the output is `down`.
      up = (1 + np.exp(-1.0))
      case = cases.Problem(
          np.float64([[1.0, 0.0]]), np.ones((1, 2)),
          np.float64([[[1, 0], [up, 0]]]), np.reshape(output, (1, 2, 1)), ids,
          np.ones((1, 2)),
      )
      total += cases.results(case, grouped_mlp.GroupedMlpContract())["d_gates"]
    np.testing.assert_allclose(total, [[3, 4]], rtol=1e-14)


class NumericsTest(parameterized.TestCase):

  @parameterized.parameters("before_fc2", "after_fc2")
  def test_m09_split_and_merged_have_the_same_bits_but_for_dx(self, placement):
    case = cases.problem(
        _ONE(256), embed=128, hidden=64, dtype="bfloat16",
        gates=np.full((256, 2), 0.75),
    )
    found = [
        cases.results(
            case,
            cases.contract_of(
                "native", (layout, placement), clamp_limit=10.0
            ),
            layout,
        )
        for layout in ("split", "merged", "eager")
    ]
    wanted = cases.reference(case, 10.0)
    for each in found:
      self.assertEmpty(cases.beyond(each, wanted, "bfloat16"))
    for name in set(cases.NAMES) - {"dx"}:
      bits.assert_same_bits(found[1][name], found[0][name])
    self.assertTrue((found[0]["dx"] != found[1]["dx"]).any())
    self.assertTrue((found[0]["d_gate_up"] != found[2]["d_gate_up"]).any())

  @parameterized.parameters(
      ("bfloat16", cases.FORMS), ("float32", cases.FORMS[1:3])
  )
  def test_close_to_float64_in_every_form(self, dtype, forms):
    case = cases.problem(
        _distinct(1, 32, 2, 4), embed=32, hidden=32, dtype=dtype
    )
    cases.assert_right(case, dtype, forms=forms)

  @parameterized.parameters(
      ("split", "before_fc2", "bfloat16", "float32", "sequential"),
      ("split", "after_fc2", "float32", "float32", "portable"),
      ("merged", "before_fc2", "bfloat16", "bfloat16", "mma16"),
      ("merged", "after_fc2", "float16", "float32", "portable"),
  )
  def test_twin_has_the_bits_of_the_definition(
      self, layout, placement, dtype, weights, chain
  ):
    case = cases.problem(
        np.random.default_rng(0).integers(0, 5, (12, 3)), embed=16, hidden=18,
        dtype=dtype, weights=weights,
    )
    contract = cases.contract_of(
        chain, (layout, placement), clamp_limit=1.0, block_rows=8
    )
    found = cases.results(case, contract)
    wanted = mlp_oracle.moe_mlp_oracle(*case, contract)
    for name in cases.NAMES:
      bits.assert_same_bits(found[name], wanted[name])

  @parameterized.parameters(*cases.FORMS[0:4:3])
  def test_m22_saved_and_rebuilt_residuals(self, *form):
    case = cases.problem(
        np.random.default_rng(0).integers(0, 5, (12, 3)), dtype="float32"
    )
    contract = cases.contract_of(
        "portable", form, clamp_limit=1.0, block_rows=8
    )
    rebuilt = dataclasses.replace(contract, residuals="recompute")
    found, again = (cases.results(case, c) for c in (contract, rebuilt))
    for name in cases.NAMES:
      bits.assert_same_bits(again[name], found[name])

  def test_m22_under_checkpoint_and_two_pulls_of_one_gradient(self):
    case = cases.problem(
        np.random.default_rng(0).integers(0, 5, (12, 3)), dtype="bfloat16",
        weights="float32",
    )
    contract = grouped_mlp.of_chain("portable", block_rows=8)
    operation = _operation(case, contract)

    @functools.partial(jax.jit, static_argnums=0)
    def run(checkpointed, operands, dy):
      function = jax.checkpoint(operation) if checkpointed else operation
      _, vjp = jax.vjp(function, *operands)
      return vjp(dy), vjp(dy)

    plain, second = run(False, case.operands, case.dy)
    rebuilt, _ = run(True, case.operands, case.dy)
    for gradient, operand, other, twice in zip(
        plain, case.operands, rebuilt, second, strict=True
    ):
      self.assertEqual(gradient.dtype, operand.dtype)
      bits.assert_same_bits(other, gradient)
      bits.assert_same_bits(twice, gradient)

  def test_m22_other_dtypes_of_cotangents_are_refused(self):
    case = cases.problem(_ONE(3), dtype="bfloat16")
    _, vjp = jax.vjp(
        _operation(case, grouped_mlp.GroupedMlpContract()),
        *map(jnp.asarray, case.operands),
    )
    with self.assertRaises((ValueError, TypeError)):
      vjp(jnp.asarray(case.dy, jnp.float32))

  @parameterized.parameters(*cases.FORMS[:4])
  def test_m27_levels_agree(self, *form):
    case = cases.problem(_MIXED, seed=2)
    contract = cases.contract_of("native", form)
    level_2 = cases.results(case, contract)
    self.assertEmpty(
        cases.beyond(level_2, cases.reference(case), "float64")
    )
    level_1 = cases.results(case, contract, "composed")
    self.assertEmpty(cases.beyond(level_1, level_2, "float64"))

  def test_m27_central_differences(self):
    case = cases.problem(
        np.int32([[0, 0], [1, 2], [3, 4]]), embed=4, hidden=4
    )
    contract = grouped_mlp.GroupedMlpContract()
    found = cases.results(case, contract)
    value = jax.jit(
        lambda *a: jnp.vdot(case.dy, _operation(case, contract)(*a))
    )
    step = 1e-6
    for number, name in enumerate(cases.NAMES[1:]):
      operands = [np.array(v) for v in case.operands]
      flat = operands[number].reshape(-1)
      for place in range(0, flat.size, max(1, flat.size // 12)):
        kept, ends = flat[place], []
        for way in (step, -step):
          flat[place] = kept + way
          ends.append(float(value(*operands)))
        flat[place] = kept
        self.assertAlmostEqual(
            (ends[0] - ends[1]) / (2 * step),
            found[name].reshape(-1)[place], delta=1e-6, msg=name,
        )

  def test_the_pair_of_gate_and_up_is_the_merged_matrix(self):
    case = cases.problem(_MIXED, dtype="float32")
    x, gates, whole, down = case.operands
    pair = tuple(np.split(whole, 2, axis=1))
    for layout in ("split", "merged"):
      operation = _operation(
          case,
          grouped_mlp.of_chain("portable", fc1_layout=layout, block_rows=8),
      )

      @jax.jit
      def run(gate_up, operation=operation):
        y, vjp = jax.vjp(operation, x, gates, gate_up, down)
        return y, vjp(jnp.asarray(case.dy))[2]

      (y, d_pair), (wanted, d_whole) = run(pair), run(whole)
      bits.assert_same_bits(y, wanted)
      bits.assert_same_bits(np.concatenate(d_pair, axis=1), d_whole)


class RefusalTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.case = cases.problem(np.int32([[0, 1], [2, 2]]))
    self.run = _operation(self.case, grouped_mlp.GroupedMlpContract())

  def test_m22_no_batching_and_no_second_derivative(self):
    x, *rest = self.case.operands

    def loss(x):
      return jnp.sum(self.run(x, *rest) ** 2)

    with self.assertRaisesRegex(NotImplementedError, "batching"):
      jax.vmap(loss)(x[None])
    with self.assertRaisesRegex(NotImplementedError, "batching"):
      jax.vmap(jax.grad(loss))(x[None])
    with self.assertRaisesRegex(NotImplementedError, "second derivative"):
      jax.grad(lambda v: jnp.sum(jax.grad(loss)(v)))(x)
    with self.assertRaisesRegex(NotImplementedError, "second derivative"):
      jax.jvp(jax.grad(loss), (x,), (x,))

  def test_operands_that_do_not_fit(self):
    x, gates, gate_up, down = self.case.operands
    for wrong, message in (
        ((x, gates, gate_up[:, :-1], down), "do not fit"),
        ((x, gates[:1], gate_up, down), "token, slot"),
        ((x, gates.astype(np.float16), gate_up, down), "gates of float16"),
        ((x, gates, gate_up.astype(np.float32), down), "as wide"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        self.run(*map(jnp.asarray, wrong))


if __name__ == "__main__":
  absltest.main()
