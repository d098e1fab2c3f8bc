"""Hugging Face's config.json to DecoderConfig and back.

A config decides arithmetic, so every field of it must have been looked at:
a field is translated, or must have the one value that our decoder computes,
or is on the list of those that take no part in a forward pass. Anything else
is refused by name. transformers ignores what it does not know; a field that it
learns to read tomorrow would change bits without a word.

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
from torch_bridge.hf import json_file
from torch_bridge.hf import rope_config

MODEL_TYPE = "qwen3_moe"
FILE = "config.json"

_ARCHITECTURES = (None, ["Qwen3MoeForCausalLM"])
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
    "hidden_act": ("silu",),
    "quantization_config": (None,),
    "shared_expert_intermediate_size": (0, None),
    "use_qk_norm": (True,),
    "qkv_bias": (False,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
}
# Fields that no forward pass in inference reads. max_window_layers is one of
# them: this architecture slides the window in all layers or in none.
_HARMLESS = frozenset((
    "_commit_hash",
    "_name_or_path",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "max_window_layers",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "sep_token_id",
    "tokenizer_class",
    "torchscript",
    "transformers_version",
    "use_cache",
    # How tokens are chosen; transformers drops these when it reads a config.
    "do_sample",
    "length_penalty",
    "max_length",
    "min_length",
    "num_beams",
    "num_return_sequences",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
))
_TRANSLATED = frozenset((
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
    _check_fields(config_json)
    return _translate(config_json)
  except (ValueError, NotImplementedError) as error:
    raise refusal.HarnessError(f"{origin}: {error}") from error


def to_hf(config: config_lib.DecoderConfig) -> dict[str, Any]:
  """Returns the config.json of a decoder, in the spelling all versions read."""
  return {
      "architectures": ["Qwen3MoeForCausalLM"],
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


def _check_fields(fields: dict[str, Any]) -> None:
  """Refuses other architectures and fields that nobody has looked at."""
  model_type = fields.get("model_type")
  if model_type != MODEL_TYPE:
    raise ValueError(
        f"model_type {model_type!r} is not supported; supported: {MODEL_TYPE}."
    )
  if fields.get("architectures") not in _ARCHITECTURES:
    raise ValueError(
        f"architectures={fields['architectures']} is not supported;"
        f" supported: {_ARCHITECTURES[1]}."
    )
  for name, value in fields.items():
    if name in _FIXED:
      if value not in _FIXED[name]:
        raise ValueError(
            f"{name}={value!r} is not supported; supported:"
            f" {_FIXED[name][0]!r}."
        )
    elif name not in _TRANSLATED and name not in _HARMLESS:
      raise ValueError(
          f"{name}={value!r} is a field that is not known here; it may change"
          " the arithmetic."
      )


def _translate(fields: dict[str, Any]) -> config_lib.DecoderConfig:
  """Builds the config from fields that have all been looked at."""
  sizes = {ours: json_file.integer(fields, key) for ours, key in _SIZES.items()}
  num_experts = _either(
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
      dtype=_either(fields, "dtype", "torch_dtype", json_file.text),
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


def _either(fields, first: str, second: str, read_field):
  """Reads a field that has two spellings."""
  present = [k for k in (first, second) if fields.get(k) is not None]
  values = [read_field(fields, key) for key in present or [first]]
  if values[0] != values[-1]:
    raise ValueError(f"{first}={values[0]!r} but {second}={values[1]!r}.")
  return values[0]
