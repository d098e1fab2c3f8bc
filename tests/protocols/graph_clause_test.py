"""A difference between two graphs is named by the field that decides it."""

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import deepseek_v4 as contract_lib
from moejax.contracts import named_combines
from moejax.contracts import route
from moejax.protocols import deepseek_v4_taps
from moejax.protocols import graph_clause

_THEIRS = contract_lib.of(
    "portable",
    route.RouterContract(
        "deepseek_v4", top_k=2, normalize=True, score="sqrt_softplus",
        logits_dtype="bfloat16", score_dtype="bfloat16", gate_dtype="bfloat16",
        scale=1.5,
    ),
    named_combines.named("transformers_grouped_mm"),
)
_OURS = contract_lib.deepseek_reference("portable", 2, 1.5)


class GraphClauseTest(parameterized.TestCase):

  @parameterized.parameters(
      (
          "attention_hc.mixes",
          "graph.hyper_scale: ours mixes, reference streams",
      ),
      ("moe_mix.mixed", "graph.hyper_mix: ours float32, reference model"),
      ("streams", "graph.hyper_mix: ours float32, reference model"),
      (
          "attention.indexer.compressor.kv_proj",
          "graph.compressor: ours float32, reference model",
      ),
      (
          "attention.indexer.scores",
          "graph.indexer: ours model, reference float32",
      ),
      (
          "attention.q_b_norm.mean",
          "graph.query_norm: ours model, reference float32",
      ),
      (
          "attention.scores",
          "graph.attention: ours online_softmax, reference softmax",
      ),
      ("moe.router.gate_sum", "graph.gate_epsilon: ours 0.0, reference 1e-20"),
      (
          "moe.router.logits",
          "router.logits_dtype: ours float32, reference bfloat16;"
          " router.score_dtype: ours float32, reference bfloat16;"
          " router.gate_dtype: ours float32, reference bfloat16",
      ),
      ("embed", ""),
  )
  def test_each_tap_has_its_field(self, tap, expected):
    self.assertEqual(graph_clause.clause(tap, _OURS, _THEIRS), expected)

  def test_equal_contracts_have_no_clause_at_any_tap(self):
    for tap in deepseek_v4_taps.TAPS:
      self.assertEqual(graph_clause.clause(tap, _THEIRS, _THEIRS), "")


if __name__ == "__main__":
  absltest.main()
