"""Did a decoder run packed? Counted, not believed.

Three counts must agree with what the run demands:

  elements  the tap `packed_elements`, route by route, against the routes: each
            routed row owes 2 I elements of W13 and H of W2, in every layer
            whose experts the checkpoint has packed
  gemms     GEMMs whose weights the operation set took from words, against two
            a packed layer and forward pass
  bytes     what the decoder holds between calls, each array once, against the
            parameters as loaded; what a backend packed for itself is counted
            apart, and no array of a packed layer has as many elements as the
            weight has codes

A count that does not agree is a fault, and a run with a fault has not run
packed, whatever its results are.

Layer: protocols.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from flax import nnx
import jax
import numpy as np

from moejax.contracts import packed_moe
from moejax.protocols import capture as capture_lib
from moejax.protocols import taps as taps_lib

_GEMMS = ("w13", "w2")


def packed_layers(params: Mapping[str, Any]) -> list[int]:
  """The layers whose experts lie packed in {dotted path: array}, ascending."""
  return sorted({
      taps_lib.split(path)[0]
      for path in params
      if path.endswith(".moe.gate_up.qweight")
  })


def gemms(decoder: Any) -> int:
  """How many GEMMs its operation set has run from packed words so far."""
  return getattr(decoder.ops, "packed_gemms", 0)


def prove(
    decoder: Any,
    captures: Sequence[capture_lib.Capture],
    params: Mapping[str, Any],
    gemms_before: int,
) -> dict:
  """Returns the counts of a run and its faults, as JSON values.

  Args:
    decoder: The one that ran.
    captures: What it showed, `packed_elements` and routes included.
    params: {dotted path: array} as loaded.
    gemms_before: `gemms` of the decoder before the run.
  """
  layers = packed_layers(params)
  faults: list[str] = []
  rows = [
      _elements(layer, decoder.config, captures, faults) for layer in layers
  ]
  passes = len(captures[0].steps)
  run = gemms(decoder) - gemms_before
  want = len(_GEMMS) * len(layers) * passes
  if run != want:
    faults.append(
        f"{run} GEMMs took their weights from packed words, want {want}:"
        f" {len(_GEMMS)} in each of {len(layers)} layers and {passes} forward"
        " passes"
    )
  held = _held(decoder, params, layers, faults)
  for row in rows:
    row["held"] = held["layers"][row["layer"]]
  return {
      "layers": rows,
      "elements": sum(sum(r[g]) for r in rows for g in _GEMMS),
      "demanded": sum(sum(r["demanded"][g]) for r in rows for g in _GEMMS),
      "gemms": run,
      "demanded_gemms": want,
      "held_bytes": held["decoder"],
      "loaded_bytes": held["loaded"],
      "backend_bytes": held["backend"],
      "faults": faults,
  }


def document(
    proofs: Mapping[str, Mapping],
    contracts: Mapping[str, packed_moe.PackedDecoderContract],
    layer: str,
    clauses: Mapping[str, Mapping[str, tuple[str, str]]],
) -> dict:
  """Returns the part of a report that is about packed experts.

  Args:
    proofs: {arithmetic: from `prove`}.
    contracts: {arithmetic: our contract}.
    layer: Who ran the packed experts.
    clauses: {arithmetic: from `clause.differing`}.
  """
  contract = next(iter(contracts.values()))
  faults = [f"{n}: {f}" for n, p in proofs.items() for f in p["faults"]]
  return {
      "proven": not faults,
      "faults": faults,
      "experts": contract.experts.name,
      "layer": layer,
      "plan": contract.plan,
      "arithmetics": {name: dict(p) for name, p in proofs.items()},
      "clauses": {
          name: {
              field: {"ours": ours, "reference": reference}
              for field, (ours, reference) in found.items()
          }
          for name, found in clauses.items()
      },
  }


def _elements(layer, config, captures, faults) -> dict:
  """Elements of one layer by step: found, and demanded by the routes."""
  sizes = (2 * config.expert_hidden, config.embed)
  at = f"layers.{layer}.moe"
  found, demanded = [], []
  for step in range(len(captures[0].steps)):
    shown, routes = np.zeros(2, np.int64), 0
    for one in captures:
      taps = one.steps[step].taps
      ids, counted = (
          taps.get(f"{at}.{tap}")
          for tap in ("router.ids", "experts.packed_elements")
      )
      if counted is not None:
        shown += counted.reshape(-1, 2).sum(0, dtype=np.int64)
      if ids is not None:
        routes += ids.size
      wrong = counted is None or ids is None or not np.array_equal(
          counted, np.broadcast_to(sizes, (*ids.shape, 2))
      )
      if wrong:
        what = "nothing" if counted is None else counted.sum((0, 1)).tolist()
        faults.append(
            f"layer {layer}, step {step}, prompt {one.prompt_id}: {what} came"
            f" from packed weights, want {sizes} of W13 and W2 for each of"
            f" {0 if ids is None else ids.size} routes"
        )
    found.append(shown.tolist())
    demanded.append([routes * size for size in sizes])
  by_gemm = dict(zip(_GEMMS, map(list, zip(*found)), strict=True))
  return {
      "layer": layer,
      **by_gemm,
      "demanded": dict(zip(_GEMMS, map(list, zip(*demanded)), strict=True)),
  }


def _arrays(module) -> dict[str, Any]:
  """{path: array} of all that a module holds."""
  flat, _ = jax.tree_util.tree_flatten_with_path(nnx.state(module))
  return {jax.tree_util.keystr(path): array for path, array in flat}


def _bytes(arrays) -> int:
  """Their bytes; an array that stands in two places counts once."""
  return sum(a.nbytes for a in {id(a): a for a in arrays}.values())


def _held(decoder, params, layers, faults) -> dict:
  """Bytes of the decoder and, by layer, the arrays of its packed experts."""
  loaded = _bytes(params.values())
  everything = _arrays(decoder)
  backend, by_layer = [], {}
  given = {id(array) for array in params.values()}
  for layer in layers:
    experts = decoder.layers[layer].moe.experts
    codes = {
        name: 8 * params[f"layers.{layer}.moe.{name}.qweight"].size
        for name in ("gate_up", "down")
    }
    item = np.dtype(decoder.config.dtype).itemsize
    arrays = _arrays(experts)
    if hasattr(experts, "operands"):
      own = jax.tree.leaves(nnx.state(experts)["operands"])
      backend += [a for a in own if id(a) not in given]
    faults += [
        f"layer {layer} holds {path} between calls,"
        f" {array.dtype}{tuple(array.shape)}, as large as a weight made wide"
        for path, array in arrays.items()
        if array.nbytes >= item * codes["down"]
    ]
    by_layer[layer] = {
        "module": type(experts).__name__,
        "dtypes": sorted({a.dtype.name for a in arrays.values()}),
        "bytes": _bytes(arrays.values()),
        "wide_bytes": item * sum(codes.values()),
        "digests": {
            name: part["digest"]
            for name in ("gate_up", "down")
            if (part := _summary(experts, name))
        },
    }
  total = _bytes(everything.values())
  if total - _bytes(backend) != loaded:
    faults.append(
        f"the decoder holds {total} bytes between calls, {_bytes(backend)} of"
        f" them a backend's own; want the {loaded} bytes of the parameters as"
        " loaded"
    )
  return {
      "decoder": total, "loaded": loaded, "backend": _bytes(backend),
      "layers": by_layer,
  }


def _summary(experts, name: str) -> dict:
  weight = getattr(experts, name, None)
  return weight.summary() if hasattr(weight, "summary") else {}
