"""A small Qwen3-MoE checkpoint made from a seed and a text.

Why this file exists: experiments and tests need a mixture-of-experts model
that loads like a published one, routes its tokens to many experts and does not
repeat itself, yet is small enough to ship. Trained weights are not needed for
that. Weights drawn with the right spread are enough.

The idea is to draw every weight from integers only, so that the file is the
same on every machine and no maths library has a say in it. One raw 64-bit word
of a PCG64 stream gives four 16-bit integers; their sum, centred, is close to a
normal variable; an integer multiplier and a power of two bring it to its
spread; and one rounding to bfloat16 ends it. Each tensor's stream is seeded by
the tensor's name, so the order of drawing changes nothing.
"""

import hashlib
import json
import math
import pathlib
import shutil
import tempfile

import ml_dtypes
import numpy as np
import safetensors.numpy

from experiments import tiny_tokenizer

SEED = 20260722
SHIPPED = pathlib.Path(__file__).parent / "checkpoints" / "tiny_qwen3_moe"

# Written by hand. They live in the shipped folder and are copied from there.
SOURCES = ("README.md", "corpus.txt", "prompts.json")
GENERATED = (
  "config.json",
  "generation_config.json",
  "model.safetensors",
  "tokenizer.json",
  "tokenizer_config.json",
)

_NUM_LAYERS = 4
_HIDDEN = 64
_NUM_HEADS = 4
_NUM_KV_HEADS = 2
_HEAD_DIM = 32
_NUM_EXPERTS = 16
_EXPERT_HIDDEN = 32
_MAX_LENGTH = 1024

# The sum of four 16-bit integers has this mean, and a standard deviation of
# about 37837.
_MEAN_SUM = 4 * 65535 // 2
_SHIFT = 22

# (centre, multiplier) of each kind of tensor. A weight is
# centre + multiplier * (sum - _MEAN_SUM) / 2**_SHIFT, so a multiplier of 111
# means a standard deviation of about one. As long as the numerator stays below
# 2**24, float32 holds the value exactly and bfloat16 rounds it once. Among
# multipliers of about the same size, these make the six shipped prompts go on
# without an exact tie of the two best tokens and without control characters.
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
    "vocab_size": tiny_tokenizer.VOCAB_SIZE,
    "bos_token_id": tiny_tokenizer.END_OF_TEXT_ID,
    "eos_token_id": tiny_tokenizer.END_OF_TEXT_ID,
    "pad_token_id": tiny_tokenizer.PAD_ID,
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
    "model.embed_tokens.weight": (tiny_tokenizer.VOCAB_SIZE, _HIDDEN),
    "model.norm.weight": (_HIDDEN,),
    "lm_head.weight": (tiny_tokenizer.VOCAB_SIZE, _HIDDEN),
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
  key = int.from_bytes(hashlib.sha256(name.encode()).digest(), "big")
  # The raw stream is taken, not Generator.integers: NumPy promises never to
  # change a bit generator's stream, but makes no such promise for the methods
  # of Generator.
  stream = np.random.PCG64(np.random.SeedSequence([seed, key]))
  words = stream.random_raw(math.prod(shape))
  total = np.zeros(words.shape, np.int64)
  for shift in (0, 16, 32, 48):
    total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
  numerator = int(centre * 2**_SHIFT) + multiplier * (total - _MEAN_SUM)
  value = numerator.astype(np.float32) * np.float32(2.0**-_SHIFT)
  return value.astype(ml_dtypes.bfloat16).reshape(shape)


def make(out: pathlib.Path, seed: int = SEED) -> dict[str, object]:
  """Makes the checkpoint folder, whole or not at all.

  Everything is written into a temporary sibling of the folder, which takes the
  folder's place at the end. An older checkpoint is moved aside for that and
  deleted only after the new one is in place.

  Args:
    out: The folder to make. It may be absent, empty, or an earlier result.
    seed: The seed of the weights, not negative.

  Returns:
    The summary, schema "make_checkpoint/1": the folder, the number of
    parameters and the SHA-256 of the files that decide what the model says.

  Raises:
    ValueError: If the folder holds anything that this function did not write.
  """
  out = out.resolve()
  _check_replaceable(out)
  out.parent.mkdir(parents=True, exist_ok=True)
  # The folder itself is made inside, because a temporary directory is private
  # to its owner and a checkpoint is not.
  with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as d:
    fresh, old = pathlib.Path(d) / "fresh", pathlib.Path(d) / "old"
    fresh.mkdir()
    num_parameters = _write(fresh, seed)
    digests = {
      name: hashlib.sha256((fresh / name).read_bytes()).hexdigest()
      for name in ("model.safetensors", "tokenizer.json", "config.json")
    }
    if out.exists():
      out.rename(old)
    try:
      fresh.rename(out)
    except BaseException:
      # Leaving this block deletes whatever still lies in it.
      if old.exists():
        old.rename(out)
      raise
  return {
    "schema": "make_checkpoint/1",
    "out": str(out),
    "num_parameters": num_parameters,
    "sha256": digests,
  }


def _check_replaceable(out: pathlib.Path) -> None:
  """Raises ValueError unless the folder may be replaced.

  The names alone do not tell, since every checkpoint has a config.json. The
  hand-written files do: a folder is an earlier result only if it carries them
  unchanged.
  """
  if not out.exists():
    return
  if not out.is_dir():
    raise ValueError(f"{out} exists and is not a folder")
  entries = sorted(out.iterdir())
  known = {*SOURCES, *GENERATED}
  foreign = [
    e.name for e in entries
    if e.name not in known or e.is_symlink() or not e.is_file()
  ]
  if entries:
    foreign += [
      name for name in SOURCES
      if name not in foreign
      and not _same_content(out / name, SHIPPED / name)
    ]
  if foreign:
    raise ValueError(
      f"{out} holds files of another origin, or lacks files that an earlier "
      f"result would hold: {foreign}"
    )


def _same_content(left: pathlib.Path, right: pathlib.Path) -> bool:
  """Returns whether both are files with the same bytes."""
  if not left.is_file() or not right.is_file():
    return False
  return left.read_bytes() == right.read_bytes()


def _write(folder: pathlib.Path, seed: int) -> int:
  """Writes all files into an empty folder; returns the parameter count."""
  for name in SOURCES:
    shutil.copyfile(SHIPPED / name, folder / name)
  text = (SHIPPED / "corpus.txt").read_bytes().decode("utf-8")
  (folder / "tokenizer.json").write_bytes(tiny_tokenizer.train(text).encode())
  documents = {
    "config.json": config(),
    "generation_config.json": {
      "do_sample": False,
      "bos_token_id": tiny_tokenizer.END_OF_TEXT_ID,
      "eos_token_id": tiny_tokenizer.END_OF_TEXT_ID,
      "pad_token_id": tiny_tokenizer.PAD_ID,
    },
    "tokenizer_config.json": tiny_tokenizer.tokenizer_config(_MAX_LENGTH),
  }
  for name, document in documents.items():
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    (folder / name).write_bytes(text.encode())
  tensors = {
    name: draw(name, shape, seed) for name, shape in tensor_shapes().items()
  }
  # save_file would do, but it makes the file private to its owner.
  content = safetensors.numpy.save(tensors, metadata={"format": "pt"})
  (folder / "model.safetensors").write_bytes(content)
  return sum(tensor.size for tensor in tensors.values())
