"""Portable arithmetic over unmodified PyTorch models."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import torch
import transformers

from moejax.contracts import refusal
from moejax.numerics.portable import portable_oracle
from tests import bits
from torch_bridge import legal_orders
from torch_bridge import portable_mode
from torch_bridge import tensor_bits

_SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=0,
)
_EXPERTS = dict(num_experts_per_tok=2)
_MODELS = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "mixtral": lambda: transformers.MixtralConfig(
        **_SIZES, **_EXPERTS, num_local_experts=4
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **_SIZES,
        **_EXPERTS,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **_SIZES, **_EXPERTS, num_experts=4
    ),
}


def _model(config, dtype, implementation="eager"):
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(
      config,
      attn_implementation="eager",
      experts_implementation=implementation,
  )
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(torch.randn_like(parameter) * 0.1)
  return model.to(dtype).eval()


def _run(fn, *args):
  mode = portable_mode.PortableMode()
  with torch.no_grad(), mode:
    result = fn(*args)
  return result, mode.oracle.certificate


def _values(*shape, dtype=torch.bfloat16, seed=0):
  generator = torch.Generator().manual_seed(seed)
  return torch.randn(*shape, generator=generator).to(dtype)


class ModelsTest(parameterized.TestCase):

  @parameterized.product(
      name=sorted(_MODELS),
      dtype=(torch.bfloat16, torch.float32, torch.float16),
  )
  def test_the_contracting_order_changes_no_bit(self, name, dtype):
    model = _model(_MODELS[name](), dtype)
    ids = torch.arange(9)[None]
    forward, certificate = _run(lambda: model(ids).logits)
    self.assertTrue(certificate.complete)
    with torch.no_grad(), portable_mode.PortableMode():
      with legal_orders.ReversedContraction():
        backward = model(ids).logits
    bits.assert_same_bits(
        tensor_bits.to_numpy(backward), tensor_bits.to_numpy(forward)
    )
    if dtype == torch.float32:  # In float32 the native order is visible.
      with torch.no_grad():
        native = model(ids).logits
      self.assertFalse(torch.equal(native, forward))
      torch.testing.assert_close(native, forward, rtol=1e-4, atol=1e-4)

  def test_a_model_with_an_unknown_operation_is_refused(self):
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=1, n_head=4, bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    with self.assertRaisesRegex(refusal.UnsupportedError, "native_layer_norm"):
      _run(lambda: model(torch.arange(5)[None]).logits)

  def test_fused_attention_is_refused(self):
    config = _MODELS["llama"]()
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa"
    ).eval()
    with self.assertRaisesRegex(refusal.UnsupportedError, "attention"):
      _run(lambda: model(torch.arange(5)[None]).logits)


class OperationsTest(parameterized.TestCase):

  @parameterized.parameters(torch.bfloat16, torch.float16, torch.float32)
  def test_in_place_and_out_forms_give_the_bits_of_the_plain_form(self, dtype):
    x, y = _values(4, 8, dtype=dtype), _values(4, 8, dtype=dtype, seed=1)
    plain, _ = _run(lambda: x / y)
    in_place, _ = _run(lambda: x.clone().div_(y))
    out, _ = _run(
        lambda: torch.div(x, y, out=torch.empty(4, 8, dtype=dtype))
    )
    product, _ = _run(lambda: x @ y.T)
    product_out, _ = _run(
        lambda: torch.mm(x, y.T, out=torch.empty(4, 4, dtype=dtype))
    )
    for left, right in (
        (in_place, plain), (out, plain), (product_out, product)
    ):
      bits.assert_same_bits(
          tensor_bits.to_numpy(left), tensor_bits.to_numpy(right)
      )

  def test_an_in_place_result_is_the_argument_itself(self):
    x = _values(3)
    result, _ = _run(lambda: x.mul_(2.0))
    self.assertIs(result, x)

  @parameterized.named_parameters(
      ("scalar", lambda x: x * 0.1, "multiply", 0.1),
      ("negative", lambda x: 1.0 - x, "subtract_from", 1.0),
  )
  def test_a_scalar_is_not_rounded_first(self, fn, method, scalar):
    x = _values(64)
    oracle = portable_oracle.PortableOracle()
    array = tensor_bits.to_numpy(x)
    if method == "multiply":
      expected = oracle.multiply(array, scalar, "bfloat16")
    else:
      expected = oracle.subtract(scalar, array, "bfloat16")
    result, _ = _run(lambda: fn(x))
    bits.assert_same_bits(tensor_bits.to_numpy(result), expected)

  def test_dtypes_are_promoted_as_pytorch_promotes_them(self):
    wide, _ = _run(lambda: _values(3) + _values(3, dtype=torch.float32))
    narrow, _ = _run(lambda: _values(3) + torch.tensor(1.0))
    whole, _ = _run(lambda: torch.arange(1, 4) / torch.tensor(3))
    self.assertEqual(
        (wide.dtype, narrow.dtype, whole.dtype),
        (torch.float32, torch.bfloat16, torch.float32),
    )

  def test_integer_work_and_casts_pass_untouched(self):
    ids = torch.tensor([[3, 1], [2, 3]])
    hot, certificate = _run(
        lambda: torch.nn.functional.one_hot(ids, 5).sum(0).cumsum(-1)
    )
    self.assertEqual(hot.tolist(), [[0, 0, 1, 2, 2], [0, 1, 1, 2, 2]])
    self.assertEqual(certificate.elements, 0)
    x = _values(100, dtype=torch.float32)
    cast, _ = _run(lambda: x.to(torch.bfloat16))
    bits.assert_same_bits(
        tensor_bits.to_numpy(cast), tensor_bits.to_numpy(x.to(torch.bfloat16))
    )

  def test_a_grouped_product_is_a_loop_of_products(self):
    rows, weight = _values(6, 16), _values(3, 16, 8, seed=1)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    grouped, _ = _run(lambda: torch._grouped_mm(rows, weight, offs=ends))
    looped, _ = _run(
        lambda: torch.cat([rows[:2] @ weight[0], rows[2:] @ weight[2]])
    )
    bits.assert_same_bits(
        tensor_bits.to_numpy(grouped), tensor_bits.to_numpy(looped)
    )

  def test_index_add_to_equal_rows_is_refused(self):
    target, source = torch.zeros(3, 2), torch.ones(2, 2)
    with self.assertRaisesRegex(refusal.UnsupportedError, "equal rows"):
      _run(lambda: target.index_add_(0, torch.tensor([1, 1]), source))
    once, _ = _run(lambda: target.index_add_(0, torch.tensor([2, 0]), source))
    np.testing.assert_array_equal(once.numpy(), [[1, 1], [0, 0], [1, 1]])

  def test_equal_scores_are_selected_by_lowest_index_and_counted(self):
    """Case C03: PyTorch leaves the order open; the certificate counts."""
    scores = torch.tensor([
        [1.0, 3, 3, 2, 3, 0, 3, 1], [7, 6, 5, 4, 3, 2, 1, 0]
    ])
    (values, ids), certificate = _run(lambda: torch.topk(scores, 3))
    np.testing.assert_array_equal(ids.numpy(), [[1, 2, 4], [0, 1, 2]])
    np.testing.assert_array_equal(values.numpy(), [[3, 3, 3], [7, 6, 5]])
    self.assertEqual(certificate.ties, 1)

  def test_a_tie_beyond_the_selection_is_none(self):
    scores = torch.tensor([[5, 4, 3, 1, 1.0]])
    _, certificate = _run(lambda: torch.topk(scores, 2))
    self.assertEqual(certificate.ties, 0)

  @parameterized.named_parameters(
      ("special", lambda x: torch.special.i0(x), "i0"),
      ("alpha", lambda x: torch.add(x, x, alpha=2), "alpha"),
      ("gelu", lambda x: torch.nn.functional.gelu(x), "gelu"),
      ("floor", lambda x: torch.div(x, x, rounding_mode="floor"), "rounding"),
      ("beta", lambda x: torch.addmm(x, x, x, beta=2), "beta"),
      (
          "accumulate",
          lambda x: x.index_put_(
              (torch.tensor([0, 0]),), x[:2], accumulate=True
          ),
          "accumulate",
      ),
  )
  def test_what_is_not_known_is_refused_by_name(self, fn, message):
    with self.assertRaisesRegex(refusal.UnsupportedError, message):
      _run(lambda: fn(_values(4, 4, dtype=torch.float32)))


if __name__ == "__main__":
  absltest.main()
