"""One optimisation step of an unmodified transformers model.

The loss is the model's own (`labels=`), the backward pass autograd's, the
optimiser torch's; a dispatch mode carries their operations out in portable
arithmetic. Hooks on the outputs and inputs of the model's modules keep the
cotangents that our decoder's taps have too.

Layer: torch_bridge.
"""

from collections.abc import Iterator
import contextlib

import numpy as np
import torch

from moejax.contracts.gradients import optimizer
from moejax.modules import config as config_lib
from moejax.protocols.gradients import our_step
from torch_bridge.gradients import backward_mode
from torch_bridge.hf import parameter_map
from torch_bridge import tensor_bits
from torch_bridge import torch_reference

# Module below a layer -> our tap of its output, its input.
_OUTPUTS = {
    "input_layernorm": "input_norm.output",
    "post_attention_layernorm": "mlp_norm.output",
    "mlp.experts": "moe.experts.combine",
    **{f"self_attn.{p}_proj": f"attention.{p}_proj" for p in "qkvo"},
    **{f"self_attn.{p}_norm": f"attention.{p}_norm.output" for p in "qk"},
    **{f"mlp.{p}_proj": f"mlp.{p}_proj" for p in ("gate", "up", "down")},
}
_INPUTS = {
    "post_attention_layernorm": "after_attention",
    "self_attn.o_proj": "attention.values",
}
_TOP = {
    "lm_head": "logits",
    "model.norm": "final_norm.output",
    "model.embed_tokens": "embed",
}


def run(
    reference: torch_reference.TransformersReference,
    config: config_lib.DecoderConfig,
    tokens: np.ndarray,
    step: optimizer.FirstStep,
    mode: backward_mode.BackwardMode,
    seed: float = 1.0,
) -> our_step.Record:
  """Forward, backward, one step; the model's parameters change.

  Args:
    reference: The model; its parameters must have config.dtype.
    config: Our config of the same model.
    tokens: [batch, token] ints.
    step: The optimiser.
    mode: Portable arithmetic.
    seed: Cotangent of the loss.
  """
  model = reference.model
  ids = torch.from_numpy(np.ascontiguousarray(tokens, np.int64))
  watch = _Watch(config, reference.experts_implementation)
  optimiser = _optimiser(model.parameters(), step)
  with reference.tables("portable", mode.oracle), watch.following(model), mode:
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward(torch.tensor(seed, dtype=torch.float32))
    named = dict(model.named_parameters())
    gradients = {
        name: tensor_bits.to_numpy(p.grad) for name, p in named.items()
    }
    optimiser.step()
  updated = {name: tensor_bits.to_numpy(p) for name, p in named.items()}
  rows = parameter_map.table(config, "stacked")
  return our_step.Record(
      tensor_bits.to_numpy(loss),
      watch.cotangents(),
      {row.path: gradients[row.names[0]].reshape(row.shape) for row in rows},
      {row.path: updated[row.names[0]].reshape(row.shape) for row in rows},
  )


def cast_parameters(model: torch.nn.Module, dtype: str) -> None:
  """Rounds every parameter to a dtype; buffers stay as they are."""
  for parameter in model.parameters():
    parameter.data = parameter.data.to(getattr(torch, dtype))


def _optimiser(parameters, step):
  if step.kind == "sgd":
    return torch.optim.SGD(parameters, lr=step.rate, foreach=False)
  return torch.optim.AdamW(
      parameters,
      lr=step.rate,
      betas=(step.beta1, step.beta2),
      eps=step.epsilon,
      weight_decay=step.decay,
      foreach=False,
      fused=False,
  )


