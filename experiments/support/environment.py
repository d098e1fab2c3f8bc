"""Where a run happened: versions, device, commit, source, compiler flags.

A result that cannot name its environment cannot be repeated. Environment
variables are recorded here and read nowhere.

Layer: experiments.
"""

import importlib.metadata
import os
import pathlib
import platform
import subprocess

import jax

from moejax.protocols.route_block import identity

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "ml_dtypes",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
)
_SOURCE_PACKAGES = ("moejax", "pallas_kernels", "torch_bridge", "experiments")
_ROOT = pathlib.Path(__file__).parents[2]


def describe() -> dict:
  """Returns the environment as JSON values; absent things are null."""
  device = jax.devices()[0]
  return {
      "python": platform.python_version(),
      "platform": f"{platform.system()} {platform.machine()}",
      "processor": _processor(),
      "device": device.device_kind,
      "backend": device.platform,
      "driver": getattr(device.client, "platform_version", None),
      "packages": {name: _version(name) for name in _PACKAGES},
      "commit": _commit(),
      "source": source(),
      "xla_flags": os.environ.get("XLA_FLAGS", ""),
      "x64": bool(jax.config.jax_enable_x64),
  }


def source() -> str:
  """Returns the digest of the source files that run, committed or not."""
  return identity.source(_ROOT, _SOURCE_PACKAGES)


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _processor() -> str | None:
  """The processor's model name; where Linux does not tell, Python's guess."""
  info = pathlib.Path("/proc/cpuinfo")
  if info.is_file():
    for line in info.read_text("utf-8").splitlines():
      if line.startswith("model name"):
        return line.split(":", 1)[1].strip()
  return platform.processor() or None


def _commit() -> str | None:
  """The checked-out commit, with "+" if files differ from it."""

  def git(*words):
    return subprocess.run(
        ["git", "-C", str(_ROOT), *words],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()

  try:
    changed = "+" if git("status", "--porcelain") else ""
    return git("rev-parse", "HEAD") + changed
  except (OSError, subprocess.CalledProcessError):
    return None
