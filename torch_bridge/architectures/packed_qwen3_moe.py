"""What a comparison must know of our decoder over a packed AWQ folder.

Not a row of a table: its contract depends on the folder's packing and on how
the packed experts are to run.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Iterator
import contextlib
import functools
import pathlib
from typing import Any

from moejax.contracts import decoder as decoder_contract
from moejax.contracts import ops
from moejax.contracts import packed_moe
from moejax.contracts import refusal
from moejax.modules import config as config_lib
from moejax.modules import decoder as decoder_lib
from moejax.numerics.packed import packed_ops
from torch_bridge.architectures import ours
from torch_bridge.hf.awq import config as awq_config
from torch_bridge.hf.awq import loader
from torch_bridge.hf.awq import wide
from torch_bridge.hf import hf_config
from torch_bridge import request as request_lib


def architecture(
    folder: pathlib.Path,
    experts: request_lib.PackedExperts,
    layer: ops.PackedLayer | None = None,
) -> ours.Architecture:
  """Returns the architecture of a packed folder.

  Args:
    folder: With a quantization_config.
    experts: How its experts run.
    layer: Runs the packed layer, for "marlin" alone; None is the oracle.

  Raises:
    HarnessError: config.json is damaged or not understood, or a layer is given
      and nothing would run it.
    UnsupportedError: the packing is another than AWQ's.
  """
  if layer is not None and experts.experts != "marlin":
    raise refusal.HarnessError(
        f"the packed layer of {layer.name!r} runs under experts='marlin' alone,"
        f" and experts is {experts.experts!r}."
    )
  _, awq = awq_config.read(folder)
  layer = layer or packed_ops.OracleLayer()
  return ours.Architecture(
      hf_config.MODEL_TYPE,
      read=lambda folder: awq_config.read(folder)[0],
      parameters=lambda checkpoint, config: loader.load(checkpoint).params,
      contract=functools.partial(_contract, awq.group_size, experts),
      build=decoder_lib.Decoder,
      operations=functools.partial(packed_ops.operations, layer=layer),
      bounds=packed_ops.bounds,
      reference=_reference,
      packed_layer=layer.name if experts.experts == "marlin" else "jax",
  )


def _contract(
    group_size: int,
    experts: request_lib.PackedExperts,
    arithmetic: str,
    config: config_lib.DecoderConfig,
    combine: Any,
    graph: str,
) -> packed_moe.PackedDecoderContract:
  ours.check_graph(hf_config.MODEL_TYPE, graph, ("transformers",))
  plain = getattr(decoder_contract, arithmetic)(
      config_lib.router_contract(config), combine
  )
  if experts.experts == "dequantized":
    return packed_moe.dequantized_decoder(
        plain, dtype=config.dtype, group_size=group_size
    )
  try:
    marlin = packed_moe.marlin(
        dtype=config.dtype,
        thread_k=experts.thread_k,
        thread_n=experts.thread_n,
        grid=experts.grid,
        group_size=group_size,
    )
  except ValueError as error:
    raise refusal.UnsupportedError(
        f"no Marlin contract for this checkpoint or these tiles: {error}"
    ) from error
  return packed_moe.marlin_decoder(plain, marlin)


@contextlib.contextmanager
def _reference(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, dict]]:
  with wide.folder(folder) as made:
    yield made.folder, made.describe()
