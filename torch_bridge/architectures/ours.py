"""What a comparison must know of each of our decoders, one table row each.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import dataclasses
import pathlib
from typing import Any

from moejax.contracts import decoder as decoder_contract
from moejax.contracts import deepseek_v4 as deepseek_v4_contract
from moejax.contracts import refusal
from moejax.modules import config as qwen3_moe
from moejax.modules import decoder as qwen3_moe_decoder
from moejax.modules.deepseek_v4 import config as deepseek_v4
from moejax.modules.deepseek_v4 import decoder as deepseek_v4_decoder
from moejax.numerics.portable import bound_ops
from moejax.numerics import reference_ops
from torch_bridge.hf import checkpoint as checkpoint_lib
from torch_bridge.hf.deepseek_v4 import config as deepseek_v4_hf_config
from torch_bridge.hf.deepseek_v4 import parameter_map as deepseek_v4_map
from torch_bridge.hf import hf_config
from torch_bridge.hf import json_file
from torch_bridge.hf import parameter_map


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
  """One `model_type` of config.json.

  Attributes:
    model_type: Its name.
    read: A folder to our config.
    parameters: (checkpoint, config) to {dotted path: array}.
    contract: (arithmetic, config, combine contract, name of a graph) to the
      decoder's contract.
    build: (config, nested parameters, contract, operations) to a decoder.
    operations: (contract, certificate) to the operations that execute it.
    bounds: Makes the operations whose results are error bounds.
    reference: A folder to a context that gives (the folder that the reference
      loads, what its weights are if they are not the checkpoint's, as JSON).
    packed_layer: Who runs packed experts; empty where none are packed.
  """

  model_type: str
  read: Callable[[pathlib.Path], Any]
  parameters: Callable[[checkpoint_lib.Checkpoint, Any], Mapping[str, Any]]
  contract: Callable[[str, Any, Any, str], Any]
  build: Callable[[Any, Mapping, Any, Any], Any]
  operations: Callable[[Any, Any], Any] = reference_ops.operations
  bounds: Callable[[], Any] = bound_ops.BoundOperations
  reference: Callable[[pathlib.Path], Any] = (
      lambda folder: contextlib.nullcontext((folder, {}))
  )
  packed_layer: str = ""

  def load(
      self, checkpoint: checkpoint_lib.Checkpoint
  ) -> tuple[Any, Mapping[str, Any]]:
    """Returns (config, {dotted path: array}); HarnessError as the readers."""
    config = self.read(checkpoint.folder)
    return config, self.parameters(checkpoint, config)

  def decoder(self, config, params, contract, operations) -> Any:
    """Returns a decoder over flat parameters.

    Raises:
      UnsupportedError: the decoder cannot run under the contract.
    """
    nested = qwen3_moe_decoder.nest(params)
    try:
      return self.build(config, nested, contract, operations)
    except (ValueError, NotImplementedError) as error:
      raise refusal.UnsupportedError(
          f"no {self.model_type} decoder under this contract: {error}"
      ) from error


def of(folder: pathlib.Path) -> Architecture:
  """Returns the row of the architecture that a folder's config.json names.

  Raises:
    HarnessError: there is no config.json, it is damaged, or this project has
      no decoder of that architecture.
  """
  path = folder / hf_config.FILE
  model_type = json_file.read_object(path).get("model_type")
  for row in _TABLE:
    if row.model_type == model_type:
      return row
  known = ", ".join(row.model_type for row in _TABLE)
  raise refusal.HarnessError(
      f"{path}: model_type={model_type!r}; this project has decoders of"
      f" {known}."
  )


def _qwen3_moe_contract(arithmetic, config, combine, graph):
  check_graph("qwen3_moe", graph, ("transformers",))
  make = getattr(decoder_contract, arithmetic)
  return make(qwen3_moe.router_contract(config), combine)


def _deepseek_v4_contract(arithmetic, config, combine, graph):
  check_graph("deepseek_v4", graph, deepseek_v4_contract.GRAPH_NAMES)
  chosen = deepseek_v4_contract.graph_named(graph)
  router = deepseek_v4.router_contract(config)
  if chosen is not deepseek_v4_contract.TRANSFORMERS:
    router = deepseek_v4_contract.deepseek_reference(
        arithmetic, config.top_k, config.gate_scale
    ).router
  return deepseek_v4_contract.of(arithmetic, router, combine, chosen)


def check_graph(model_type: str, graph: str, known: tuple[str, ...]) -> None:
  """Raises HarnessError unless an architecture has a graph of that name."""
  if graph not in known:
    raise refusal.HarnessError(
        f"{model_type} has no graph {graph!r}, only {', '.join(known)}."
    )


_TABLE = (
    Architecture(
        hf_config.MODEL_TYPE,
        hf_config.read,
        parameter_map.load_parameters,
        _qwen3_moe_contract,
        qwen3_moe_decoder.Decoder,
    ),
    Architecture(
        deepseek_v4_hf_config.MODEL_TYPE,
        deepseek_v4_hf_config.read,
        deepseek_v4_map.load_parameters,
        _deepseek_v4_contract,
        deepseek_v4_decoder.Decoder,
    ),
)
