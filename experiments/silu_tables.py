"""What each backend's silu does to all 65,536 values of a 16-bit dtype.

  python -m experiments.silu_tables [--moe_extension=PATH --ops_extension=PATH]

silu is a function of one 16-bit value, so its table says all about it, and the
table's SHA-256 is a field of a packed layer's contract (`silu_table`). For each
backend and dtype this shows the digest, and on how many values it differs from
the contract's table: numbers (the first of them with its bits; how many of them
are subnormal in float32, before or after, which XLA flushes on a CPU), and NaN.
Ends with one JSON document, "silu_tables/1". Exit codes: 0 whoever promises the
contract's table (the oracle; our kernels and vLLM's on a device) has it, 1 one
of them does not, 2 usage or harness error, 4 no device for a backend asked for.
"""

from collections.abc import Callable

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import rich.box
import rich.console
import rich.table

from experiments.support import binary
from experiments.support import environment
from moejax.contracts import packed_gemm
from moejax.contracts import packed_moe
from moejax.contracts import refusal
from moejax.numerics import native_ops
from moejax.numerics.packed import activation
from moejax.numerics.portable import portable_oracle
from pallas_kernels import half_words
from pallas_kernels import launch
from pallas_kernels import silu_and_mul
from torch_bridge.packed import silu as torch_silu
from torch_bridge import vllm_marlin

_MOE = flags.DEFINE_string(
    "moe_extension", "", "vLLM's _moe_C_stable_libtorch.abi3.so."
)
_OPS = flags.DEFINE_string(
    "ops_extension", "", "vLLM's _C_stable_libtorch.abi3.so."
)
# Those whose bits the contract promises; the others are shown beside them.
_PROMISED = ("oracle", "pallas", "vllm")

Silu = Callable[[np.ndarray], np.ndarray]


def compared(name: str, silu: Silu, dtype: str) -> dict:
  """Returns one row: a backend's table against the contract's."""
  table = activation.table_of(silu, dtype)
  want = activation.silu_table(dtype)
  values = activation.all_values(dtype)
  differs = table.view(np.uint16) != want.view(np.uint16)
  numbers = differs & ~np.isnan(values.astype(np.float32))
  with np.errstate(invalid="ignore"):  # Signalling NaN is among all values.
    sizes = [np.abs(x.astype(np.float64)) for x in (values, want)]
  small = [(0 < size) & (size < 2.0**-126) for size in sizes]
  first = np.flatnonzero(numbers)[:1].tolist()
  return {
      "backend": name,
      "dtype": dtype,
      "digest": activation.table_digest(table),
      "differing": int(numbers.sum()),
      "differing_subnormal": int((numbers & (small[0] | small[1])).sum()),
      "differing_nan": int((differs & ~numbers).sum()),
      "first": None if not first else {
          key: f"0x{int(x.view(np.uint16)[first[0]]):04x}"
          for key, x in (
              ("value", values), ("silu", table), ("contract", want)
          )
      },
  }


def backends(dtype: str) -> dict[str, Silu]:
  """Returns {name: silu} of all that run here."""
  portable = portable_oracle.PortableOracle()
  interpret = jax.default_backend() == "cpu"
  found = {
      "oracle": lambda x: activation.silu_table(dtype)[x.view(np.uint16)],
      "pallas" + ", interpreted" * interpret: (
          lambda x: _kernel(x, dtype, interpret)
      ),
      "portable": lambda x: portable.unary("silu", x, dtype),
      "xla": lambda x: np.asarray(
          native_ops.NativeOperations().silu(jnp.asarray(x))
      ),
      "aten": torch_silu.aten(),
  }
  extensions = (_MOE.value, _OPS.value)
  if any(extensions):
    if not all(extensions):
      raise refusal.HarnessError(
          "--moe_extension and --ops_extension belong together."
      )
    found["vllm"] = torch_silu.vllm(vllm_marlin.Kernels(*extensions))
  return found


def _kernel(x: np.ndarray, dtype: str, interpret: bool) -> np.ndarray:
  """Our kernel; the up half is one."""
  gate = x.reshape(256, -1)
  s1 = np.concatenate([gate, np.ones_like(gate)], axis=1)
  contract = packed_moe.marlin(dtype=dtype, thread_k=64, thread_n=64, grid=1)
  words = silu_and_mul.silu_and_mul(
      half_words.to_words(s1), silu_and_mul.silu_words(contract), contract,
      launch.LaunchConfig(interpret=interpret),
  )
  return np.asarray(half_words.from_words(words, dtype)).reshape(-1)


def main() -> int:
  """Compares, shows a table, returns the exit code."""
  rows = [
      compared(name, silu, dtype)
      for dtype in packed_gemm.HALVES
      for name, silu in backends(dtype).items()
  ]
  table = rich.table.Table(box=rich.box.SIMPLE)
  for head in (
      "dtype", "silu of", "digest", "differ", "subnormal", "NaN", "first"
  ):
    table.add_column(head)
  for row in rows:
    first = row["first"]
    table.add_row(
        row["dtype"], row["backend"], row["digest"][:12],
        *(f"{row[key]:,}" for key in
          ("differing", "differing_subnormal", "differing_nan")),
        "" if first is None else
        f"{first['value']}: {first['silu']}, contract {first['contract']}",
    )
  rich.console.Console(highlight=False).print(table)
  kept = {
      (row["dtype"], row["backend"]):
          row["digest"] == packed_moe.SILU_TABLES[row["dtype"]]
      for row in rows
      if row["backend"] in _PROMISED
  }
  binary.last_line({
      "schema": "silu_tables/1",
      "contract": packed_moe.SILU_TABLES,
      "tables": rows,
      "environment": environment.describe(),
  })
  return int(not all(kept.values()))


if __name__ == "__main__":
  binary.run(main)
