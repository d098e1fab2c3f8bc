"""Packed contracts: round trip, digests, refusals."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import document
from moejax.contracts import packed_gemm
from moejax.contracts import packed_moe

_GEMM = packed_gemm.marlin(
    dtype="float16", thread_k=128, thread_n=64, grid=528
)
_MOE = packed_moe.marlin(
    dtype="bfloat16", thread_k=64, thread_n=128, grid=396
)


class RoundTripTest(parameterized.TestCase):

  @parameterized.parameters(_GEMM, _MOE, packed_gemm.HOPPER)
  def test_json(self, contract):
    again = document.from_dict(type(contract), document.to_dict(contract))
    self.assertEqual(again, contract)
    self.assertEqual(document.digest(again), document.digest(contract))

  @parameterized.parameters(
      {"dtype": "bfloat16"}, {"grid": 246}, {"thread_n": 128},
      {"group_size": 64}, {"gate_site": "after_rounding"},
      {"slice_merge": "lowest_k_first"}, {"stream_merge": ((0, 1), (2, 3))},
      {"mma": dataclasses.replace(packed_gemm.HOPPER, fraction_bits=24)},
  )
  def test_every_field_is_in_the_digest(self, **change):
    changed = dataclasses.replace(_GEMM, **change)
    self.assertNotEqual(document.digest(changed), document.digest(_GEMM))

  def test_the_name_is_not(self):
    renamed = dataclasses.replace(_GEMM, name="x")
    self.assertEqual(document.digest(renamed), document.digest(_GEMM))


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
      ({"dtype": "float32"}, "dtype='float32'"),
      ({"thread_k": 96}, "thread_k=96"),
      ({"thread_k": 64}, "2 streams of thread_k=64"),
      ({"thread_n": 96}, "thread_n=96"),
      ({"grid": 0}, "grid=0"),
      ({"grid": True}, "grid=True"),
      ({"group_size": -1}, "group_size=-1"),
      ({"stream_merge": (0, (1, (2, 2)))}, "stream_merge"),
      ({"stream_merge": (0, 1, 2, 3)}, "stream_merge"),
      ({"stream_merge": (0, (1, (2, "3")))}, "stream_merge"),
      ({"mma": "hopper"}, "mma='hopper'"),
  )
  def test_gemm(self, change, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(_GEMM, **change)

  @parameterized.parameters(
      ({"group": 4}, "group=4"), ({"fraction_bits": 33}, "fraction_bits=33"),
      ({"final": "up"}, "final='up'"),
  )
  def test_mma(self, change, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(packed_gemm.HOPPER, **change)

  @parameterized.parameters(
      ({"w2": _MOE.w13}, "gate sites"), ({"w13": _GEMM}, "dtypes"),
      ({"up_zero": "lost"}, "up_zero='lost'"),
  )
  def test_moe(self, change, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(_MOE, **change)


if __name__ == "__main__":
  absltest.main()
