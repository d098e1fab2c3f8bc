"""Small reports for the tests of the renderers.

They come from the real builder, so that a renderer which reads a field the
builder does not write fails here. Texts are hostile on purpose.
"""

import copy

import numpy as np

from moejax.contracts import named_combines
from moejax.contracts import verdict
from moejax.numerics.portable import certificate as certificate_lib
from moejax.protocols import capture as capture_lib
from moejax.protocols import compare
from moejax.protocols import explain
from moejax.protocols import native_rules
from moejax.protocols import outcome
from moejax.protocols.packed import proof
from moejax.protocols import trajectory
from tests.modules import packed_decoders

HOSTILE = "<script>alert(\"x\")</script> & 'a' | b `c` ``d"
CHINESE = "朋友昨天打来电话"
ENVIRONMENT = {
    "python": "3.11.7",
    "platform": "Linux-x86_64",
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "device": "cpu",
    "numpy": "2.4.6",
    "commit": "abc1234",
    "xla_flags": "",
}
_PROMPTS = (
    trajectory.Prompt("first", (1, 2), HOSTILE),
    trajectory.Prompt("second", (3, 4), CHINESE),
)
_LAYERS = 2


def _captures(shift: float = 0.0, chosen: int = 3) -> list:
  """Runs whose combine of layer 1 is shifted in one element."""
  out = []
  for prompt in _PROMPTS:
    taps = {"embed": np.ones((2, 3), np.float32)}
    for layer in range(_LAYERS):
      at = f"layers.{layer}"
      combine = np.full((2, 3), 0.5, np.float32)
      combine[1, 2] += shift * (layer == 1)
      taps[f"{at}.attention.state_keys"] = np.ones((2, 1, 2), np.float32)
      taps[f"{at}.moe.router.scores"] = np.float32(
          [[0.4, 0.3, 0.2, 0.1], [0.5, 0.2, 0.2, 0.1]]
      )
      taps[f"{at}.moe.router.ids"] = np.int32([[0, 1], [0, 1]])
      taps[f"{at}.moe.experts.combine"] = combine
      taps[f"{at}.output"] = combine + 1
    taps["logits"] = np.float32([[0, 1, 2, 3], [0, 1, 2, 3]])
    step = capture_lib.Step(0, prompt.tokens, chosen, taps, "state")
    out.append(capture_lib.Capture(prompt.id, prompt.tokens, [step], {}))
  return out


def _explanation(name: str) -> explain.Explanation:
  found = named_combines.named(name)
  others = [named_combines.named(n) for n in ("B", "P32")]
  return explain.Explanation(
      rows=8,
      name=found.name,
      survivors=(found, others[0]),
      candidates=(
          explain.Candidate(found, 8),
          explain.Candidate(others[0], 8),
          explain.Candidate(others[1], 0),
      ),
      apart=({
          "name": "B",
          "fields": {"rounding": ["ieee", "paper"]},
          "told_apart_by": {
              "data": "standard normal outputs",
              "seed": 0,
              "rows": 1000,
              "differing_rows": 966,
          },
      },),
  )


def _certificate(unresolved: int = 0) -> dict:
  out = certificate_lib.Certificate()
  out.note("matmul", 12345, 3)
  out.note_recomputed("matmul", 3 - unresolved)
  return out.to_dict()


def _native(ours, theirs) -> outcome.Part:
  comparison = compare.compare(ours, theirs)
  legal = native_rules.Exchange(
      "first", 0, 1, 1, (0, 2), (0, 1), 0.0, 0.25, "moe.router.ids"
  )
  judged = comparison.counts[1, "moe.experts.combine"]
  judged.verdict, judged.rule = verdict.WITHIN_RULE, native_rules.BOUND
  for tap in ("output",):
    count = comparison.counts[1, tap]
    count.verdict, count.rule = verdict.WITHIN_RULE, native_rules.ENVELOPE
    count.limit = 0.5
  levels = {level: verdict.WITHIN_RULE for level in verdict.LEVELS}
  return outcome.Part(comparison, levels, exchanges=[legal], free=ours)


def _decode(ids) -> str:
  return "字" + HOSTILE + ",".join(str(i) for i in ids)


def _packed(faults) -> dict:
  """Two layers of two steps; with a fault, one element is missing."""
  counts = {"w13": [64, 32], "w2": [48, 24]}
  held = {"module": "PackedExperts", "dtypes": ["bfloat16", "int32"],
          "bytes": 1234, "wide_bytes": 4321, "digests": {"down": "ab12"}}
  found = counts | ({"w2": [48, 23]} if faults else {})
  run = {
      "layers": [
          {"layer": layer, **found, "demanded": counts, "held": held}
          for layer in range(_LAYERS)
      ],
      "elements": 336 - 2 * bool(faults), "demanded": 336,
      "gemms": 8, "demanded_gemms": 8, "held_bytes": 9999,
      "loaded_bytes": 9000, "backend_bytes": 999, "faults": list(faults),
  }
  contract = packed_decoders.marlin("portable")
  clauses = {"w13.k_streams": ("2, added (c0 + c1)", "1"),
             "w13.k_step": (HOSTILE, "portable")}
  return proof.document(
      {"portable": run, "native": run | {"faults": []}},
      {"portable": contract}, "pallas", {"portable": clauses, "native": {}},
  )


