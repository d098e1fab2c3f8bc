"""Which clause of our contract and the reference's differ at a tap.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from moejax.contracts import decoder as decoder_contract
from moejax.contracts import document
from moejax.contracts import named_combines
from moejax.contracts import packed_moe
from moejax.modules import config as config_lib
from moejax.protocols import capture as capture_lib
from moejax.protocols import graph_clause
from moejax.protocols.packed import clause as packed_clause
from torch_bridge import subject as subject_lib


class Clauses:
  """Of one comparison.

  Args:
    subject: Our side.
    contracts: {arithmetic: our contract}.
    graph: Name of our graph.
    reference: Says what it is (`describe`), and the contract that it ran under
      if it was one of ours (`contract`).
    ours: {arithmetic: our captures}; may fill after this is made.
  """

  def __init__(
      self,
      subject: subject_lib.Subject,
      contracts: Mapping[str, Any],
      graph: str,
      reference: Any,
      ours: Mapping[str, Sequence[capture_lib.Capture]],
  ):
    self._subject = subject
    self._contracts = contracts
    self._graph = graph
    self._reference = reference
    self._ours = ours

  def at(self, arithmetic: str, tap: str) -> str:
    """Names the clause that differs at a tap; empty if none does."""
    if self._subject.is_packed:
      return packed_clause.clause(tap, self.packed(arithmetic))
    if self._graph == "transformers":
      return ""
    combine = self._contracts["portable"].combine
    theirs = self._subject.contracts(combine, "transformers")["portable"]
    return graph_clause.clause(tap, self._contracts["portable"], theirs)

  def packed(self, arithmetic: str) -> dict[str, tuple[str, str]]:
    """{clause: (ours, the reference's)} of those that differ.

    Empty as well if it is not known what the reference ran under.
    """
    theirs = self._theirs(arithmetic)
    if theirs is None:
      return {}
    work = self.work(arithmetic)
    return packed_clause.differing(self._contracts[arithmetic], theirs, work)

  def work(self, arithmetic: str) -> packed_clause.Work:
    """The GEMMs that our packed experts ran."""
    config = self._subject.config
    return packed_clause.work(self._ours[arithmetic], config)

  def _theirs(self, arithmetic: str) -> packed_clause.Contract | None:
    """What a capsule of ours says, or wide experts under their own combine."""
    stored = self._reference.contract(arithmetic)
    if stored is not None:
      return document.from_dict(packed_moe.PackedDecoderContract, stored)
    config = self._subject.config
    kind = self._reference.describe().get("experts_implementation")
    if kind is None:
      return None
    combine = named_combines.at_dtype(
        named_combines.named(f"transformers_{kind}"), config.dtype
    )
    make = getattr(decoder_contract, arithmetic)
    return make(config_lib.router_contract(config), combine)
