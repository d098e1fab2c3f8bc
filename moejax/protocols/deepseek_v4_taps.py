"""The names of observed activations of a DeepSeek-V4 decoder, and their axes.

The rules are those of `taps.py`, which merges this table into its own. A name
that both architectures use has the same axes in both.

Layer: protocols. Axes: contracts/axes.py.
"""

_TURNS = ("times_cos", "times_sin", "sum", "rounded")
_TABLES = (
    "angle",
    "cosine",
    "cosine_scaled",
    "sine",
    "sine_scaled",
    "cos",
    "sin",
)


def _norm(prefix: str, rows: str, width: str) -> dict[str, str]:
  """A norm with a float32 weight: one rounding at the end."""
  one, whole = f"{rows},one", f"{rows},{width}"
  return {
      f"{prefix}.square": whole,
      f"{prefix}.mean": one,
      f"{prefix}.plus_epsilon": one,
      f"{prefix}.rsqrt": one,
      f"{prefix}.normalized": whole,
      f"{prefix}.weighted": whole,
      f"{prefix}.output": whole,
  }


def _bare_norm(prefix: str, rows: str, width: str) -> dict[str, str]:
  """A norm without a weight; its factor is rounded before it multiplies."""
  one, whole = f"{rows},one", f"{rows},{width}"
  return {
      f"{prefix}.square": whole,
      f"{prefix}.mean": one,
      f"{prefix}.plus_epsilon": one,
      f"{prefix}.rsqrt": one,
      f"{prefix}.rounded": one,
      f"{prefix}.output": whole,
  }


def _turn(prefix: str, rows: str) -> dict[str, str]:
  """The rotation of the trailing channels."""
  return {f"{prefix}.{n}": f"{rows},rotary_dim" for n in _TURNS}


def _tables(prefix: str, rows: str) -> dict[str, str]:
  return {f"{prefix}.{n}": f"{rows},half_dim" for n in _TABLES}


def _collapse(prefix: str) -> dict[str, str]:
  return {
      f"{prefix}.pre_scaled": "token,stream",
      f"{prefix}.pre_shifted": "token,stream",
      f"{prefix}.pre_sigmoid": "token,stream",
      f"{prefix}.pre": "token,stream",
      f"{prefix}.weighted": "token,stream,embed",
      f"{prefix}.summed": "token,embed",
      f"{prefix}.collapsed": "token,embed",
  }


def _hyper(prefix: str) -> dict[str, str]:
  """A hyper-connection in front of a block, in order of execution."""
  collapse = list(_collapse(prefix).items())
  square = "token,stream,stream_out"
  return {
      **_bare_norm(f"{prefix}.norm", "token", "stream_embed"),
      f"{prefix}.mixes": "token,mix",
      **dict(collapse[:4]),
      f"{prefix}.post_scaled": "token,stream",
      f"{prefix}.post_shifted": "token,stream",
      f"{prefix}.post_sigmoid": "token,stream",
      f"{prefix}.post": "token,stream",
      f"{prefix}.comb_scaled": square,
      f"{prefix}.comb_shifted": square,
      f"{prefix}.comb_softmax": square,
      f"{prefix}.comb_plus_epsilon": square,
      f"{prefix}.sinkhorn": "token,round,stream,stream_out",
      **dict(collapse[4:]),
  }


def _mix(prefix: str) -> dict[str, str]:
  """A hyper-connection behind a block; its sum is the streams' own tap."""
  return {
      f"{prefix}.post": "token,stream",
      f"{prefix}.expanded": "token,stream,embed",
      f"{prefix}.comb": "token,stream,stream_out",
      f"{prefix}.mixed": "token,stream,embed",
  }


def _compressor(prefix: str) -> dict[str, str]:
  pool = "window,series_row,head_dim"
  return {
      f"{prefix}.kv_proj": "token,hidden",
      f"{prefix}.gate_proj": "token,hidden",
      f"{prefix}.scores": "window,row,hidden",
      f"{prefix}.softmax": pool,
      f"{prefix}.weights": pool,
      f"{prefix}.products": pool,
      f"{prefix}.pooled": "window,head_dim",
      **_norm(f"{prefix}.norm", "window", "head_dim"),
      **_tables(f"{prefix}.rotary", "window"),
      **_turn(f"{prefix}.turn", "window"),
  }


