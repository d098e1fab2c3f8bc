"""What every run of the combine kernel owes its contract: the oracle's bits.

The interpreter flushes subnormals as XLA on a CPU does, so it is given operands
whose products and sums are normal or zero; the device is given every special
value.
"""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import named_combines
from moejax.numerics import ordered_combine as definition
from pallas_kernels import launch
from pallas_kernels import ordered_combine as lib
from tests import bits
from tests.numerics import combine_cases

_DTYPES = ("float32", "bfloat16", "float16")


class OrderedCombineSuite(parameterized.TestCase):
  """Subclasses say where it runs. Not collected itself."""

  interpret: bool
  device: jax.Device | None = None

  def operands(self, dtype: str):
    """(expert_out, gate, ids, order, shared) of `combine_cases.hard`."""
    found = combine_cases.hard(dtype)
    if not self.interpret:
      return found
    out, gate, ids, order, shared = found
    return _normal(out), _normal(gate), ids, order, _normal(shared)

  def config(self):
    return launch.LaunchConfig(interpret=self.interpret)

  def assert_oracle_bits(self, contract, dtype, layer=0, shared=True):
    """Runs both with an order for every token and compares."""
    out, gate, ids, order, joins = self.operands(dtype)
    explicit = contract.order == "explicit" and not contract.permutations
    keywords = {
        "shared": joins if shared else None, "layer": layer,
        "order": order if explicit else None,
    }
    with jax.default_device(self.device):
      found = lib.ordered_combine(
          *map(jnp.asarray, (out, gate, ids)), contract,
          **{k: jnp.asarray(v) if isinstance(v, np.ndarray) else v
             for k, v in keywords.items()},
          config=self.config(),
      )
    bits.assert_same_bits(
        found,
        definition.ordered_combine_oracle(out, gate, ids, contract, **keywords),
    )
    return np.asarray(found)

  @parameterized.product(case=tuple(combine_cases.TWINS), dtype=_DTYPES)
  def test_every_field_follows_the_contract(self, case, dtype):
    scheme, fields = combine_cases.TWINS[case]
    half = "bfloat16" if dtype == "float32" else dtype
    contract = combine_cases.contract_of(scheme, half, **fields)
    for layer in range(max(len(contract.permutations), 1)):
      self.assert_oracle_bits(contract, dtype, layer)

  @parameterized.parameters(*named_combines.NAMES)
  def test_named_contracts(self, name):
    contract = named_combines.named(name)
    self.assert_oracle_bits(contract, contract.output, shared=False)
    self.assert_oracle_bits(contract, contract.output)

  def test_the_order_of_the_slots_is_observable(self):
    found = [
        self.assert_oracle_bits(
            combine_cases.contract_of(
                "B", order="explicit", permutations=(order,)
            ),
            "bfloat16",
        ).view(np.uint16)
        for order in combine_cases.BOTH
    ]
    self.assertFalse(np.array_equal(*found))

  def test_a_product_is_rounded_before_it_is_added(self):
    both = [
        self.assert_oracle_bits(
            combine_cases.contract_of(
                "P32", output="float32", contraction=contraction
            ),
            "float32",
        )
        for contraction in ("mul_add", "fma")
    ]
    self.assertTrue((both[0] != both[1]).any())

  def test_a_fused_product_is_rounded_once(self):
    # The product is 2**-24 less a little: under half a step above 1 + 2**-23.
    # Rounded to float64 first, the sum would be a tie and go up.
    one, step = np.float32(1), np.float32(2.0**-23)
    out = np.float32([[[one + step], [(one - step) * 2.0**-12]]])
    gate = np.float32([[one, (one + step) * 2.0**-12]])
    contract = combine_cases.contract_of(
        "P32", output="float32", contraction="fma"
    )
    ids = np.int32([[0, 1]])
    with jax.default_device(self.device):
      found = lib.ordered_combine(
          *map(jnp.asarray, (out, gate, ids)), contract, config=self.config()
      )
    bits.assert_same_bits(found, np.float32([[one + step]]))

  @parameterized.product(
      start=("zero", "first"), contraction=("mul_add", "fma")
  )
  def test_the_sign_of_a_sum_of_minus_zeros(self, start, contraction):
    contract = combine_cases.contract_of(
        "P32", output="float32", start=start, contraction=contraction
    )
    inputs = (
        np.full((1, 2, 4), -0.0, np.float32), np.ones((1, 2), np.float32),
        np.int32([[0, 1]]),
    )
    with jax.default_device(self.device):
      found = lib.ordered_combine(
          *map(jnp.asarray, inputs), contract, config=self.config()
      )
    zero = np.float32(0 if start == "zero" else -0.0)
    bits.assert_same_bits(found, np.full((1, 4), zero))

  @parameterized.parameters("paper", "ieee")
  def test_an_ungated_nan_with_a_low_payload(self, rounding):
    contract = combine_cases.contract_of(
        "C", gate_site="before_down", output="float32", rounding=rounding
    )
    words = np.uint32([[[0x7F800001, 0xFF80FFFF, 0x7F810000]]])
    inputs = (
        words.view(np.float32), np.ones((1, 1), np.float32),
        np.zeros((1, 1), np.int32),
    )
    with jax.default_device(self.device):
      found = lib.ordered_combine(
          *map(jnp.asarray, inputs), contract, config=self.config()
      )
    bits.assert_same_bits(
        found, definition.ordered_combine_oracle(*inputs, contract)
    )
    self.assertEqual(
        np.isinf(np.asarray(found)).tolist(),
        [[rounding == "paper", rounding == "paper", False]],
    )

  def test_terms_without_gates(self):
    contract = named_combines.named("vllm_marlin")
    out, _, _, order, _ = self.operands("float16")
    with jax.default_device(self.device):
      found = lib.add_terms(
          jnp.asarray(out), jnp.asarray(order), contract, config=self.config()
      )
    bits.assert_same_bits(
        found, definition.add_terms_oracle(out, order, contract)
    )

  def test_a_width_that_is_no_power_of_two(self):
    contract = named_combines.named("P32")
    rng = np.random.default_rng(0)
    out = rng.standard_normal((3, 4, 7)).astype(np.float32)
    gate = rng.random((3, 4), np.float32)
    ids = np.argsort(rng.random((3, 4))).astype(np.int32)
    with jax.default_device(self.device):
      found = lib.ordered_combine(
          *map(jnp.asarray, (out, gate, ids)), contract, config=self.config()
      )
    bits.assert_same_bits(
        found, definition.ordered_combine_oracle(out, gate, ids, contract)
    )


def _normal(x: np.ndarray) -> np.ndarray:
  """x with values under 2**-60 made zeros of their sign."""
  small = np.abs(x.astype(np.float64)) < 2.0**-60
  return np.where(small, np.copysign(np.zeros((), x.dtype), x), x)
