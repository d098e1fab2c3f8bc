"""Routes: ties, margins, and which scores become gates.

Needs no accelerator.
"""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import chex
import hypothesis as hp
import hypothesis.extra.numpy as hpn
import hypothesis.strategies as hps
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.contracts import route
from moejax.numerics import formats
from moejax.numerics import router as lib
from tests import bits

_CASES = pathlib.Path(__file__).parents[1] / "cases" / "files"
_RULES = ("lowest_index", "highest_index")


def _contract(top_k: int, normalize: bool = True, **fields):
  """A router that rounds nothing to 16 bits."""
  fields = {"logits_dtype": "float32", "gate_dtype": "float32", **fields}
  return route.RouterContract("case", top_k, normalize, **fields)


def _by_sorting(scores: np.ndarray, top_k: int, tie_rule: str) -> np.ndarray:
  """Sorts (score, index) pairs one row at a time."""
  sign = 1 if tie_rule == "lowest_index" else -1
  rows = []
  for row in scores.astype(np.float64).tolist():
    pairs = sorted((-score, sign * i) for i, score in enumerate(row))
    rows.append([sign * i for _, i in pairs[:top_k]])
  return np.int32(rows)


class SelectTest(chex.TestCase):

  def _scores(self, dtype):
    """[64, 8] rows full of ties, signed zeros, subnormals and infinities."""
    fmt = formats.of(dtype)
    rng = np.random.default_rng(0)
    tiny = 2.0 ** (fmt.min_exponent - (fmt.precision - 1))
    values = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, 0.5, -3.0]
    values += [tiny, 2 * tiny, 3 * tiny, -tiny, -2 * tiny]
    scores = rng.choice(values, (64, 8))
    scores[:16] = rng.standard_normal((16, 8))
    scores[16] = 1.0
    return scores.astype(np.float32).astype(fmt.numpy)

  @parameterized.product(
      dtype=("float32", "bfloat16", "float16"), tie_rule=_RULES
  )
  def test_oracle_sorts_by_score_and_then_by_index(self, dtype, tie_rule):
    scores = self._scores(dtype)
    for top_k in (1, 3, 8):
      bits.assert_same_bits(
          lib.select_oracle(scores, top_k, tie_rule),
          _by_sorting(scores, top_k, tie_rule),
      )

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.product(
      dtype=("float32", "bfloat16", "float16"), tie_rule=_RULES
  )
  def test_twin_equals_the_oracle(self, dtype, tie_rule):
    scores = self._scores(dtype)
    for top_k in (3, 8):
      fn = self.variant(
          lambda x, top_k=top_k: lib.select(x, top_k, tie_rule)
      )
      bits.assert_same_bits(
          fn(jnp.asarray(scores)), lib.select_oracle(scores, top_k, tie_rule)
      )

  def test_subnormal_scores_are_told_apart(self):
    scores = np.uint32([[1, 2, 3, 0x80000001]]).view(np.float32)
    expected = np.int32([[2, 1, 0, 3]])
    bits.assert_same_bits(
        lib.select_oracle(scores, 4, "lowest_index"), expected
    )
    bits.assert_same_bits(
        lib.select(jnp.asarray(scores), 4, "lowest_index"), expected
    )

  def test_zeros_of_either_sign_tie(self):
    scores = np.float32([[-0.0, 0.0, -0.0, 0.0]])
    for rule, expected in zip(_RULES, ([0, 1, 2, 3], [3, 2, 1, 0])):
      bits.assert_same_bits(
          lib.select(jnp.asarray(scores), 4, rule), np.int32([expected])
      )
      bits.assert_same_bits(
          lib.select_oracle(scores, 4, rule), np.int32([expected])
      )

  @parameterized.parameters(
      ((1, 3, 3, 2, 3, 0, 3, 1), 2, (1, 2), (6, 4)),
      ((1, 3, 3, 2, 3, 0, 3, 1), 3, (1, 2, 4), (6, 4, 2)),
      ((0, 5, 1, 5, 2, 3, 1, 0), 2, (1, 3), (3, 1)),
  )
  def test_c03_a_tie_goes_to_the_declared_index(
      self, row, top_k, lowest, highest
  ):
    scores = np.float32([row])
    for rule, expected in zip(_RULES, (lowest, highest)):
      for ids in (
          lib.select_oracle(scores, top_k, rule),
          lib.select(jnp.asarray(scores), top_k, rule),
      ):
        bits.assert_same_bits(ids, np.int32([expected]))

  @hp.given(
      scores=hpn.arrays(
          np.float32, (3, 6), elements=hps.sampled_from([0.0, 1.0, 2.0])
      ),
      top_k=hps.integers(1, 6),
  )
  def test_the_rules_mirror_each_other(self, scores, top_k):
    bits.assert_same_bits(
        lib.select_oracle(scores, top_k, "highest_index"),
        5 - lib.select_oracle(scores[:, ::-1], top_k, "lowest_index"),
    )

  def test_refuses_more_slots_than_experts(self):
    scores = np.zeros((1, 3), np.float32)
    for fn in (lib.select_oracle, lib.select):
      with self.assertRaisesRegex(ValueError, "top_k=4 .* only 3 experts"):
        fn(scores, 4, "lowest_index")
    with self.assertRaisesRegex(ValueError, "top_k=4 .* only 3 experts"):
      lib.boundary_margin(scores, 4)


class TiesFileTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    with np.load(_CASES / "router_ties.npz") as file:
      cls.file = dict(file)

  def _logits(self, dtype):
    if dtype == "f32":
      return self.file["logits_f32"]
    return self.file["logits_bf16_bits"].view(ml_dtypes.bfloat16)

  @parameterized.parameters("f32", "bf16")
  def test_c03_c04_ids_and_margins(self, dtype):
    logits, top_k = self._logits(dtype), int(self.file["k"])
    expected = self.file[f"ids_{dtype}_lowest_index"]
    for ids in (
        lib.select_oracle(logits, top_k, "lowest_index"),
        lib.select(jnp.asarray(logits), top_k, "lowest_index"),
    ):
      bits.assert_same_bits(ids, expected)
    margin = lib.boundary_margin(logits, top_k)
    # The file holds the margins in float32, subtracted in float32: one
    # rounding. Ours are exact differences.
    bits.assert_same_bits(
        margin.astype(np.float32), self.file[f"boundary_margin_{dtype}"]
    )
    bits.assert_same_bits(
        margin > 0, self.file[f"selected_set_is_unique_{dtype}"]
    )

  def test_c04_rounding_the_logits_selects_another_expert(self):
    logits = np.float32([[5, 4.010, 4.012, 3.9, 0, 0, 0, 0]])
    rounded = logits.astype(ml_dtypes.bfloat16)
    bits.assert_same_bits(
        rounded[0, 1:4].astype(np.float32), np.float32([4.0, 4.0, 3.90625])
    )
    wide = lib.route_oracle(logits, _contract(2))
    narrow = lib.route_oracle(rounded, _contract(2))
    bits.assert_same_bits(wide.ids, np.int32([[0, 2]]))
    bits.assert_same_bits(narrow.ids, np.int32([[0, 1]]))
    # A float32 difference of numbers near 4: within half of 2**-21.
    self.assertAlmostEqual(
        lib.boundary_margin(logits, 2).item(), 0.00199986, delta=2.0**-22
    )
    self.assertEqual(lib.boundary_margin(rounded, 2).item(), 0.0)


