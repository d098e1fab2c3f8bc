"""Checkpoints of a training run: whole or absent, proven, and exact.

A folder `step_<steps>` holds `arrays/` (orbax: weights, biases, tables,
optimiser, step) and `checkpoint.json`: what the run is, where its data stands,
and a digest of all bits. It is written beside its place and moved there at the
end, so a process that is killed leaves either the whole folder or a scratch
folder, which the next run removes. The last two are kept.

A run goes on only as what it was: the same model, recipe, text, devices and
compiler. Anything else would go on with other bits.

Layer: training.
"""

from collections.abc import Mapping
import errno
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from moejax.contracts import refusal
from moejax.numerics import fingerprint
from moejax.training import step as step_lib

SCHEMA = "training_checkpoint/1"
MANIFEST = "checkpoint.json"
ARRAYS = "arrays"
_KEPT = 2
_PREFIX, _SCRATCH = "step_", ".step_"


def flatten(state: step_lib.State) -> dict[str, np.ndarray]:
  """{name: array} of a state; the names say where in the tree each stands."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(state)
  return {jax.tree_util.keystr(at): np.asarray(leaf) for at, leaf in leaves}


def save(
    folder: pathlib.Path,
    state: step_lib.State,
    identity: Mapping[str, Any],
    position: Mapping[str, int],
) -> pathlib.Path:
  """Writes a checkpoint and removes all but the newest.

  Args:
    folder: Of the run; made if need be.
    state: On the devices or not.
    identity: What the run is, JSON values.
    position: Where its data stands, for a reader; it follows from the step.

  Returns:
    The checkpoint's folder.

  Raises:
    refusal.HarnessError: there is no room for it, or it cannot be written.
  """
  arrays = flatten(state)
  steps = int(arrays[".step"])
  place = folder / f"{_PREFIX}{steps:08d}"
  need = sum(array.nbytes for array in arrays.values())
  try:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < 2 * need:
      raise refusal.HarnessError(
          f"{folder}: a checkpoint takes {need} bytes and may for a moment take"
          f" twice as many; {free} are free. The last one is kept."
      )
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
      made = pathlib.Path(scratch) / "made"
      made.mkdir()
      with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(made / ARRAYS, arrays)
        checkpointer.wait_until_finished()
      manifest = {
          "schema": SCHEMA,
          "step": steps,
          "data": dict(position),
          "identity": identity,
          "digest": fingerprint.tree(arrays),
      }
      text = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
      (made / MANIFEST).write_text(text, "utf-8")
      if place.exists():  # The same step of the same run: nothing to add.
        return place
      os.rename(made, place)
  except OSError as error:
    full = " (the disk is full)" if error.errno == errno.ENOSPC else ""
    raise refusal.HarnessError(
        f"{place} cannot be written{full}: {error}. The last one is kept."
    ) from error
  for old in _found(folder)[:-_KEPT]:
    shutil.rmtree(old)
  return place


def restore(
    folder: pathlib.Path, template: step_lib.State, identity: Mapping[str, Any]
) -> step_lib.State | None:
  """Returns the newest state of a run, or None where there is none.

  Args:
    folder: Of the run.
    template: A state of the same structure.
    identity: As it was saved.

  Raises:
    refusal.HarnessError: the newest checkpoint belongs to another run, or is
      damaged; the message names each field.
  """
  if not folder.is_dir():
    return None
  for scratch in folder.glob(f"{_SCRATCH}*"):  # Of a process that was killed.
    shutil.rmtree(scratch)
  found = _found(folder)
  if not found:
    return None
  place = found[-1]
  manifest = _read(place)
  faults = _differences(manifest["identity"], dict(identity), "")
  if faults:
    raise refusal.HarnessError(
        f"{place} belongs to another run: {'; '.join(faults)}. Give the flags"
        " of that run, or another folder."
    )
  try:
    with ocp.StandardCheckpointer() as checkpointer:
      arrays = checkpointer.restore(place / ARRAYS)
  except Exception as error:  # Storage drivers raise what they like.
    raise refusal.HarnessError(_damaged(place, error)) from error
  arrays = {name: np.asarray(array) for name, array in arrays.items()}
  digest = fingerprint.tree(arrays)
  if digest != manifest["digest"]:
    raise refusal.HarnessError(_damaged(
        place, f"digest {digest}, saved was {manifest['digest']}"
    ))
  wanted = {
      name: (leaf.shape, leaf.dtype) for name, leaf in flatten(template).items()
  }
  given = {name: (leaf.shape, leaf.dtype) for name, leaf in arrays.items()}
  if wanted != given:
    names = sorted(
        n for n in {*wanted, *given} if wanted.get(n) != given.get(n)
    )
    raise refusal.HarnessError(f"{place}: other leaves: {', '.join(names)}.")
  structure = jax.tree_util.tree_structure(template)
  return jax.tree_util.tree_unflatten(
      structure, [arrays[name] for name in wanted]
  )


def _found(folder: pathlib.Path) -> list[pathlib.Path]:
  """Checkpoints by step, the newest last."""
  return sorted(folder.glob(f"{_PREFIX}*"))


def _read(place: pathlib.Path) -> dict[str, Any]:
  try:
    manifest = json.loads((place / MANIFEST).read_text("utf-8"))
  except (OSError, ValueError) as error:
    raise refusal.HarnessError(_damaged(place, error)) from error
  if manifest.get("schema") != SCHEMA:
    raise refusal.HarnessError(_damaged(place, f"no schema {SCHEMA!r}"))
  return manifest


def _damaged(place, why) -> str:
  return f"{place} is damaged: {why}. Remove it to go on from the one before."


def _differences(saved: Any, wanted: Any, at: str) -> list[str]:
  if isinstance(saved, dict) and isinstance(wanted, dict):
    return [
        fault
        for key in sorted({*saved, *wanted})
        for fault in _differences(
            saved.get(key), wanted.get(key), f"{at}.{key}" if at else key
        )
    ]
  return [] if saved == wanted else [f"{at} was {saved!r}, not {wanted!r}"]
