"""DeepSeek-V4's config.json to DeepseekV4Config and back.

Two dialects say the same in other fields:

  upstream                      as transformers saves it
  compress_ratios (0, 4, 128)   layer_types, compress_rates {type: rate}
  num_hash_layers               mlp_layer_types
  qk_rope_head_dim              partial_rotary_factor
  rope_theta                    rope_parameters.main
  compress_rope_theta,          rope_parameters.compress
  rope_scaling (flat)

A field of either may be there; two that say the same thing must agree. Every
field is translated, fixed, harmless or refused by name (`field_list`). Sizes,
layer kinds, the gate factor, the limit of SwiGLU and the compressed base have
no default: those of transformers are of one model, and those of the upstream
reference are others.

compress_ratios may go on past the decoder's layers, for
blocks that predict further tokens.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Mapping
import pathlib
from typing import Any

from moejax.contracts import refusal
from moejax.modules.deepseek_v4 import config as config_lib
from torch_bridge.hf import field_list
from torch_bridge.hf import json_file
from torch_bridge.hf.deepseek_v4 import rope_fields

MODEL_TYPE = "deepseek_v4"
FILE = "config.json"

_ARCHITECTURE = "DeepseekV4ForCausalLM"
_TYPES = {
    config_lib.SWA: "sliding_attention",
    config_lib.CSA: "compressed_sparse_attention",
    config_lib.HCA: "heavily_compressed_attention",
}
_KINDS = {theirs: ours for ours, theirs in _TYPES.items()}
# Upstream's ratio names the kind of a layer.
_RATIOS = {0: config_lib.SWA, 4: config_lib.CSA, 128: config_lib.HCA}
_ROUTES = ("hash_moe", "moe")
# Our name -> theirs.
_SIZES = {
    "vocab_size": "vocab_size",
    "embed": "hidden_size",
    "num_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "query_rank": "q_lora_rank",
    "window": "sliding_window",
    "output_groups": "o_groups",
    "output_rank": "o_lora_rank",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "index_top_k": "index_topk",
    "num_experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "expert_hidden": "moe_intermediate_size",
    "streams": "hc_mult",
    "sinkhorn_iterations": "hc_sinkhorn_iters",
    "max_positions": "max_position_embeddings",
}
_NUMBERS = {
    "gate_scale": "routed_scaling_factor",
    "swiglu_limit": "swiglu_limit",
    "hyper_epsilon": "hc_eps",
    "norm_epsilon": "rms_norm_eps",
}
_FIXED = {
    **field_list.FIXED,
    "attention_bias": (False,),
    "expert_dtype": ("fp4", "fp8", None),
    "mlp_bias": (False,),
    "n_shared_experts": (1,),
    "norm_topk_prob": (True,),
    "num_key_value_heads": (1,),
    "router_jitter_noise": (0.0,),
    "scoring_func": ("sqrtsoftplus",),
    "tie_word_embeddings": (False,),
    "topk_method": ("noaux_tc",),
}
# How weights are stored. Only the tensors decide how they are read; a config
# that speaks of another format is refused all the same.
_QUANTIZATION = {
    "activation_scheme": ("dynamic",),
    "expert_dtype": ("fp4", "fp8", None),
    "fmt": ("e4m3",),
    "quant_method": ("fp8",),
    "scale_fmt": ("ue8m0",),
    "weight_block_size": ([128, 128],),
}
_KNOWN = frozenset((
    *field_list.HARMLESS,
    *_SIZES.values(),
    *_NUMBERS.values(),
    *rope_fields.FIELDS,
    "architectures",
    "compress_rate_csa",
    "compress_rate_hca",
    "compress_rates",
    "compress_ratios",
    "dtype",
    "layer_types",
    "mlp_layer_types",
    "model_type",
    "num_hash_layers",
    "num_hidden_layers",
    "num_nextn_predict_layers",
    "quantization_config",
    "torch_dtype",
))


def read(folder: str | pathlib.Path) -> config_lib.DeepseekV4Config:
  """Returns the config of a folder, from its config.json.

  Raises:
    refusal.HarnessError: the file is absent, damaged or refused by `from_hf`.
  """
  path = pathlib.Path(folder) / FILE
  return from_hf(json_file.read_object(path), str(path))


def from_hf(
    config_json: dict[str, Any], origin: str = FILE
) -> config_lib.DeepseekV4Config:
  """Translates a config in either dialect.

  Args:
    config_json: The object in config.json.
    origin: Names the file in messages.

  Raises:
    refusal.HarnessError: another architecture; a field that is missing,
      unknown, of the wrong type, or whose value our decoder does not compute;
      two fields that contradict each other.
  """
  try:
    field_list.check(
        config_json,
        model_type=MODEL_TYPE,
        architecture=_ARCHITECTURE,
        fixed=_FIXED,
        known=_KNOWN,
    )
    _check_quantization(config_json.get("quantization_config"))
    return _translate(config_json)
  except (ValueError, NotImplementedError) as error:
    raise refusal.HarnessError(f"{origin}: {error}") from error


def to_hf(config: config_lib.DeepseekV4Config) -> dict[str, Any]:
  """Returns the config.json of a decoder, as transformers saves it."""
  return {
      "architectures": [_ARCHITECTURE],
      "model_type": MODEL_TYPE,
      "dtype": config.dtype,
      "num_hidden_layers": config.num_layers,
      **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
      **{theirs: getattr(config, ours) for ours, theirs in _NUMBERS.items()},
      "num_key_value_heads": 1,
      "n_shared_experts": 1,
      "layer_types": [_TYPES[kind] for kind in config.attentions],
      "mlp_layer_types": [
          _ROUTES[layer not in config.hash_layers]
          for layer in range(config.num_layers)
      ],
      "compress_rates": {
          _TYPES[config_lib.CSA]: config.csa_rate,
          _TYPES[config_lib.HCA]: config.hca_rate,
      },
      **rope_fields.to_hf(config),
      "hidden_act": "silu",
      "scoring_func": "sqrtsoftplus",
      "norm_topk_prob": True,
      "attention_bias": False,
      "mlp_bias": False,
      "tie_word_embeddings": False,
      "num_nextn_predict_layers": 0,
  }


def _check_quantization(stored: Any) -> None:
  if stored is None:
    return
  if not isinstance(stored, dict):
    raise ValueError(f"quantization_config={stored!r} is not an object.")
  for name, value in stored.items():
    legal = _QUANTIZATION.get(name, ())
    if value not in legal:
      raise ValueError(
          f"quantization_config: {name}={value!r} is not supported; supported:"
          f" {legal[0] if legal else sorted(_QUANTIZATION)!r}."
      )


def _translate(fields: dict[str, Any]) -> config_lib.DeepseekV4Config:
  """Builds the config from fields that have all been looked at."""
  num_layers = json_file.integer(fields, "num_hidden_layers")
  sizes = {ours: json_file.integer(fields, key) for ours, key in _SIZES.items()}
  csa_rate, hca_rate = _rates(fields)
  numbers = {o: json_file.number(fields, key) for o, key in _NUMBERS.items()}
  if numbers["swiglu_limit"] <= 0:
    raise ValueError(f"swiglu_limit={numbers['swiglu_limit']} leaves nothing.")
  return config_lib.DeepseekV4Config(
      **sizes,
      **numbers,
      attentions=_attentions(fields, num_layers),
      hash_layers=_hash_layers(fields, num_layers),
      csa_rate=csa_rate,
      hca_rate=hca_rate,
      **rope_fields.from_hf(
          fields, sizes["max_positions"], sizes["head_dim"]
      ),
      dtype=field_list.either(fields, "dtype", "torch_dtype", json_file.text),
  )


def _list(fields, name: str, words: Mapping | tuple) -> list | None:
  """Returns a list whose entries are all known, or None."""
  values = fields.get(name)
  if values is None:
    return None
  # type(True) is bool: the ratio 0 is not false.
  if not isinstance(values, list) or any(
      type(v) not in (int, str) or v not in words for v in values
  ):
    raise ValueError(f"{name}={values!r} is not a list of {sorted(words)}.")
  return values


def _attentions(fields, num_layers: int) -> tuple[str, ...]:
  types = _list(fields, "layer_types", _KINDS)
  ratios = _list(fields, "compress_ratios", _RATIOS)
  if ratios is not None:
    if len(ratios) < num_layers:
      raise ValueError(
          f"compress_ratios has {len(ratios)} entries for num_hidden_layers="
          f"{num_layers}."
      )
    ratios = tuple(_RATIOS[ratio] for ratio in ratios[:num_layers])
  if types is not None:
    _check_length("layer_types", types, num_layers)
    types = tuple(_KINDS[name] for name in types)
  return field_list.agreed(
      "the attention of each layer",
      {"layer_types": types, "compress_ratios": ratios},
  )


def _hash_layers(fields, num_layers: int) -> tuple[int, ...]:
  types = _list(fields, "mlp_layer_types", _ROUTES)
  first = None
  if types is not None:
    _check_length("mlp_layer_types", types, num_layers)
    types = tuple(i for i, name in enumerate(types) if name == "hash_moe")
  if fields.get("num_hash_layers") is not None:
    count = json_file.integer(fields, "num_hash_layers")
    if not 0 <= count <= num_layers:
      raise ValueError(
          f"num_hash_layers={count} is not within num_hidden_layers="
          f"{num_layers}."
      )
    first = tuple(range(count))
  return field_list.agreed(
      "the layers routed by token id",
      {"mlp_layer_types": types, "num_hash_layers": first},
  )


def _check_length(name: str, values: list, num_layers: int) -> None:
  if len(values) != num_layers:
    raise ValueError(
        f"{name} has {len(values)} entries for num_hidden_layers={num_layers}."
    )


def _rates(fields) -> tuple[int, int]:
  """Tokens of one compressed entry in CSA and HCA layers."""
  rates = fields.get("compress_rates")
  if rates is None:
    rates = {}
  if not isinstance(rates, dict) or not {*rates} <= {*_KINDS}:
    raise ValueError(f"compress_rates={rates!r} does not map layer types.")
  found = []
  for kind, ratio in ((config_lib.CSA, 4), (config_lib.HCA, 128)):
    single = f"compress_rate_{kind}"
    said = {
        f"compress_rates.{_TYPES[kind]}": rates.get(_TYPES[kind]),
        single: fields.get(single),
    }
    for name in said:
      if said[name] is not None:
        json_file.integer(said, name)
    if not any(v is not None for v in said.values()):
      said[single] = ratio
    found.append(field_list.agreed(f"the rate of {kind} layers", said))
  return found[0], found[1]
