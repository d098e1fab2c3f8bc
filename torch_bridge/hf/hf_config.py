"""Hugging Face's config.json to DecoderConfig and back.

A config decides arithmetic, so every field of it must have been looked at:
a field is translated, or must have the one value that our decoder computes,
or is on the list of those that take no part in a forward pass. Anything else
is refused by name (`field_list`).

Both spellings are read: rope_theta with rope_scaling, and rope_parameters;
torch_dtype and dtype; num_experts and num_local_experts. A default is that of
transformers; sizes have none here, because transformers would fill in those
of one particular model.

Layer: torch_bridge. Needs no torch.
"""

import pathlib
from typing import Any

from moejax.contracts import refusal
from moejax.modules import config as config_lib
from torch_bridge.hf import field_list
from torch_bridge.hf import json_file
from torch_bridge.hf import rope_config

MODEL_TYPE = "qwen3_moe"
FILE = "config.json"

_ARCHITECTURE = "Qwen3MoeForCausalLM"
# Our name -> theirs. Sizes without which there is no model.
_SIZES = {
    "vocab_size": "vocab_size",
    "embed": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "expert_hidden": "moe_intermediate_size",
    "top_k": "num_experts_per_tok",
}
# Fields that are legal with these values only: what our decoder computes.
_FIXED = {
    **field_list.FIXED,
    "quantization_config": (None,),
    "shared_expert_intermediate_size": (0, None),
    "use_qk_norm": (True,),
    "qkv_bias": (False,),
}
# Translated, or read by no forward pass in inference. max_window_layers is one
# of the latter: this architecture slides the window in all layers or in none.
_KNOWN = frozenset((
    *field_list.HARMLESS,
    "max_window_layers",
    *_SIZES.values(),
    *rope_config.FIELDS,
    "architectures",
    "attention_bias",
    "decoder_sparse_step",
    "dtype",
    "head_dim",
    "max_position_embeddings",
    "mlp_only_layers",
    "model_type",
    "norm_topk_prob",
    "num_experts",
    "num_local_experts",
    "rms_norm_eps",
    "sliding_window",
    "tie_word_embeddings",
    "torch_dtype",
    "use_sliding_window",
))


def read(folder: str | pathlib.Path) -> config_lib.DecoderConfig:
  """Returns the config of a folder, from its config.json.

  Raises:
    refusal.HarnessError: the file is absent, damaged or refused by `from_hf`.
  """
  path = pathlib.Path(folder) / FILE
  return from_hf(json_file.read_object(path), str(path))


def from_hf(
    config_json: dict[str, Any], origin: str = FILE
) -> config_lib.DecoderConfig:
  """Translates a Hugging Face config.

  Args:
    config_json: The object in config.json.
    origin: Names the file in messages.

  Raises:
    refusal.HarnessError: another architecture; a field that is missing,
      unknown, of the wrong type, or whose value our decoder does not compute.
  """
  try:
    field_list.check(
        config_json,
        model_type=MODEL_TYPE,
        architecture=_ARCHITECTURE,
        fixed=_FIXED,
        known=_KNOWN,
    )
    return _translate(config_json)
  except (ValueError, NotImplementedError) as error:
    raise refusal.HarnessError(f"{origin}: {error}") from error


def to_hf(config: config_lib.DecoderConfig) -> dict[str, Any]:
  """Returns the config.json of a decoder, in the spelling all versions read."""
  return {
      "architectures": [_ARCHITECTURE],
      "model_type": MODEL_TYPE,
      "dtype": config.dtype,
      **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
      "head_dim": config.head_dim,
      "num_experts": config.num_experts,
      "norm_topk_prob": config.normalize_gates,
      "decoder_sparse_step": 1,
      "mlp_only_layers": [
          i for i in range(config.num_layers) if i not in config.sparse_layers
      ],
      "hidden_act": "silu",
      "rms_norm_eps": config.norm_epsilon,
      **rope_config.to_hf(config),
      "max_position_embeddings": config.max_positions,
      "tie_word_embeddings": config.tied_embeddings,
      "attention_bias": config.attention_bias,
      "use_sliding_window": config.sliding_window is not None,
      "sliding_window": config.sliding_window,
  }


def _translate(fields: dict[str, Any]) -> config_lib.DecoderConfig:
  """Builds the config from fields that have all been looked at."""
  sizes = {ours: json_file.integer(fields, key) for ours, key in _SIZES.items()}
  num_experts = field_list.either(
      fields, "num_experts", "num_local_experts", json_file.integer
  )
  if fields.get("head_dim") is None:
    fields = {
        **fields,
        "head_dim": sizes["embed"] // max(sizes["num_heads"], 1),
    }
  max_positions = json_file.integer(fields, "max_position_embeddings", 32768)
  theta, scaling = rope_config.from_hf(fields, max_positions)
  window = None
  if json_file.boolean(fields, "use_sliding_window", False):
    if fields.get("sliding_window", 4096) is not None:
      window = json_file.integer(fields, "sliding_window", 4096)
  return config_lib.DecoderConfig(
      **sizes,
      head_dim=json_file.integer(fields, "head_dim"),
      num_experts=num_experts,
      normalize_gates=json_file.boolean(fields, "norm_topk_prob", False),
      sparse_layers=_sparse_layers(fields, sizes["num_layers"], num_experts),
      norm_epsilon=json_file.number(fields, "rms_norm_eps", 1e-6),
      rope_theta=theta,
      rope_scaling=scaling,
      max_positions=max_positions,
      tied_embeddings=json_file.boolean(fields, "tie_word_embeddings", False),
      attention_bias=json_file.boolean(fields, "attention_bias", False),
      sliding_window=window,
      dtype=field_list.either(fields, "dtype", "torch_dtype", json_file.text),
  )


def _sparse_layers(fields, num_layers: int, num_experts: int):
  """The layers that have experts, by transformers' rule."""
  step = json_file.integer(fields, "decoder_sparse_step", 1)
  if step < 1:
    raise ValueError(f"decoder_sparse_step={step} is below 1.")
  dense = fields.get("mlp_only_layers") or []
  if not isinstance(dense, list) or not all(type(i) is int for i in dense):
    raise ValueError(f"mlp_only_layers={dense!r} is not a list of layers.")
  return tuple(
      i
      for i in range(num_layers)
      if i not in dense and num_experts > 0 and (i + 1) % step == 0
  )
