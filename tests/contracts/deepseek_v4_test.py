"""The contract of a DeepSeek-V4 decoder: complete, and data.

Needs no accelerator.
"""

import dataclasses
import json

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import deepseek_v4 as lib
from moejax.contracts import document
from moejax.contracts import named_combines
from moejax.contracts import reduction
from moejax.contracts import route

_ROUTER = route.RouterContract(
    "router", top_k=6, normalize=True, score="sqrt_softplus", scale=1.5
)
_COMBINE = named_combines.named("transformers_eager")
_SITES = tuple(f.name for f in dataclasses.fields(lib.DeepseekV4Reductions))


class DeepseekV4ContractTest(parameterized.TestCase):

  @parameterized.parameters(
      ("native", "native"), ("portable", "portable"), ("sequential", "portable")
  )
  def test_an_arithmetic_holds_at_every_site(self, arithmetic, elementwise):
    contract = lib.of(arithmetic, _ROUTER, _COMBINE)
    self.assertEqual(contract.elementwise, elementwise)
    chains = {getattr(contract.reductions, site).chain for site in _SITES}
    self.assertEqual(chains, {arithmetic})

  @parameterized.parameters(*reduction.CHAINS)
  def test_comes_back_from_json_as_it_was(self, arithmetic):
    contract = lib.of(arithmetic, _ROUTER, _COMBINE)
    text = document.canonical_json(document.to_dict(contract))
    back = document.from_dict(lib.DeepseekV4Contract, json.loads(text))
    self.assertEqual(back, contract)

  @parameterized.parameters(*_SITES)
  def test_every_site_is_in_the_digest(self, site):
    contract = lib.of("portable", _ROUTER, _COMBINE)
    changed = dataclasses.replace(
        contract.reductions, **{site: reduction.ReductionContract("native")}
    )
    other = dataclasses.replace(contract, reductions=changed)
    self.assertNotEqual(document.digest(contract), document.digest(other))

  def test_refuses_an_arithmetic_that_does_not_exist(self):
    with self.assertRaisesRegex(ValueError, "'exact'"):
      lib.of("exact", _ROUTER, _COMBINE)
    contract = lib.of("portable", _ROUTER, _COMBINE)
    with self.assertRaisesRegex(ValueError, "elementwise='exact'"):
      dataclasses.replace(contract, elementwise="exact")


# {field: another legal value than that of transformers' graph}.
_OTHER = {
    "hyper_scale": "mixes",
    "hyper_mix": "float32",
    "rotary_tables": "float32",
    "query_norm": "model",
    "compressor": "float32",
    "indexer": "model",
    "gate_epsilon": 0.0,
    "expert_activation": "float32",
    "logits": "float32",
}
_QUANTIZATION = {
    "activations": True,
    "entries": True,
    "indexer": True,
    "activation_block": 64,
    "entry_block": 32,
    "indexer_block": 16,
}


def _with_graph(**changes) -> lib.DeepseekV4Contract:
  graph = dataclasses.replace(lib.TRANSFORMERS, **changes)
  return lib.of("portable", _ROUTER, _COMBINE, graph)


