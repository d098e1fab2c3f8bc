"""Every field of a config is looked at, or the config is refused.

transformers ignores what it does not know; a field that it learns to read
tomorrow would change bits without a word. So each architecture lists the fields
that it translates, those that may have one value only, and those that take no
part in a forward pass; anything else is refused by name.

Layer: torch_bridge. Needs no torch.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from typing import Any

# Fields that no forward pass in inference reads, whatever the architecture.
HARMLESS = frozenset((
    "_commit_hash",
    "_name_or_path",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
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
# Fields of every config that would change what is computed.
FIXED = {
    "hidden_act": ("silu",),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
}


def check(
    fields: Mapping[str, Any],
    *,
    model_type: str,
    architecture: str,
    fixed: Mapping[str, tuple],
    known: Collection[str],
) -> None:
  """Refuses other architectures and fields that nobody has looked at.

  Args:
    fields: The object in config.json.
    model_type: The only one that is supported.
    architecture: The class that `architectures` may name, alone.
    fixed: {field: its legal values}; the first is shown as the supported one.
    known: Fields that are translated or take no part.

  Raises:
    ValueError: the config is of another model, or has a field or a value that
      is not listed; the message has its name and value.
  """
  found = fields.get("model_type")
  if found != model_type:
    raise ValueError(
        f"model_type {found!r} is not supported; supported: {model_type}."
    )
  if fields.get("architectures") not in (None, [architecture]):
    raise ValueError(
        f"architectures={fields['architectures']} is not supported;"
        f" supported: {[architecture]}."
    )
  for name, value in fields.items():
    if name in fixed:
      # Not `in`: True == 1, and 1 is neither true nor false.
      if not any(_same(value, legal) for legal in fixed[name]):
        raise ValueError(
            f"{name}={value!r} is not supported; supported:"
            f" {fixed[name][0]!r}."
        )
    elif name not in known:
      raise ValueError(
          f"{name}={value!r} is a field that is not known here; it may change"
          " the arithmetic."
      )


def either(
    fields: Mapping[str, Any],
    first: str,
    second: str,
    read_field: Callable[[Mapping[str, Any], str], Any],
) -> Any:
  """Reads a field that has two spellings, which must not contradict.

  Raises:
    ValueError: neither is there, they differ, or one has another type.
  """
  present = [k for k in (first, second) if fields.get(k) is not None]
  values = [read_field(fields, key) for key in present or [first]]
  if values[0] != values[-1]:
    raise ValueError(f"{first}={values[0]!r} but {second}={values[1]!r}.")
  return values[0]


def agreed(what: str, said: dict[str, Any]) -> Any:
  """Returns what the fields that are there say; they must say the same.

  Args:
    what: What they speak of, for the message.
    said: {field: what it says, or None if it is not there}.

  Raises:
    ValueError: no field is there, or two say different things.
  """
  said = {name: value for name, value in said.items() if value is not None}
  if not said:
    raise ValueError(f"{what} is missing.")
  (first, value), *others = said.items()
  for name, other in others:
    if other != value:
      raise ValueError(
          f"{what}: {first} says {value!r}, but {name} says {other!r}."
      )
  return value


def _same(value: Any, legal: Any) -> bool:
  return value == legal and isinstance(value, bool) == isinstance(legal, bool)
