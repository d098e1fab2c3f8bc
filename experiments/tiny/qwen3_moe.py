"""A small Qwen3-MoE checkpoint made from a seed and a text.

Why this file exists: experiments and tests need a mixture-of-experts model
that loads like a published one, routes its tokens to many experts and does not
repeat itself, yet is small enough to ship. Trained weights are not needed for
that. Weights drawn with the right spread are enough.

How they are drawn is in `tiny/seeded_weights.py`, how the folder is made in
`tiny/checkpoint_folder.py`.
"""

import pathlib

import numpy as np

from experiments.tiny import checkpoint_folder
from experiments.tiny import seeded_weights
from experiments.tiny import tokenizer

SEED = 20260722
SHIPPED = pathlib.Path(__file__).parents[1] / "checkpoints" / "tiny_qwen3_moe"

# Written by hand. They live in the shipped folder and are copied from there.
SOURCES = ("README.md", "corpus.txt", "prompts.json")
CORPUS = SHIPPED / "corpus.txt"

_NUM_LAYERS = 4
_HIDDEN = 64
_NUM_HEADS = 4
_NUM_KV_HEADS = 2
_HEAD_DIM = 32
_NUM_EXPERTS = 16
_EXPERT_HIDDEN = 32
_MAX_LENGTH = 1024

# (centre, multiplier) of each kind of tensor; a multiplier of 111 means a
# standard deviation of about one. Among multipliers of about the same size,
# these make the six shipped prompts go on without an exact tie of the two best
# tokens and without control characters.
_LAWS = {
  # Small against what the layers add (the residual stream grows from 0.5 to
  # 3), so that the whole context and not only the last token decides the next
  # one. Otherwise greedy text falls into loops.
  "embed_tokens": (0.0, 53),
  # Logits of spread four: the best token leads the second by about one.
  "lm_head": (0.0, 56),
  "norm": (1.0, 11),
  "input_layernorm": (1.0, 11),
  "post_attention_layernorm": (1.0, 11),
  # Queries and keys are normalised per head, so these two, and not q_proj and
  # k_proj, decide how sharp attention is. A centre of one is nearly flat.
  "q_norm": (1.5, 11),
  "k_norm": (1.5, 11),
  "q_proj": (0.0, 14),
  "k_proj": (0.0, 14),
  "v_proj": (0.0, 14),
  "o_proj": (0.0, 14),
  # The router: logits of spread 1.2, so that all experts have their tokens.
  "gate": (0.0, 17),
  "gate_proj": (0.0, 21),
  "up_proj": (0.0, 21),
  "down_proj": (0.0, 33),
}


def config() -> dict[str, object]:
  """Builds what config.json says.

  Returns:
    A JSON-serialisable dict. The rope base stands in the classic form, which
    transformers 4 and 5 both read.
  """
  return {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": tokenizer.VOCAB_SIZE,
    "bos_token_id": tokenizer.END_OF_TEXT_ID,
    "eos_token_id": tokenizer.END_OF_TEXT_ID,
    "pad_token_id": tokenizer.PAD_ID,
    "num_hidden_layers": _NUM_LAYERS,
    "hidden_size": _HIDDEN,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "num_attention_heads": _NUM_HEADS,
    "num_key_value_heads": _NUM_KV_HEADS,
    "head_dim": _HEAD_DIM,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_position_embeddings": _MAX_LENGTH,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    # No layer is dense, so nothing has this size, but readers expect it.
    "intermediate_size": 96,
    "moe_intermediate_size": _EXPERT_HIDDEN,
    "num_experts": _NUM_EXPERTS,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
    "tie_word_embeddings": False,
    "use_cache": True,
  }


def tensor_shapes() -> dict[str, tuple[int, ...]]:
  """Lists the tensors, one per expert and projection.

  Returns:
    The shape of every tensor by its name in model.safetensors. A matrix is
    [outputs, inputs], a norm weight is [width].
  """
  queries = _NUM_HEADS * _HEAD_DIM
  keys = _NUM_KV_HEADS * _HEAD_DIM
  shapes: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (tokenizer.VOCAB_SIZE, _HIDDEN),
    "model.norm.weight": (_HIDDEN,),
    "lm_head.weight": (tokenizer.VOCAB_SIZE, _HIDDEN),
  }
  for layer in range(_NUM_LAYERS):
    prefix = f"model.layers.{layer}."
    shapes |= {
      f"{prefix}input_layernorm.weight": (_HIDDEN,),
      f"{prefix}post_attention_layernorm.weight": (_HIDDEN,),
      f"{prefix}self_attn.q_proj.weight": (queries, _HIDDEN),
      f"{prefix}self_attn.k_proj.weight": (keys, _HIDDEN),
      f"{prefix}self_attn.v_proj.weight": (keys, _HIDDEN),
      f"{prefix}self_attn.o_proj.weight": (_HIDDEN, queries),
      f"{prefix}self_attn.q_norm.weight": (_HEAD_DIM,),
      f"{prefix}self_attn.k_norm.weight": (_HEAD_DIM,),
      f"{prefix}mlp.gate.weight": (_NUM_EXPERTS, _HIDDEN),
    }
    for expert in range(_NUM_EXPERTS):
      stem = f"{prefix}mlp.experts.{expert}."
      shapes |= {
        f"{stem}gate_proj.weight": (_EXPERT_HIDDEN, _HIDDEN),
        f"{stem}up_proj.weight": (_EXPERT_HIDDEN, _HIDDEN),
        f"{stem}down_proj.weight": (_HIDDEN, _EXPERT_HIDDEN),
      }
  return shapes


def draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
  """Draws one tensor.

  Args:
    name: The tensor's name, which decides both its stream and its spread.
    shape: The tensor's shape.
    seed: The checkpoint's seed, not negative.

  Returns:
    The weights, bfloat16[*shape].

  Raises:
    ValueError: If the name belongs to no kind of tensor known here.
  """
  kind = name.removesuffix(".weight").split(".")[-1]
  if kind not in _LAWS:
    raise ValueError(f"tensor {name!r} is of kind {kind!r}, not {list(_LAWS)}")
  centre, multiplier = _LAWS[kind]
  return seeded_weights.draw(name, shape, seed, _LAWS[kind])


def make(out: pathlib.Path, seed: int = SEED) -> dict[str, object]:
  """Makes the checkpoint folder, whole or not at all.

  Args:
    out: The folder to make. It may be absent, empty, or an earlier result.
    seed: The seed of the weights, not negative.

  Returns:
    The summary of `checkpoint_folder.make`.

  Raises:
    ValueError: If the folder holds anything that this function did not write.
  """
  tensors = {
    name: draw(name, shape, seed) for name, shape in tensor_shapes().items()
  }
  sources = [SHIPPED / name for name in SOURCES]
  return checkpoint_folder.make(out, sources, config(), tensors, CORPUS)