class RouteTest(parameterized.TestCase):

  # Logits whose sigmoids are the scores of the case; float32 rounds them, and
  # s * (1 - s) * |logit| is at most 0.23, so scores are off by under 2**-24.
  _SCORES = np.array([[0.9, 0.8, 0.3, 0.2]])
  _LOGITS = np.log(_SCORES / (1 - _SCORES)).astype(np.float32)
  _BIAS = np.float32([0, 0, 0.7, 0])

  @parameterized.parameters(
      (1.0, (0.25, 0.75)), (2.5, (0.625, 1.875))
  )
  def test_c05_the_bias_selects_and_does_not_weigh(self, scale, gates):
    contract = _contract(2, score="sigmoid", scale=scale)
    result = lib.route_oracle(self._LOGITS, contract, self._BIAS)
    bits.assert_same_bits(result.ids, np.int32([[2, 0]]))
    # Two scores and three roundings, each within 2**-24 of its value.
    np.testing.assert_allclose(
        result.gates, [gates], rtol=0, atol=8 * scale * 2.0**-24
    )

  def test_c05_gates_do_not_move_with_the_bias(self):
    contract = _contract(2, score="sigmoid")
    first, second = (
        lib.route_oracle(self._LOGITS, contract, bias).gates
        for bias in (self._BIAS, 1.5 * self._BIAS)
    )
    bits.assert_same_bits(first, second)

  def test_without_a_bias_the_largest_scores_are_selected(self):
    result = lib.route_oracle(self._LOGITS, _contract(2, score="sigmoid"))
    bits.assert_same_bits(result.ids, np.int32([[0, 1]]))

  def test_c06_gates_that_are_not_normalized_are_softmax_scores(self):
    logits = np.float32([[2, 1, 0, -1]])
    plain = lib.route_oracle(logits, _contract(2, normalize=False)).gates
    normalized = lib.route_oracle(logits, _contract(2)).gates
    # Nine digits of the case, and one or two roundings to float32.
    np.testing.assert_allclose(
        plain, [[0.643914260, 0.236882818]], rtol=0, atol=2.0**-24
    )
    np.testing.assert_allclose(
        normalized, [[0.731058579, 0.268941421]], rtol=0, atol=2.0**-23
    )

  def test_c06_file(self):
    folder = _CASES / "norm_topk_false"
    logits = np.load(folder / "router_logits_f32.npy")
    result = lib.route_oracle(logits, _contract(2, normalize=False))
    bits.assert_same_bits(
        result.ids, np.load(folder / "expected_ids.npy").astype(np.int32)
    )
    # The weights are float64; ours are rounded once from it.
    bits.assert_same_bits(
        result.gates,
        np.load(folder / "expected_weights_f64.npy").astype(np.float32),
    )

  @parameterized.parameters("softmax", "sigmoid", "sqrt_softplus")
  def test_scores_are_what_their_name_says(self, score):
    logits = np.random.default_rng(0).standard_normal((16, 8))
    logits = logits.astype(np.float32)
    wide = logits.astype(np.float64)
    if score == "softmax":
      scores = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    elif score == "sigmoid":
      scores = 1 / (1 + np.exp(-wide))
    else:
      scores = np.sqrt(np.log1p(np.exp(wide)))
    result = lib.route_oracle(
        logits, _contract(3, normalize=False, score=score)
    )
    bits.assert_same_bits(result.ids, _by_sorting(scores, 3, "lowest_index"))
    # sqrt_softplus rounds twice, the others once.
    np.testing.assert_allclose(
        result.gates,
        np.take_along_axis(scores, result.ids, -1),
        rtol=2.0**-23,
        atol=0,
    )

  def test_gates_have_the_dtype_and_the_roundings_of_the_contract(self):
    logits = np.float32([[1, 2, 3, 4]])
    scores = np.exp(np.float64([4, 3])) / np.exp(np.arange(1.0, 5)).sum()
    scores = scores.astype(np.float32).astype(ml_dtypes.bfloat16)
    total = np.float32(scores[0]) + np.float32(scores[1])
    total = total.astype(ml_dtypes.bfloat16)
    gates = scores.astype(np.float32) / total.astype(np.float32)
    gates = gates.astype(ml_dtypes.bfloat16).astype(np.float16)
    result = lib.route_oracle(
        logits, _contract(2, score_dtype="bfloat16", gate_dtype="float16")
    )
    bits.assert_same_bits(result.gates, gates[None])

  def test_a_tie_rule_decides_the_route(self):
    logits = np.zeros((1, 4), np.float32)
    for rule, expected in zip(_RULES, ([0, 1], [3, 2])):
      result = lib.route_oracle(logits, _contract(2, tie_rule=rule))
      bits.assert_same_bits(result.ids, np.int32([expected]))


class MarginTest(absltest.TestCase):

  def test_is_the_gap_between_the_last_selected_and_the_first_rejected(self):
    scores = np.float32([[4, 1, 3, 1], [2, 2, 2, 2], [-1, -4, -2, -8]])
    bits.assert_same_bits(
        lib.boundary_margin(scores, 2), np.float64([2, 0, 2])
    )
    bits.assert_same_bits(
        lib.boundary_margin(scores, 1), np.float64([1, 0, 1])
    )

  def test_is_infinite_where_nothing_is_rejected(self):
    scores = np.float32([[4, 1, 3]])
    bits.assert_same_bits(lib.boundary_margin(scores, 3), np.float64([np.inf]))

  def test_c03_a_tie_inside_the_selection_is_no_boundary_tie(self):
    scores = np.float32([[0, 5, 1, 5, 2, 3, 1, 0]])
    bits.assert_same_bits(lib.boundary_margin(scores, 2), np.float64([2]))


if __name__ == "__main__":
  absltest.main()
