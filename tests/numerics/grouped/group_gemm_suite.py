"""What every grouped GEMM owes its contract: the oracle's bits.

One suite for the twin in JAX and for the kernels. Operands that must not be
read are NaN: rows without an expert, and the neighbours of a group.
"""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from moejax.contracts import grouped_mlp
from moejax.numerics.grouped import group_gemm_oracle as definition
from moejax.numerics.grouped import row_plan
from tests import bits

BLOCK = 16
# n_e around the tile; then experts without rows at either end and between.
SIZES = {
    "around_a_tile": (1, 15, 16, 17, 31),
    "first_and_last_empty": (0, 9, 8, 17, 0),
    "alternating": (8, 0, 8, 0, 8),
    "one_has_all": (0, 0, 80, 0, 0),
    "none_has_any": (0, 0, 0, 0, 0),
}
ROWS = 80  # In every case; what the sizes leave has no expert.


def plan_of(sizes, rows=ROWS) -> row_plan.RowPlan:
  """Rows of each expert one after another; the others have none."""
  ids = np.repeat(np.arange(len(sizes)), sizes)
  ids = np.pad(ids, (0, rows - len(ids)), constant_values=len(sizes))
  return row_plan.row_plan(jnp.asarray(ids[:, None], jnp.int32), len(sizes))


def contract_of(chain="sequential", **fields):
  return grouped_mlp.GroupGemmContract(
      chain=chain, block_rows=BLOCK, **fields
  )


def draw(*shape, dtype, seed=0):
  values = np.random.default_rng(seed).standard_normal(shape)
  return values.astype(jnp.dtype(dtype))