def _build(
    shift: float, follows: str, unresolved: int = 0, packed=None
) -> dict:
  ours, theirs = _captures(shift, chosen=2 if shift else 3), _captures()
  comparison = compare.compare(ours, theirs)
  parts = {
      "portable": outcome.Part(
          comparison, comparison.levels(), outcome.causes(comparison)
      ),
      "native": _native(_captures(0.25), theirs),
  }
  report = outcome.build(
      parts=parts,
      certificates={
          "ours": _certificate(unresolved), "reference": _certificate()
      },
      explanation=_explanation(follows),
      combine=named_combines.named("transformers_grouped_mm"),
      ours={"portable": ours, "native": ours},
      reference={"portable": theirs, "native": theirs},
      prompts=_PROMPTS,
      decode=_decode,
      top_k=2,
      packed=packed,
  )
  return {
      **report,
      "environment": ENVIRONMENT,
      "request": {"combine": "transformers_grouped_mm", "decode_steps": 1,
                  "arithmetics": ["portable", "native"]},
      "identity": {"model": "qwen3_moe", "checkpoint": "316be42f"},
      "contracts": {"portable": {"name": "portable", "router": {"top_k": 2}}},
      "reference": {"backend": "transformers", "transformers": "5.24.0"},
      "paths": {"checkpoint": "checkpoints/tiny", "prompts": None},
      "timing": {"ours, portable": 43.092, "reference, portable": 18.045},
  }


def conformant() -> dict:
  """Portable the same bits, native within its rules."""
  return _build(0.0, "transformers_grouped_mm")


def not_conformant() -> dict:
  """The combine of layer 1 differs, which another contract explains."""
  return _build(0.25, "transformers_eager")


def unproven() -> dict:
  """The same bits, but two uncertain elements were left open."""
  return _build(0.0, "transformers_grouped_mm", unresolved=2)


def missing_tap() -> dict:
  """One tap is on one side only."""
  ours, theirs = _captures(), _captures()
  for one in theirs:
    del one.steps[0].taps["layers.0.moe.experts.combine"]
  comparison = compare.compare(ours, theirs)
  report = conformant()
  built = outcome.build(
      parts={"portable": outcome.Part(comparison, comparison.levels())},
      certificates={},
      explanation=None,
      combine=named_combines.named("transformers_grouped_mm"),
      ours={"portable": ours},
      reference={"portable": theirs},
      prompts=_PROMPTS,
      decode=_decode,
      top_k=2,
  )
  return {**report, **built}


def degenerate() -> dict:
  """No explanation, no native run, no taps, no numbers, nothing added."""
  empty = {"decisions": 0, "boundary_ties": 0, "smallest": None,
           "percent_1": None, "percent_10": None, "median": None}
  return {
      "schema": outcome.SCHEMA,
      "verdict": verdict.UNSUPPORTED,
      "exit_code": 4,
      "arithmetics": {
          "portable": {
              "levels": dict.fromkeys(verdict.LEVELS, verdict.UNSUPPORTED),
              "first_difference": None,
              "missing": [],
              "causes": [],
              "taps": [],
              "trajectories": [],
              "margins": {"routers": [], "tokens": empty},
              "rules": dict.fromkeys(verdict.LEVELS, "same bits"),
          }
      },
      "certificates": {},
      "explanation": None,
      "prompts": [],
  }


def packed(faults=()) -> dict:
  """As `conformant`, of packed experts that ran packed."""
  report = _build(
      0.0, "transformers_grouped_mm", packed=_packed(faults)
  )
  report["reference"] |= {
      "weights": "made wide", "widened_modules": 6,
      "packed_words_digest": "11aa", "wide_weights_digest": "22bb",
  }
  return report


def packed_wide() -> dict:
  """The same values, of a decoder that did not run packed."""
  return packed(["layer 0, step 1: <b>23</b> of 24 elements"])


def large(layers: int = 48) -> dict:
  """As `not_conformant`, of many layers."""
  report = copy.deepcopy(not_conformant())
  for part in report["arithmetics"].values():
    inside = [t for t in part["taps"] if t["layer"] == 1]
    part["taps"] = [
        part["taps"][0],
        *({**t, "layer": layer} for layer in range(layers) for t in inside),
        part["taps"][-1],
    ]
    router = part["margins"]["routers"][0]
    part["margins"]["routers"] = [
        {**router, "layer": layer} for layer in range(layers)
    ]
  return report
