"""A capsule: what a run showed, in a folder that any machine can compare.

  manifest.json         identity, contract, environment; for each arithmetic
                        and prompt: tokens, steps, fingerprints of every tap
                        and of the state, and what was not captured and why
  native/ID.safetensors, portable/ID.safetensors
                        the values, named "STEP/TAP" and "state/NAME"

Nothing in it is a pickle, and no machine of its origin is needed. When a
capsule is read, every value is checked against its fingerprint.

Layer: protocols.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import json
import pathlib
import re
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from moejax.contracts import document
from moejax.contracts import refusal
from moejax.numerics import fingerprint
from moejax.protocols import capture as capture_lib
from moejax.protocols import taps as taps_lib

SCHEMA = "capsule/1"
_MANIFEST = "manifest.json"


def write(
    folder: pathlib.Path,
    runs: Mapping[str, Sequence[capture_lib.Capture]],
    about: Mapping[str, Any],
    identities: Mapping[str, Mapping[str, Any]],
) -> str:
  """Writes a capsule into a new folder; returns the manifest's digest.

  Args:
    folder: Must not exist yet.
    runs: {arithmetic: captures}.
    about: Environment, contracts, what was not captured; JSON values.
    identities: {arithmetic: the fields of `fingerprint.Identity` without the
      prompt, as JSON}.
  """
  folder.mkdir(parents=True)
  prompts = {}
  for arithmetic, captures in runs.items():
    (folder / arithmetic).mkdir()
    prompts[arithmetic] = [
        _write_one(folder / arithmetic, c, identities[arithmetic])
        for c in captures
    ]
  manifest = {
      "schema": SCHEMA,
      "identities": {name: dict(identities[name]) for name in runs},
      "about": dict(about),
      "runs": prompts,
  }
  text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False)
  (folder / _MANIFEST).write_text(text + "\n", "utf-8")
  return document.sha256(document.canonical_json(manifest))


def _identity(identity, prompt) -> fingerprint.Identity:
  return fingerprint.Identity(**identity, prompt=tuple(prompt))


def _fingerprint(name, value, start, identity) -> str:
  layer, tap = taps_lib.split(name)
  return fingerprint.fingerprint(
      value,
      tap,
      axes=",".join(taps_lib.axes(name)),
      layer=layer,
      position=start,
      identity=identity,
  )


def _write_one(folder, capture, identity) -> dict[str, Any]:
  bound = _identity(identity, capture.prompt)
  tensors, steps = {}, []
  for index, step in enumerate(capture.steps):
    prints = {}
    for name, value in step.taps.items():
      tensors[f"{index}/{name}"] = np.ascontiguousarray(value)
      prints[name] = _fingerprint(name, value, step.start, bound)
    steps.append({
        "start": step.start,
        "tokens": list(step.tokens),
        "chosen": step.chosen,
        "state": step.state,
        "order": list(step.taps),
        "taps": prints,
    })
  for name, value in capture.final_state.items():
    tensors[f"state/{name}"] = np.ascontiguousarray(value)
  file = f"{_file_name(capture.prompt_id)}.safetensors"
  # `save` and not `save_file`: that one leaves the file readable by its owner
  # alone.
  (folder / file).write_bytes(safetensors.numpy.save(tensors))
  return {
      "id": capture.prompt_id,
      "prompt": list(capture.prompt),
      "file": file,
      "steps": steps,
      "final_state": capture_lib.state_fingerprint(capture.final_state),
  }


def _file_name(prompt_id: str) -> str:
  """A prompt id as a file name; other characters become a digest."""
  if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", prompt_id):
    return prompt_id
  return f"prompt_{document.sha256(prompt_id)[:16]}"


def read_manifest(folder: str | pathlib.Path) -> dict[str, Any]:
  """Returns a capsule's manifest.

  Raises:
    HarnessError: there is none, or it is of another schema.
  """
  path = pathlib.Path(folder) / _MANIFEST
  if not path.is_file():
    raise refusal.HarnessError(
        f"{folder} is no capsule: it has no {_MANIFEST}."
    )
  try:
    manifest = json.loads(path.read_text("utf-8"))
  except ValueError as error:
    raise refusal.HarnessError(f"{path}: {error}") from error
  schema = manifest.get("schema") if isinstance(manifest, dict) else None
  if schema != SCHEMA:
    raise refusal.HarnessError(f"{path}: schema {schema!r} is not {SCHEMA!r}.")
  return manifest


def read(
    folder: str | pathlib.Path, arithmetic: str
) -> list[capture_lib.Capture]:
  """Returns the captures of one arithmetic, every value verified.

  Raises:
    HarnessError: the capsule lacks that arithmetic, a file is damaged, or a
      value does not have its fingerprint.
  """
  manifest = read_manifest(folder)
  if arithmetic not in manifest["runs"]:
    raise refusal.HarnessError(
        f"{folder} holds {sorted(manifest['runs'])}, not {arithmetic!r}."
    )
  return [
      _read_one(
          pathlib.Path(folder) / arithmetic,
          entry,
          manifest["identities"][arithmetic],
      )
      for entry in manifest["runs"][arithmetic]
  ]


def _read_one(folder, entry, identity) -> capture_lib.Capture:
  path = folder / entry["file"]
  bound = _identity(identity, entry["prompt"])
  try:
    with safetensors.safe_open(path, framework="numpy") as file:
      names = set(file.keys())
      steps = [
          _read_step(file, names, path, index, step, bound)
          for index, step in enumerate(entry["steps"])
      ]
      final = {
          name.removeprefix("state/"): file.get_tensor(name)
          for name in names
          if name.startswith("state/")
      }
  except (OSError, safetensors.SafetensorError) as error:
    raise refusal.HarnessError(f"{path}: {error}") from error
  if capture_lib.state_fingerprint(final) != entry["final_state"]:
    raise refusal.HarnessError(f"{path}: the state lost its fingerprint.")
  return capture_lib.Capture(
      entry["id"], tuple(entry["prompt"]), steps, final
  )


def _read_step(file, names, path, index, step, bound) -> capture_lib.Step:
  taps = {}
  for name in step["order"]:
    key = f"{index}/{name}"
    if key not in names:
      raise refusal.HarnessError(f"{path}: tap {key} is missing.")
    value = file.get_tensor(key)
    if _fingerprint(name, value, step["start"], bound) != step["taps"][name]:
      raise refusal.HarnessError(
          f"{path}: the value of {key} does not have its fingerprint."
      )
    taps[name] = value
  return capture_lib.Step(
      step["start"],
      tuple(step["tokens"]),
      step["chosen"],
      taps,
      step["state"],
  )
