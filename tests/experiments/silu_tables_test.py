"""The exhaustive tables of silu, by backend; the binary and its document."""

import json
import pathlib
import subprocess
import sys

from absl.testing import absltest
import numpy as np

from experiments import silu_tables
from moejax.contracts import packed_moe
from moejax.numerics.packed import activation

_ROOT = pathlib.Path(__file__).parents[2]


def _run(*arguments: str) -> subprocess.CompletedProcess:
  return subprocess.run(
      [sys.executable, "-m", "experiments.silu_tables", *arguments],
      cwd=_ROOT, capture_output=True, text=True, check=False,
  )


class SiluTablesTest(absltest.TestCase):

  def test_each_backend_has_its_digest_beside_the_contracts(self):
    run = _run()
    self.assertEqual(run.returncode, 0, run.stderr[-2000:])
    document = json.loads(run.stdout.splitlines()[-1])
    self.assertEqual(document["contract"], packed_moe.SILU_TABLES)
    rows = {(r["dtype"], r["backend"]): r for r in document["tables"]}
    for dtype, digest in packed_moe.SILU_TABLES.items():
      self.assertEqual(rows[dtype, "oracle"]["digest"], digest)
      self.assertIn(rows[dtype, "oracle"]["digest"][:12], run.stdout)
      for name in ("portable", "xla", "aten"):
        row = rows[dtype, name]
        self.assertNotEqual(row["digest"], digest)
        # Silu of minus infinity is NaN or zero; all have another NaN.
        self.assertGreater(row["differing"], 0)
        self.assertGreater(row["differing_nan"], 0)
    # The interpreter flushes subnormals, and differs in nothing else.
    for (_, name), row in rows.items():
      if name.startswith("pallas"):
        self.assertEqual(row["differing"], row["differing_subnormal"])
        self.assertEqual(row["differing_nan"], 0)

  def test_one_bit_of_one_value_is_seen_and_named(self):
    def silu(x):
      table = activation.silu_table("float16")[x.view(np.uint16)].copy()
      table.view(np.uint16)[0x3C01] ^= 1
      return table

    row = silu_tables.compared("wrong", silu, "float16")
    self.assertEqual((row["differing"], row["differing_nan"]), (1, 0))
    self.assertEqual(row["first"]["value"], "0x3c01")
    self.assertNotEqual(row["first"]["silu"], row["first"]["contract"])
    self.assertNotEqual(row["digest"], packed_moe.SILU_TABLES["float16"])

  def test_a_function_of_another_dtype_has_no_table(self):
    with self.assertRaisesRegex(ValueError, r"float16 gives float32"):
      activation.table_of(lambda x: x.astype(np.float32), "float16")

  def test_exit_codes_of_refusals(self):
    run = _run("--moe_extension=x")
    self.assertEqual(run.returncode, 2, run.stderr)
    self.assertIn("belong together", run.stderr)
    run = _run("--moe_extension=/no/a", "--ops_extension=/no/b")
    self.assertEqual(run.returncode, 2, run.stderr)
    self.assertIn("/no/a", run.stderr)


if __name__ == "__main__":
  absltest.main()
