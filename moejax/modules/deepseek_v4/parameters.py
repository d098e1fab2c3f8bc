"""The parameters of a DeepSeek-V4 decoder: names, shapes, dtypes.

Layer: modules.
"""

from moejax.modules.deepseek_v4 import config as config_lib

Leaf = tuple[tuple[int, ...], str]


def leaves(config: config_lib.DeepseekV4Config) -> dict[str, Leaf]:
  """Returns {dotted path: (shape, dtype)} of every parameter, in order.

  Norm weights, hyper-connections, sinks, position biases and the selection
  bias are float32; hash tables are int32; the rest has the config's dtype.
  A matrix is [output, input].
  """
  c = config
  out: dict[str, Leaf] = {}

  def matrix(path, *shape):
    out[path] = (shape, c.dtype)

  def wide(path, *shape):
    out[path] = (shape, "float32")

  def compressor(path, series, dim, rate):
    matrix(f"{path}.kv_proj", series * dim, c.embed)
    matrix(f"{path}.gate_proj", series * dim, c.embed)
    wide(f"{path}.position_bias", rate, series * dim)
    wide(f"{path}.norm", dim)

  matrix("embedding", c.vocab_size, c.embed)
  mixes = (2 + c.streams) * c.streams
  for i, kind in enumerate(c.attentions):
    at = f"layers.{i}"
    for site in ("attention_hc", "moe_hc"):
      wide(f"{at}.{site}.fn", mixes, c.streams * c.embed)
      wide(f"{at}.{site}.base", mixes)
      wide(f"{at}.{site}.scale", 3)
    wide(f"{at}.input_norm", c.embed)
    attention = f"{at}.attention"
    matrix(f"{attention}.q_a_proj", c.query_rank, c.embed)
    wide(f"{attention}.q_a_norm", c.query_rank)
    matrix(f"{attention}.q_b_proj", c.num_heads * c.head_dim, c.query_rank)
    matrix(f"{attention}.kv_proj", c.head_dim, c.embed)
    wide(f"{attention}.kv_norm", c.head_dim)
    wide(f"{attention}.sinks", c.num_heads)
    matrix(
        f"{attention}.o_a_proj",
        c.output_groups * c.output_rank,
        c.num_heads * c.head_dim // c.output_groups,
    )
    matrix(f"{attention}.o_b_proj", c.embed, c.output_groups * c.output_rank)
    if kind != config_lib.SWA:
      series = 2 if kind == config_lib.CSA else 1
      compressor(f"{attention}.compressor", series, c.head_dim, c.rate(i))
    if kind == config_lib.CSA:
      indexer = f"{attention}.indexer"
      compressor(f"{indexer}.compressor", 2, c.index_dim, c.rate(i))
      matrix(f"{indexer}.q_b_proj", c.index_heads * c.index_dim, c.query_rank)
      matrix(f"{indexer}.weights_proj", c.index_heads, c.embed)
    wide(f"{at}.mlp_norm", c.embed)
    moe = f"{at}.moe"
    matrix(f"{moe}.router", c.num_experts, c.embed)
    if i in c.hash_layers:
      out[f"{moe}.table"] = ((c.vocab_size, c.top_k), "int32")
    else:
      wide(f"{moe}.bias", c.num_experts)
    matrix(f"{moe}.gate_up", c.num_experts, 2 * c.expert_hidden, c.embed)
    matrix(f"{moe}.down", c.num_experts, c.embed, c.expert_hidden)
    for name, shape in (
        ("gate_proj", (c.expert_hidden, c.embed)),
        ("up_proj", (c.expert_hidden, c.embed)),
        ("down_proj", (c.embed, c.expert_hidden)),
    ):
      matrix(f"{moe}.shared.{name}", *shape)
  wide("head_hc.fn", c.streams, c.streams * c.embed)
  wide("head_hc.base", c.streams)
  wide("head_hc.scale", 1)
  wide("final_norm", c.embed)
  matrix("lm_head", c.vocab_size, c.embed)
  return out
