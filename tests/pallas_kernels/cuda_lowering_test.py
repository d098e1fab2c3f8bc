"""Every kernel lowers to CUDA on a machine without a GPU.

Proven: each kernel has a Triton lowering for this chip in this version of JAX.
Not proven: that the device's compiler takes it, and any bit. Needs no
accelerator.
"""

import contextlib
import dataclasses
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp

from moejax.contracts import combine
from moejax.contracts import grouped_mlp
from moejax.contracts import named_combines
from moejax.numerics.grouped import row_plan
from pallas_kernels import group_gemm
from pallas_kernels import launch
from pallas_kernels import ordered_combine
from pallas_kernels import packed_moe
from pallas_kernels import work_list
from tests.pallas_kernels import packed_moe_suite as suite

_TRITON = "__gpu$xla.gpu.triton"


def lowered(function, *arguments, **static) -> str:
  """Returns the text of a jitted function lowered for an H200."""
  chip = jax.sharding.AbstractDevice(
      device_kind="NVIDIA H200", platform="gpu", num_cores=132
  )
  try:
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=chip)
    context = jax.sharding.use_abstract_mesh(mesh)
  except TypeError:  # A version that takes a Hopper chip for granted.
    context = contextlib.nullcontext()
  with context:
    traced = function.trace(*arguments, **static)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def _struct(shape, dtype):
  return jax.ShapeDtypeStruct(shape, dtype)


class LoweringTest(parameterized.TestCase):

  @parameterized.product(
      case=suite.CASES,
      config=(
          launch.LaunchConfig(),
          launch.LaunchConfig(num_warps=2, num_stages=3, tile_n=32),
      ),
  )
  def test_a_layer_is_six_kernels(self, case, config):
    request, layer, blocks, contract = suite.case(*case, tokens=16)
    weights = [
        suite.packed_weight.from_operands(part, contract.dtype)
        for part in layer
    ]
    works = [
        work_list.work_list(blocks, w.n, w.k, per_row, part, 32)
        for w, per_row, part in zip(
            weights, (2, 1), (contract.w13, contract.w2), strict=True
        )
    ]
    placed = packed_moe.Placed(
        _struct(request.x.shape, jnp.uint16), request.gates, *works,
        _struct((65536,), jnp.uint16),
    )
    text = lowered(
        packed_moe.surface_words, placed, *weights, contract=contract,
        config=config,
    )
    self.assertEqual(text.count(_TRITON), 6)

  @parameterized.product(
      name=named_combines.NAMES,
      contraction=("mul_add", "fma"),
      subnormals=("keep", "flush"),
      output=combine.FLOATS,
  )
  def test_a_combine_is_one_kernel(
      self, name, contraction, subnormals, output
  ):
    contract = dataclasses.replace(
        named_combines.named(name), contraction=contraction,
        subnormals=subnormals, output=output,
        **({"operand": "float32"} if contraction == "fma" else {}),
    )
    text = lowered(
        ordered_combine._jitted,  # pylint: disable=protected-access
        _struct((4, 8, 256), jnp.uint16), _struct((4, 8), jnp.uint32),
        _struct((4, 256), jnp.uint16), _struct((4, 8), jnp.int32),
        contract=contract, dtypes=("bfloat16", "float32", "bfloat16"),
        config=launch.LaunchConfig(),
    )
    self.assertEqual(text.count(_TRITON), 1)

  @parameterized.product(
      case=(("bfloat16", "mma16"), ("float16", "mma16"),
            ("float32", "sequential")),
      bound=("tile_list", "total_rows"),
      transpose_b=(False, True),
  )
  def test_grouped_gemms_are_one_kernel_each(self, case, bound, transpose_b):
    dtype, chain = case
    gemm = grouped_mlp.GroupGemmContract(chain=chain, bound=bound)
    plan = row_plan.row_plan(jnp.zeros((100, 2), jnp.int32), 4)
    b = _struct((4, 43, 130) if transpose_b else (4, 130, 43), dtype)
    config = launch.LaunchConfig(num_warps=4)
    with mock.patch.object(launch, "check_device"):
      for operation, operands, keywords in (
          (group_gemm.group_gemm_same_nk, (_struct((200, 130), dtype), b),
           {"transpose_b": transpose_b}),
          (group_gemm.group_gemm_same_mn,
           (_struct((200, 130), dtype), _struct((200, 43), dtype)), {}),
      ):
        text = lowered(
            jax.jit(lambda x, y, f=operation, k=keywords: f(
                x, y, plan, gemm, config=config, **k
            )),
            *operands,
        )
        self.assertEqual(text.count(_TRITON), 1)


if __name__ == "__main__":
  absltest.main()