class GroupGemmSuite(parameterized.TestCase):
  """Subclasses give the two operations. Not collected itself."""

  chains = (("bfloat16", "sequential"), ("float32", "sequential"))

  def same_nk(self, a, b, plan, contract, transpose_b=False):
    raise NotImplementedError

  def same_mn(self, a, b, plan, contract, dtype=None):
    raise NotImplementedError

  def assert_oracle_bits(
      self, sizes, inner, outer, dtype, contract, transpose_b=False, reach=None
  ):
    """Both operations, over rows whose tail is NaN."""
    plan = plan_of(sizes)
    rows, wide = draw(ROWS, inner, dtype=dtype), len(sizes)
    other = draw(ROWS, outer, dtype=dtype, seed=1)
    rows[sum(sizes):], other[sum(sizes):] = np.nan, np.nan
    shape = (wide, outer, inner) if transpose_b else (wide, inner, outer)
    b = draw(*shape, dtype=dtype, seed=2)
    keywords = {"transpose_b": transpose_b}
    found = self.same_nk(
        jnp.asarray(rows), jnp.asarray(b), plan, contract, **keywords
    )
    bits.assert_same_bits(
        found,
        definition.same_nk_oracle(
            rows, b, sizes, contract, reach=reach, **keywords
        ),
    )
    found_weights = self.same_mn(
        jnp.asarray(rows), jnp.asarray(other), plan, contract
    )
    bits.assert_same_bits(
        found_weights,
        definition.same_mn_oracle(
            rows, other, sizes, contract, dtype, reach=reach
        ),
    )
    return np.asarray(found), np.asarray(found_weights)

  @parameterized.parameters(*SIZES)
  def test_m12_m14_sizes_of_groups(self, name):
    for dtype, chain in self.chains:
      sizes = SIZES[name]
      found, weights = self.assert_oracle_bits(
          sizes, 16, 16, dtype, contract_of(chain)
      )
      bits.assert_same_bits(
          found[sum(sizes):], np.zeros_like(found[sum(sizes):])
      )
      for expert, size in enumerate(sizes):
        if not size:
          bits.assert_same_bits(
              weights[expert], np.zeros_like(weights[expert])
          )

  @parameterized.parameters((1, 130), (130, 1), (43, 16), (16, 43))
  def test_m14_widths_that_are_no_multiple_of_a_tile(self, inner, outer):
    for dtype, chain in self.chains[:1]:
      for transpose_b in (False, True):
        self.assert_oracle_bits(
            SIZES["around_a_tile"], inner, outer, dtype, contract_of(chain),
            transpose_b,
        )

  @parameterized.parameters("first", "second")
  def test_m15_nan_of_a_neighbour_does_not_leak(self, operand):
    # A window of BLOCK rows from row 10 covers rows of the next expert.
    sizes, dtype = (10, 13, 9), self.chains[0][0]
    plan = plan_of(sizes)
    a, b = (draw(ROWS, 16, dtype=dtype, seed=s) for s in (0, 1))
    contract = contract_of(self.chains[0][1])

    def run(a, b):
      return np.asarray(self.same_mn(
          jnp.asarray(a), jnp.asarray(b), plan, contract
      ))

    clean = run(a, b)
    spoilt = (a if operand == "first" else b)
    spoilt[10:23] = np.nan
    found = run(a, b)
    for expert in (0, 2):
      bits.assert_same_bits(found[expert], clean[expert])
    self.assertTrue(np.isnan(found[1].astype(np.float32)).all())

  def test_m15_a_row_depends_on_itself_alone(self):
    sizes, (dtype, chain) = (10, 13, 9), self.chains[0]
    plan, contract = plan_of(sizes), contract_of(chain)
    a, b = draw(ROWS, 16, dtype=dtype), draw(3, 16, 16, dtype=dtype, seed=1)

    def run(a):
      return np.asarray(
          self.same_nk(jnp.asarray(a), jnp.asarray(b), plan, contract)
      )

    clean = run(a)
    a[11] = np.nan
    found = run(a)
    kept = np.arange(32) != 11
    bits.assert_same_bits(found[:32][kept], clean[:32][kept])
    self.assertTrue(np.isnan(found[11].astype(np.float32)).all())

  def test_m21_rows_permuted_inside_a_group(self):
    sizes, (dtype, chain) = (31, 20, 29), self.chains[1]
    plan, contract = plan_of(sizes), contract_of(chain)
    a, b = draw(ROWS, 16, dtype=dtype), draw(3, 16, 16, dtype=dtype, seed=1)
    other = draw(ROWS, 16, dtype=dtype, seed=2)
    order = np.arange(ROWS)
    order[:31] = order[:31][::-1]

    def run(order):
      rows = jnp.asarray(a[order])
      return (
          np.asarray(self.same_nk(rows, jnp.asarray(b), plan, contract)),
          np.asarray(self.same_mn(
              rows, jnp.asarray(other[order]), plan, contract
          )),
      )

    (plain, weights), (moved, reordered) = run(np.arange(ROWS)), run(order)
    bits.assert_same_bits(moved, plain[order])
    bits.assert_same_bits(reordered[1:], weights[1:])
    self.assertTrue((reordered[0] != weights[0]).any())
    np.testing.assert_allclose(reordered[0], weights[0], rtol=0, atol=1e-4)

  @parameterized.parameters("nan", "zero", "1e4")
  def test_a_bound_leaves_what_memory_held(self, fill):
    sizes, (dtype, chain) = SIZES["around_a_tile"], self.chains[0]
    found, weights = self.assert_oracle_bits(
        sizes, 16, 16, dtype,
        contract_of(chain, bound="limit", limit=16, unwritten=fill), reach=16,
    )
    held = np.array(grouped_mlp.FILLS[fill]).astype(found.dtype)
    bits.assert_same_bits(found[48], np.full(16, held))
    # INV-K: a weight gradient misses rows and stays finite.
    self.assertTrue(np.isfinite(weights.astype(np.float32)).all())

  @parameterized.parameters(((2, 0, 1, 0), 3), ((1, 0, 1, 0), 2))
  def test_experts_that_saw_no_token(self, sizes, owned):
    """Public case: the gradient of an empty group was junk."""
    plan, dtype = plan_of(sizes, 3), self.chains[1][0]
    contract = contract_of(self.chains[1][1])
    a = np.float32([[1, 2], [3, 4], [5, 6]]).astype(dtype)
    ones = np.ones((4, 2, 1), dtype)
    wanted = np.zeros((4, 2, 1), dtype)
    ends = np.cumsum(sizes)
    for expert, size in enumerate(sizes):
      wanted[expert, :, 0] = a[ends[expert] - size : ends[expert]].sum(0)
    y = np.asarray(
        self.same_nk(jnp.asarray(a), jnp.asarray(ones), plan, contract)
    )
    self.assertEqual(
        y[:, 0].tolist(), [3.0, 7.0, 11.0 if owned == 3 else 0.0]
    )
    cotangent = np.ones((3, 1), dtype)
    bits.assert_same_bits(
        self.same_mn(jnp.asarray(a), jnp.asarray(cotangent), plan, contract),
        wanted,
    )
    d_rows = np.asarray(self.same_nk(
        jnp.asarray(cotangent), jnp.asarray(ones), plan, contract,
        transpose_b=True,
    ))
    self.assertEqual(d_rows[2].tolist(), [1.0, 1.0] if owned == 3 else [0, 0])


def jitted(operation, *extra: str):
  """One program for each shape and contract."""
  return jax.jit(operation, static_argnames=("contract", *extra))
