"""Two studies of one request: do both backends have the same bits?

Layer: protocols.
"""

import pathlib
from typing import Any

import numpy as np

from moejax.contracts import refusal
from moejax.protocols.route_block import record as record_lib
from moejax.protocols.route_block import request as request_lib
from moejax.protocols.route_block import store


def count(
    request: request_lib.StudyRequest,
    one: str | pathlib.Path,
    other: str | pathlib.Path,
) -> dict[str, Any]:
  """Compares the raw tensors of every cell, element by element.

  Args:
    request: Of the study `one`; its cells are what is compared.
    one: A study that has been scored.
    other: A study of the same request, on any backend.

  Returns:
    "backend" and "binary" (digest) of the other study, "cells", and for each
    surface the "elements" compared and how many of them are "differing" in
    their bits; "first" names the first cell, surface and place, else null.

  Raises:
    HarnessError: the other folder is no study, is one of another request, or
      one of its tensors is missing, damaged, or of another shape or dtype.
  """
  manifest = store.read_manifest(other)
  mine = store.read_manifest(one)["request"]
  if manifest.get("request") != mine:
    raise refusal.HarnessError(f"{other} is a study of another request.")
  names = record_lib.shapes(request)
  found = {
      "backend": manifest.get("backend"),
      "binary": manifest.get("binary", {}).get("digest"),
      "cells": len(request.cells()),
      "elements": dict.fromkeys(names, 0),
      "differing": dict.fromkeys(names, 0),
      "first": None,
  }
  for cell in request.cells():
    a, b = (_words(request, place, cell.name) for place in (one, other))
    for name in names:
      differs = a[name] != b[name]
      found["elements"][name] += differs.size
      found["differing"][name] += int(differs.sum())
      if differs.any() and found["first"] is None:
        at = np.unravel_index(int(differs.argmax()), differs.shape)
        found["first"] = f"{cell.name}: {name}{list(map(int, at))}"
  return found


def _words(request, place, cell: str) -> dict[str, np.ndarray]:
  """The surfaces of a cell as words of 16 bits."""
  path = pathlib.Path(place) / store.RAW / f"{cell}.safetensors"
  try:
    tensors = store.read_tensors(path)
  except ValueError as error:
    raise refusal.HarnessError(f"{place}: {error}") from error
  wanted = {
      name: (shape, request.dtype)
      for name, shape in record_lib.shapes(request).items()
  }
  kinds = {name: (t.shape, t.dtype.name) for name, t in tensors.items()}
  if kinds != wanted:
    raise refusal.HarnessError(f"{path} has {kinds}, not {wanted}.")
  return {name: tensor.view(np.uint16) for name, tensor in tensors.items()}