class _Watch:
  """Keeps cotangents at the borders of modules, under our names."""

  def __init__(self, config, implementation):
    self._config = config
    self._implementation = implementation
    self._whole: dict[str, np.ndarray] = {}
    # {(layer, "silu" or "gate"): {number of the call: rows}}.
    self._pieces: dict[tuple[int, str], dict[int, np.ndarray]] = {}
    self._calls: dict[int, int] = {}
    self._ids: dict[int, np.ndarray] = {}

  @contextlib.contextmanager
  def following(self, model: torch.nn.Module) -> Iterator[None]:
    """Hooks the modules while the context is open."""
    modules, handles = dict(model.named_modules()), []
    for name, tap in _TOP.items():
      handles.append(self._output(modules[name], tap))
    for index in range(self._config.num_layers):
      at = f"model.layers.{index}"
      handles.append(self._output(modules[at], f"layers.{index}.output"))
      for name, tap in _OUTPUTS.items():
        if f"{at}.{name}" in modules:
          module = modules[f"{at}.{name}"]
          handles.append(self._output(module, f"layers.{index}.{tap}"))
      for name, tap in _INPUTS.items():
        module = modules[f"{at}.{name}"]
        handles.append(self._input(module, f"layers.{index}.{tap}"))
      if index in self._config.sparse_layers:
        handles += self._sparse(modules, at, index)
    try:
      yield
    finally:
      for handle in handles:
        handle.remove()

  def cotangents(self) -> dict[str, np.ndarray]:
    """{tap: array}; rows of experts in our order, [token, slot, ...]."""
    out = dict(self._whole)
    for (layer, part), pieces in self._pieces.items():
      ids = self._ids[layer]
      rows = np.concatenate([pieces[call] for call in sorted(pieces)])
      order = _order(ids, self._implementation)
      placed = np.empty_like(rows)
      placed[order] = rows
      name = f"layers.{layer}.moe.experts.{part}"
      out[name] = placed.reshape(*ids.shape, -1)
    return out

  def _keep(self, tensor, tap):
    def hook(g):
      self._whole[tap] = tensor_bits.to_numpy(g)

    tensor.register_hook(hook)

  def _output(self, module, tap):
    def hook(module, args, output):
      del module, args
      self._keep(output, tap)

    return module.register_forward_hook(hook)

  def _input(self, module, tap):
    def hook(module, args, kwargs):
      del module
      self._keep(args[0] if args else kwargs["hidden_states"], tap)

    return module.register_forward_pre_hook(hook, with_kwargs=True)

  def _sparse(self, modules, at, layer):
    config = self._config
    gates = "normalized" if config.dtype == "float32" else "gates"

    def router(module, args, output):
      del module, args
      logits, scores, ids = output
      self._keep(logits, f"layers.{layer}.moe.router.logits")
      if config.normalize_gates or config.dtype != "float32":
        self._keep(scores, f"layers.{layer}.moe.router.{gates}")
      self._ids[layer] = tensor_bits.to_numpy(ids)

    def activation(module, args, output):
      del module
      call = self._calls[layer] = self._calls.get(layer, -1) + 1
      self._keep_piece(layer, "gate", call, args[0])
      self._keep_piece(layer, "silu", call, output)

    return [
        modules[f"{at}.mlp.gate"].register_forward_hook(router),
        modules[f"{at}.mlp.experts.act_fn"].register_forward_hook(activation),
    ]

  def _keep_piece(self, layer, part, call, tensor):
    def hook(g):
      pieces = self._pieces.setdefault((layer, part), {})
      pieces[call] = tensor_bits.to_numpy(g)

    tensor.register_hook(hook)


def _order(ids, implementation) -> np.ndarray:
  """The route (token * top_k + slot) of each row that an experts' MLP sees."""
  tokens, top_k = ids.shape
  route = np.arange(tokens * top_k).reshape(tokens, top_k)
  if implementation == "batched_mm":
    return route.reshape(-1)
  if implementation == "grouped_mm":
    return np.argsort(ids.reshape(-1), kind="stable")
  by_slot = ids.T.reshape(-1)  # Eager: one expert at a time, slot by slot.
  return route.T.reshape(-1)[np.argsort(by_slot, kind="stable")]
