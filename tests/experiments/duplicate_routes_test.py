"""The binary of duplicate routes: record, table and exit code.

Needs no accelerator.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest


class DuplicateRoutesTest(absltest.TestCase):

  def test_the_record_and_the_table(self):
    with tempfile.TemporaryDirectory() as folder:
      done = subprocess.run(
          [sys.executable, "-m", "experiments.duplicate_routes",
           f"--out={folder}", "--tokens=12", "--block_m=8", "--dtype=float64"],
          capture_output=True, text=True, check=False,
      )
      self.assertEqual(done.returncode, 0, done.stderr[-2000:])
      lines = (pathlib.Path(folder) / "duplicate_routes.tsv").read_text(
          "utf-8"
      ).splitlines()
    record = json.loads(done.stdout.splitlines()[-1])
    self.assertEqual(record["schema"], "duplicate_routes/1")
    self.assertTrue(record["finite"] and record["right"])
    # A bound of 12 reaches two blocks of 8 of the 24 rows.
    self.assertEqual(record["stale_rows"], [16, 23])
    self.assertEqual(
        record["stale_fingerprint"],
        {"dx_tokens": 4, "d_gates_slots": 8, "d_gate_up_experts": [0],
         "d_down_experts": []},
    )
    self.assertEqual(record["stale_wrong"],
                     {"nan": True, "zero": True, "1e4": True})
    self.assertEqual(
        [row["span"] for row in record["table"]],
        [[128, 255], [], [128, 128], [128, 191], [128, 199], [256, 257],
         [128, 383], [], [128, 255], []],
    )
    right = [line.split("\t")[-1] for line in lines[1:]]
    self.assertLen(right, 30)  # Six arms of five tensors.
    self.assertEqual(right[:15], ["True"] * 15)
    # y and the gradient of down alone survive each fill.
    survives = ["True", "False", "False", "False", "True"]
    self.assertEqual(right[15:], survives * 3)


if __name__ == "__main__":
  absltest.main()
