"""Parameters on disk: orbax arrays, and the config they belong to.

A folder holds `arrays/` (orbax) and `parameters.json` (the config, and a
digest of all bits). Restoring uses up both sides: every leaf that the config
asks for is there with its shape, dtype and bits, and no other leaf is. A
checkpoint of twelve layers can then never become a model of sixteen, four of
which nobody set.

A folder appears whole or not at all: it is written beside its place and moved
there at the end.

Layer: modules.
"""

from collections.abc import Mapping
import json
import os
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from moejax.contracts import document
from moejax.contracts import refusal
from moejax.modules import config as config_lib
from moejax.modules import decoder
from moejax.numerics import fingerprint

SCHEMA = "parameters/1"
MANIFEST = "parameters.json"
ARRAYS = "arrays"

Leaf = tuple[tuple[int, ...], str]


def save(
    folder: str | pathlib.Path,
    flat_params: Mapping[str, jax.Array | np.ndarray],
    config: config_lib.DecoderConfig,
) -> None:
  """Writes all parameters of a decoder into a new folder.

  Args:
    folder: Where; it must not exist, or be empty. Its parents are made.
    flat_params: {dotted path: array}, as `decoder.parameter_shapes` lists
      them, in the config's dtype. Arrays of several devices are gathered.
    config: The decoder.

  Raises:
    ValueError: the parameters are not those of the config; each difference is
      named.
    refusal.HarnessError: the folder holds something already.
  """
  arrays = {path: np.asarray(a) for path, a in flat_params.items()}
  leaves = {path: (a.shape, a.dtype.name) for path, a in arrays.items()}
  faults = _differences(leaves, config)
  if faults:
    raise ValueError(f"parameters do not fit the config: {faults}.")
  folder = pathlib.Path(folder).absolute()
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise refusal.HarnessError(
        f"{folder} holds something already; parameters are saved into a new"
        " folder."
    )
  folder.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(
      prefix=f".{folder.name}.", dir=folder.parent
  ) as scratch:
    # One level below the scratch folder, whose permissions are private.
    made = pathlib.Path(scratch) / "made"
    made.mkdir()
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(made / ARRAYS, arrays)
      checkpointer.wait_until_finished()
    manifest = {
        "schema": SCHEMA,
        "config": document.to_dict(config),
        "digest": fingerprint.tree(arrays),
    }
    (made / MANIFEST).write_text(
        json.dumps(manifest, indent=2) + "\n", encoding="utf-8"
    )
    os.rename(made, folder)


def restore(
    folder: str | pathlib.Path, config: config_lib.DecoderConfig
) -> dict[str, np.ndarray]:
  """Returns {dotted path: array} of a decoder, in the order of its shapes.

  Args:
    folder: As `save` wrote it.
    config: The decoder that will take the parameters.

  Raises:
    refusal.HarnessError: the folder is no such folder or damaged, was saved
      with another config, or lacks a leaf, holds a further one, or one of
      another shape, dtype or bits. The message names every field and leaf.
  """
  manifest = _read_manifest(folder)
  wanted = document.to_dict(config)
  saved = manifest["config"]
  faults = [
      f"{field} is {saved.get(field)!r}, not {wanted.get(field)!r}"
      for field in sorted({*saved, *wanted})
      if saved.get(field) != wanted.get(field)
  ]
  leaves = _differences(list_parameters(folder), config)
  if leaves:
    faults.append(leaves)
  if faults:
    raise refusal.HarnessError(
        f"{folder} holds parameters of another decoder: {'; '.join(faults)}."
    )
  path = pathlib.Path(folder).absolute() / ARRAYS
  try:
    with ocp.StandardCheckpointer() as checkpointer:
      arrays = checkpointer.restore(path)
  except Exception as error:  # Storage drivers raise what they like.
    raise refusal.HarnessError(f"{path} is damaged: {error}") from error
  params = {p: np.asarray(arrays[p]) for p in decoder.parameter_shapes(config)}
  digest = fingerprint.tree(params)
  if digest != manifest["digest"]:
    raise refusal.HarnessError(
        f"{folder}: the weights have the digest {digest}, saved was"
        f" {manifest['digest']}."
    )
  return params


def list_parameters(folder: str | pathlib.Path) -> dict[str, Leaf]:
  """Returns {dotted path: (shape, dtype)} of a saved folder; reads no weight.

  Raises:
    refusal.HarnessError: the folder is no such folder, or damaged.
  """
  _read_manifest(folder)
  path = pathlib.Path(folder).absolute() / ARRAYS
  try:
    with ocp.StandardCheckpointer() as checkpointer:
      saved = checkpointer.metadata(path).item_metadata
  except Exception as error:  # Storage drivers raise what they like.
    raise refusal.HarnessError(f"{path} is damaged: {error}") from error
  if saved is None:  # orbax logs why and returns nothing.
    raise refusal.HarnessError(f"{path} is damaged: no array can be listed.")
  return {
      name: (tuple(leaf.shape), np.dtype(leaf.dtype).name)
      for name, leaf in sorted(saved.tree.items())
  }


def _differences(
    leaves: Mapping[str, Leaf], config: config_lib.DecoderConfig
) -> str:
  """Names every leaf that is missing, left over or of another kind; or ""."""
  expected = {
      path: (shape, config.dtype)
      for path, shape in decoder.parameter_shapes(config).items()
  }
  missing = [path for path in expected if path not in leaves]
  left_over = [path for path in leaves if path not in expected]
  wrong = [
      f"{path} is {leaves[path]}, not {expected[path]}"
      for path in expected
      if path in leaves and leaves[path] != expected[path]
  ]
  return "; ".join(
      f"{what} leaves ({len(names)}): {', '.join(names)}"
      for what, names in (
          ("missing", missing),
          ("left-over", left_over),
          ("wrong", wrong),
      )
      if names
  )


def _read_manifest(folder: str | pathlib.Path) -> dict[str, Any]:
  path = pathlib.Path(folder) / MANIFEST
  if not path.is_file():
    raise refusal.HarnessError(
        f"{folder} holds no saved parameters: {path} is absent."
    )
  try:
    manifest = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise refusal.HarnessError(f"{path} is damaged JSON: {error}") from error
  if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
    raise refusal.HarnessError(f"{path} is not of schema {SCHEMA!r}.")
  if not isinstance(manifest.get("config"), dict) or "digest" not in manifest:
    raise refusal.HarnessError(f"{path} lacks config or digest.")
  return manifest