class GraphTest(parameterized.TestCase):

  def test_every_field_of_the_graph_is_tried_here(self):
    fields = {f.name for f in dataclasses.fields(lib.DeepseekV4Graph)}
    self.assertEqual(
        fields - set(_OTHER),
        {"name", "attention", "attention_block", "quantization"},
    )
    fields = {f.name for f in dataclasses.fields(lib.QuantizationContract)}
    self.assertEqual(fields - set(_QUANTIZATION), {"name"})

  def test_the_graph_of_transformers_is_the_default(self):
    contract = lib.of("portable", _ROUTER, _COMBINE)
    self.assertEqual(contract.graph, lib.TRANSFORMERS)

  @parameterized.parameters(*_OTHER.items())
  def test_every_field_is_in_the_digest(self, field, value):
    self.assertNotEqual(
        document.digest(_with_graph()),
        document.digest(_with_graph(**{field: value})),
    )

  def test_the_attention_is_in_the_digest(self):
    digests = {
        document.digest(_with_graph(**changes))
        for changes in (
            {},
            {"attention": "online_softmax", "attention_block": 64},
            {"attention": "online_softmax", "attention_block": 32},
        )
    }
    self.assertLen(digests, 3)

  @parameterized.parameters(*_QUANTIZATION.items())
  def test_every_field_of_quantisation_is_in_the_digest(self, field, value):
    changed = dataclasses.replace(
        lib.TRANSFORMERS.quantization, **{field: value}
    )
    self.assertNotEqual(
        document.digest(_with_graph()),
        document.digest(_with_graph(quantization=changed)),
    )

  def test_names_are_labels(self):
    self.assertEqual(
        document.digest(_with_graph()), document.digest(_with_graph(name="x"))
    )

  @parameterized.parameters(*lib.GRAPH_NAMES)
  def test_a_named_graph_comes_back_from_json_as_it_was(self, name):
    graph = lib.graph_named(name)
    self.assertEqual(graph.name, name)
    text = document.canonical_json(document.to_dict(graph))
    back = document.from_dict(lib.DeepseekV4Graph, json.loads(text))
    self.assertEqual(back, graph)
    self.assertIsInstance(back.quantization, lib.QuantizationContract)

  def test_named_graphs_differ(self):
    digests = {document.digest(lib.graph_named(n)) for n in lib.GRAPH_NAMES}
    self.assertLen(digests, 3)
    with self.assertRaisesRegex(ValueError, "'vllm' is not one of transformer"):
      lib.graph_named("vllm")

  def test_the_reference_is_what_the_specification_says(self):
    contract = lib.deepseek_reference("portable", 6, 1.5)
    router = contract.router
    self.assertEqual(
        (router.logits_dtype, router.score_dtype, router.gate_dtype),
        ("float32",) * 3,
    )
    self.assertEqual((router.top_k, router.scale), (6, 1.5))
    self.assertEqual(contract.combine.gate_site, "before_down")
    self.assertEqual(contract.combine.order, "expert")
    graph = contract.graph
    for field, value in _OTHER.items():
      self.assertEqual(getattr(graph, field), value, field)
    self.assertEqual(
        (graph.attention, graph.attention_block), ("online_softmax", 64)
    )
    switches = ("activations", "entries", "indexer")
    for quantized in (False, True):
      graph = lib.deepseek_reference("portable", 6, 1.5, quantized).graph
      for switch in switches:
        self.assertEqual(getattr(graph.quantization, switch), quantized)
    quantization = graph.quantization
    self.assertEqual(quantization.activation_block, 128)
    self.assertEqual(quantization.entry_block, 64)
    self.assertEqual(quantization.indexer_block, 32)

  @parameterized.parameters(
      *(field for field in _OTHER if field != "gate_epsilon"), "attention"
  )
  def test_refuses_a_value_that_no_field_knows(self, field):
    with self.assertRaisesRegex(ValueError, f"{field}='bfloat17'"):
      _with_graph(**{field: "bfloat17"})
    values = document.to_dict(lib.TRANSFORMERS) | {field: "bfloat17"}
    with self.assertRaisesRegex(ValueError, f"{field}='bfloat17'"):
      document.from_dict(lib.DeepseekV4Graph, values)

  @parameterized.parameters(
      ({"attention_block": 64}, "'softmax'.*attention_block=64"),
      ({"attention_block": -1}, "attention_block=-1"),
      ({"attention": "online_softmax"}, "attention_block=0"),
      ({"gate_epsilon": -1.0}, "gate_epsilon=-1.0 is negative"),
      ({"gate_epsilon": "1"}, "gate_epsilon='1' is no float"),
      ({"attention_block": True}, "attention_block=True is no int"),
      ({"quantization": None}, "quantization=None"),
  )
  def test_refuses_what_contradicts_itself(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      _with_graph(**changes)

  @parameterized.parameters(
      ({"entry_block": 0}, "entry_block=0 must be positive"),
      ({"activation_block": -128}, "activation_block=-128"),
      ({"indexer_block": 0}, "indexer_block=0"),
      ({"indexer": 1}, "indexer=1 is no bool"),
      ({"entry_block": 64.0}, "entry_block=64.0 is no int"),
  )
  def test_refuses_blocks_that_are_none(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(lib.TRANSFORMERS.quantization, **changes)

  def test_loads_strictly(self):
    values = document.to_dict(lib.deepseek_reference("portable", 6, 1.5))
    for at in ((), ("graph",), ("graph", "quantization")):
      for change in ("more", "fewer"):
        damaged = json.loads(json.dumps(values))
        part = damaged
        for key in at:
          part = part[key]
        if change == "more":
          part["colour"] = 1
          message = r"unknown fields \['colour'\]"
        else:
          part.pop("graph" if not at else "name")
          message = r"missing fields \['(graph|name)'\]"
        with self.assertRaisesRegex(ValueError, message):
          document.from_dict(lib.DeepseekV4Contract, damaged)


if __name__ == "__main__":
  absltest.main()