TAPS: dict[str, str] = {
    "positions": "token",
    "embed": "token,embed",
    "rotary.main.inverse_frequencies": "half_dim",
    "rotary.compress.inverse_frequencies": "half_dim",
    **_tables("rotary.main", "token"),
    **_tables("rotary.compress", "token"),
    **_hyper("attention_hc"),
    **_norm("input_norm", "token", "embed"),
    "attention.q_a_proj": "token,hidden",
    **_norm("attention.q_a_norm", "token", "hidden"),
    "attention.q_b_proj": "token,hidden",
    **_bare_norm("attention.q_b_norm", "token,head", "head_dim"),
    **_turn("attention.q_turn", "token,head"),
    "attention.kv_proj": "token,head_dim",
    **_norm("attention.kv_norm", "token", "head_dim"),
    **_turn("attention.kv_turn", "token"),
    "attention.state_kv": "token,head_dim",
    **_compressor("attention.compressor"),
    **_compressor("attention.indexer.compressor"),
    "attention.indexer.q_b_proj": "token,hidden",
    **_turn("attention.indexer.q_turn", "token,head"),
    "attention.indexer.scores": "token,head,entry",
    "attention.indexer.scaled": "token,head,entry",
    "attention.indexer.weights_proj": "token,head",
    "attention.indexer.weights": "token,head",
    "attention.indexer.weighted": "token,head,entry",
    "attention.indexer.index_scores": "token,entry",
    "attention.indexer.visible": "token,entry",
    **{
        f"attention.{name}": "head,token,key"
        for name in ("scores", "scaled", "masked")
    },
    "attention.shifted": "head,token,key_and_sink",
    "attention.softmax_with_sink": "head,token,key_and_sink",
    "attention.probabilities": "head,token,key",
    "attention.values": "token,head,head_dim",
    **_turn("attention.output_turn", "token,head"),
    "attention.o_a_proj": "group,token,rank",
    "attention.o_b_proj": "token,embed",
    **_mix("attention_mix"),
    "streams_after_attention": "token,stream,embed",
    **_hyper("moe_hc"),
    **_norm("mlp_norm", "token", "embed"),
    "moe.router.logits": "token,expert",
    "moe.router.softplus": "token,expert",
    "moe.router.scores": "token,expert",
    "moe.router.biased": "token,expert",
    "moe.router.ids": "token,slot",
    "moe.router.gate_sum": "token,one",
    "moe.router.gate_sum_shifted": "token,one",
    "moe.router.normalized": "token,slot",
    "moe.router.gates": "token,slot",
    "moe.experts.gate_up": "token,slot,two_hidden",
    "moe.experts.silu": "token,slot,hidden",
    "moe.experts.activation": "token,slot,hidden",
    "moe.experts.gated_activation": "token,slot,hidden",
    "moe.experts.down": "token,slot,embed",
    "moe.experts.terms": "token,slot,embed",
    "moe.experts.combine": "token,embed",
    "moe.shared.gate_proj": "token,hidden",
    "moe.shared.up_proj": "token,hidden",
    "moe.shared.silu": "token,hidden",
    "moe.shared.activation": "token,hidden",
    "moe.shared.down_proj": "token,embed",
    "moe.sum": "token,embed",
    **_mix("moe_mix"),
    "streams": "token,stream,embed",
    **_bare_norm("head_hc.norm", "token", "stream_embed"),
    "head_hc.mixes": "token,stream",
    **_collapse("head_hc"),
    **_norm("final_norm", "token", "embed"),
    "logits": "token,vocab",
}


def _index(prefix: str, rows: str) -> dict[str, str]:
  """Simulated quantisation of an indexer's queries or keys."""
  steps = ("hadamard_sum", "hadamard_scaled", "hadamard", "quantized")
  return {f"{prefix}.{name}": f"{rows},head_dim" for name in steps}


def _wide_mix(prefix: str) -> dict[str, str]:
  """What a mix in float32 shows beside or in the place of `_mix`."""
  return {
      f"{prefix}.weighted": "token,stream,stream_out,embed",
      f"{prefix}.summed": "token,stream,embed",
  }


_BLOCKS = "token,head,attended_block"
# What graphs other than that of transformers show beside it.
VARIANT_TAPS: dict[str, str] = {
    "attention_hc.projected": "token,mix",
    "attention.input_quantized": "token,embed",
    "attention.q_a_quantized": "token,hidden",
    "attention.kv_quantized": "token,head_dim",
    "attention.compressor.pooled_rounded": "window,head_dim",
    "attention.compressor.quantized": "window,head_dim",
    "attention.indexer.compressor.pooled_rounded": "window,head_dim",
    **_index("attention.indexer.compressor", "window"),
    **_index("attention.indexer.q_simulation", "token,head"),
    "attention.online.scores": "token,head,attended",
    "attention.online.scaled": "token,head,attended",
    "attention.online.shifted": "token,head,attended",
    "attention.online.exponentials": "token,head,attended",
    "attention.online.sums": _BLOCKS,
    "attention.online.rounded": "token,head,attended",
    "attention.online.values": f"{_BLOCKS},head_dim",
    "attention.online.moved": _BLOCKS,
    "attention.online.rescale": _BLOCKS,
    "attention.online.denominators": _BLOCKS,
    "attention.online.accumulated": f"{_BLOCKS},head_dim",
    "attention.online.sink_shifted": "token,head,one",
    "attention.online.sink_exponential": "token,head,one",
    "attention.online.denominator": "token,head,one",
    "attention.online.divided": "token,head,head_dim",
    "attention.o_a_quantized": "token,hidden",
    **_wide_mix("attention_mix"),
    "moe_hc.projected": "token,mix",
    "moe.experts.input_quantized": "token,slot,embed",
    "moe.experts.activation_rounded": "token,slot,hidden",
    "moe.experts.activation_quantized": "token,slot,hidden",
    "moe.shared.input_quantized": "token,embed",
    "moe.shared.activation_rounded": "token,hidden",
    "moe.shared.activation_quantized": "token,hidden",
    **_wide_mix("moe_mix"),
    "head_hc.projected": "token,stream",
}
