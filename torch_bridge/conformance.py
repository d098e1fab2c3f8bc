"""Is our decoder the same model as the reference, and if not, where not?

The library behind `experiments/conformance.py`, for notebooks as well:

  outcome = conformance.run(conformance.Request(checkpoint="..."))
  outcome.report["verdict"]

In portable arithmetic every operation of both sides has one right answer, so
bits are compared and the rule is equality. In native arithmetic three rules
with a source decide (`protocols.native_rules`). A capsule takes the reference's
place where the reference cannot run.

Layer: torch_bridge.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import pathlib
import time

from moejax.contracts import combine as combine_contract
from moejax.contracts import document
from moejax.contracts import named_combines
from moejax.contracts import ops
from moejax.contracts import refusal
from moejax.contracts import verdict
from moejax.numerics.portable import certificate as certificate_lib
from moejax.protocols import capture as capture_lib
from moejax.protocols import compare
from moejax.protocols import explain
from moejax.protocols import native_rules
from moejax.protocols import outcome as outcome_lib
from moejax.protocols.packed import proof
from moejax.protocols import selections
from moejax.protocols import trajectory
from torch_bridge.architectures import clauses
from torch_bridge import capsule_reference
from torch_bridge.hf import tokenizer as tokenizer_lib
from torch_bridge import request as request_lib
from torch_bridge import subject as subject_lib

Request = request_lib.Request
PackedExperts = request_lib.PackedExperts
_WANTED = {
    "all": trajectory.keep_all,
    "boundaries": trajectory.keep_boundaries,
}
Captures = list[capture_lib.Capture]


@dataclasses.dataclass(slots=True)
class Outcome:
  """A report as JSON values, and the captures it rests on.

  Attributes:
    report: See `outcome.build`; "paths" and "timing" are the only parts that
      differ between two equal runs.
    ours: {arithmetic: captures} of our decoder.
    reference: {arithmetic: captures} of the reference.
    identities: {arithmetic: identity} of the captures, for capsules.
    envelope: {(layer, tap): r}, how far the native reference lay from itself
      under other legal orders; empty without native arithmetic.
    not_captured: What the captures leave out, and why.
  """

  report: dict
  ours: dict[str, Captures]
  reference: dict[str, Captures]
  identities: dict[str, dict]
  envelope: dict
  not_captured: dict[str, str]


def run(
    request: Request,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    layer: ops.PackedLayer | None = None,
) -> Outcome:
  """Compares our decoder with a reference.

  Args:
    request: What to compare.
    progress: Called as (stage, forward passes done, of how many).
    layer: Runs the packed expert layer of our decoder; None is the oracle.

  Raises:
    HarnessError: an input is missing, damaged or contradictory.
    UnsupportedError: the reference cannot be run or runs what is not known.
  """
  return _Run(request, progress, layer).outcome()


class _Run:
  """One comparison; keeps what the stages share."""

  def __init__(self, request: Request, progress, layer):
    self.request = request
    self.progress = progress
    self.timing: dict[str, float] = {}
    self.subject = subject_lib.load(request.checkpoint, request.packed, layer)
    dtype = self.subject.config.dtype
    loaded = named_combines.load(request.combine)
    if request.combine in named_combines.NAMES:
      loaded = named_combines.at_dtype(loaded, dtype)
    if loaded.output != dtype:
      raise refusal.HarnessError(
          f"combine {loaded.name} returns {loaded.output}, but the checkpoint"
          f" {request.checkpoint} computes in {dtype}."
      )
    self.contracts = self.subject.contracts(loaded, request.graph)
    # Marlin's experts bring their own.
    self.combine: combine_contract.CombineContract = (
        self.contracts["portable"].combine
    )
    self._decoder("portable")  # Sizes that do not fit are refused first.
    self.weights: dict = {}
    self.reference = self._open_reference()
    self.prompts = self._prompts()
    self.ours: dict[str, Captures] = {}
    self.clauses = clauses.Clauses(
        self.subject, self.contracts, request.graph, self.reference, self.ours
    )
    self.wanted = _WANTED[request.taps]
    self.theirs: dict[str, Captures] = {}
    self.proofs: dict[str, dict] = {}

  def outcome(self) -> Outcome:
    parts, certificates = {}, {}
    for arithmetic in request_lib.ARITHMETICS:
      if arithmetic not in self.request.arithmetics:
        continue
      if arithmetic == "portable":
        parts[arithmetic] = self._portable(certificates)
      else:
        parts[arithmetic] = self._native()
    identities = {
        name: self.subject.identity(
            self.contracts[name], self.request.decode_steps
        )
        for name in parts
    }
    report = outcome_lib.build(
        parts=parts,
        certificates=certificates,
        explanation=self._explain(),
        combine=self.combine,
        ours=self.ours,
        reference=self.theirs,
        prompts=self.prompts,
        decode=self.subject.tokenizer.decode,
        top_k=self.subject.config.top_k,
        clause=self.clauses.at,
        packed=self._packed(),
    )
    report["request"] = dataclasses.asdict(self.request)
    report["request"]["arithmetics"] = list(self.request.arithmetics)
    common = dict(next(iter(identities.values())))
    del common["contract"]
    report["identity"] = {
        **common,
        "contracts": {n: i["contract"] for n, i in identities.items()},
    }
    report["contracts"] = {
        name: document.to_dict(self.contracts[name]) for name in parts
    }
    report["reference"] = {**self.reference.describe(), **self.weights}
    report["paths"] = {
        key: report["request"].pop(key)
        for key in ("checkpoint", "prompts", "reference")
    }
    report["timing"] = {k: round(v, 3) for k, v in self.timing.items()}
    report["combine"] = self.combine.name
    native = parts.get("native")
    return Outcome(
        report,
        self.ours,
        self.theirs,
        identities,
        dict(native.limits) if native else {},
        self._not_captured(),
    )

  def _packed(self) -> dict | None:
    """What proves that packed experts ran packed; None if there are none."""
    if not self.proofs:
      return None
    return proof.document(
        self.proofs,
        {name: self.contracts[name] for name in self.proofs},
        self.subject.architecture.packed_layer,
        {name: self.clauses.packed(name) for name in self.proofs},
    )

  def _not_captured(self) -> dict[str, str]:
    left = {
        "state between steps": "kept as a fingerprint; the final state is kept",
        "padding": "belongs to no sequence",
    }
    if self.request.taps != "all":
      left["single operations"] = f"asked for taps={self.request.taps!r}"
    return left

  # The two arithmetics.

  def _portable(self, certificates) -> outcome_lib.Part:
    mine, certificate = (certificate_lib.Certificate() for _ in range(2))
    theirs = self._reference_run(
        "portable", "portable", certificate=certificate
    )
    decoder = self._decoder("portable", mine)
    ours = self._proven_run("portable", "ours, portable", decoder)
    certificates["ours"] = mine.to_dict()
    certificates["reference"] = (
        self.reference.certificate()
        if isinstance(self.reference, capsule_reference.CapsuleReference)
        else certificate.to_dict()
    )
    self.ours["portable"], self.theirs["portable"] = ours, theirs
    comparison = compare.compare(ours, theirs)
    causes = []
    if comparison.first is not None and self.request.taps == "all":
      replay = self._our_run("ours on their inputs", decoder, given=theirs)
      causes = outcome_lib.causes(compare.compare(replay, theirs))
    return outcome_lib.Part(
        comparison, self._levels(comparison.levels()), causes
    )

  def _native(self) -> outcome_lib.Part:
    theirs = self._reference_run("native", "native")
    limits = self._envelope(theirs)
    decoder = self._decoder("native")
    free = self._our_run(
        "ours, native", decoder, wanted=trajectory.keep_none
    )
    forced = self._proven_run(
        "native",
        "ours, native, their routes",
        decoder,
        given=theirs,
        given_taps=selections.is_selection,
    )
    self.ours["native"], self.theirs["native"] = forced, theirs
    comparison = compare.compare(forced, theirs)
    native_rules.judge_by_envelope(comparison, limits)
    if self.request.taps == "all":
      self._judge_operations(comparison, decoder, theirs)
    exchanges = native_rules.exchanges(forced, theirs, limits)
    native_rules.judge_selections(comparison, exchanges)
    levels = native_rules.levels(comparison, exchanges, free, theirs)
    return outcome_lib.Part(
        comparison,
        self._levels(levels),
        exchanges=exchanges,
        free=free,
        limits=limits,
    )

  def _levels(self, levels: dict[str, str]) -> dict[str, str]:
    """A run that captured no single operations leaves L4 incomplete."""
    if self.request.taps != "all":
      levels["L4"] = verdict.worst([levels["L4"], verdict.MISSING])
    return levels

  def _judge_operations(self, comparison, decoder, theirs) -> None:
    def on_their_inputs(stage, model, **options):
      return self._our_run(stage, model, given=theirs, **options)

    contract = self.contracts["native"]
    native_rules.judge_by_bounds(
        comparison,
        on_their_inputs("native on their inputs", decoder),
        on_their_inputs("portable on their inputs", self._decoder("portable")),
        on_their_inputs(
            "bounds on their inputs",
            self.subject.decoder(contract, self.subject.architecture.bounds()),
            any_dtype=True,
        ),
        theirs,
        self.combine.accumulator,
    )

  # What the stages are made of.

  def _open_reference(self):
    folder = self.request.capsule
    if folder is not None:
      return capsule_reference.CapsuleReference(folder, self.subject)
    try:
      from torch_bridge import torch_reference  # pylint: disable=g-import-not-at-top
    except ImportError as error:
      raise refusal.UnsupportedError(
          f"the reference 'transformers' cannot be imported here: {error}."
      ) from error
    with (
        self._timed("load reference"),
        self.subject.reference_weights() as (folder, self.weights),
    ):
      return torch_reference.TransformersReference(
          folder, self.request.experts_implementation
      )

  def _prompts(self) -> list[trajectory.Prompt]:
    path, reference = self.request.prompts, self.reference
    if path is None and isinstance(
        reference, capsule_reference.CapsuleReference
    ):
      return reference.prompts(
          self.request.arithmetics[0], self.request.decode_steps
      )
    if path is None:
      path = pathlib.Path(self.request.checkpoint) / "prompts.json"
      if not path.is_file():
        raise refusal.HarnessError(
            f"no prompts given, and {path} does not exist."
        )
    texts = tokenizer_lib.read_prompts(path)
    return self.subject.prompts(texts, self.request.decode_steps)

  def _decoder(self, arithmetic, certificate=None):
    contract = self.contracts[arithmetic]
    return self.subject.decoder(
        contract,
        self.subject.architecture.operations(contract, certificate),
    )

  def _proven_run(self, arithmetic, stage, decoder, **options) -> Captures:
    """Our run; counts what came from packed weights, if some should have."""
    before = proof.gemms(decoder)
    captures = self._our_run(stage, decoder, **options)
    if self.subject.is_packed:
      self.proofs[arithmetic] = proof.prove(
          decoder, captures, self.subject.params, before
      )
    return captures

  def _our_run(self, stage, decoder, **options) -> Captures:
    options.setdefault("wanted", self.wanted)
    passes = self.request.decode_steps + 1
    with self._timed(stage):
      return trajectory.run(
          decoder,
          self.prompts,
          self.request.decode_steps,
          progress=self._counter(stage, passes),
          **options,
      )

  def _reference_run(self, arithmetic, stage, **options) -> Captures:
    passes = (self.request.decode_steps + 1) * len(self.prompts)
    with self._timed(f"reference, {stage}"):
      return self.reference.run(
          self.prompts,
          self.request.decode_steps,
          arithmetic=arithmetic,
          wanted=self.wanted,
          progress=self._counter(f"reference, {stage}", passes),
          **options,
      )

  def _envelope(self, theirs: Captures):
    if isinstance(self.reference, capsule_reference.CapsuleReference):
      return self.reference.limits()
    legal = [
        self._reference_run(order, f"{order} along native", given=theirs)
        for order in ("portable", "reversed")
    ]
    return native_rules.envelope(theirs, legal)

  def _explain(self) -> explain.Explanation | None:
    """The combine contract of the reference, from its own operands."""
    for arithmetic, kind in (("portable", "portable"), ("native", "contract")):
      captures = self.theirs.get(arithmetic)
      operands = explain.operands_of(captures) if captures else None
      if operands is not None:
        prefer = self.reference.describe().get("experts_implementation", "")
        return explain.explain(operands, kind, f"transformers_{prefer}")
    return None

  @contextlib.contextmanager
  def _timed(self, stage: str):
    start = time.monotonic()
    yield
    self.timing[stage] = time.monotonic() - start

  def _counter(self, stage: str, passes: int):
    done = 0

    def count():
      nonlocal done
      done += 1
      self.progress(stage, done, passes)

    self.progress(stage, 0, passes)
    return count
