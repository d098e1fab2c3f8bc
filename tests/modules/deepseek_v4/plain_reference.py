"""The graph `deepseek_reference` once more, in plain NumPy.

Written from the specification of DeepSeek-V4 alone; it shares no code with the
decoder and knows no operation sets. One sequence, fed at once. Every array is
float32; a bfloat16 value is a float32 that `r16` leaves alone, so each rounding
is visible. Sums are chains in float32 from +0 over ascending index, the terms
of a GEMM exact products; a function of one value is the float32 next to its
exact value.
"""

import fractions

import mpmath
import numpy as np

F = np.float32
MINUS_INFINITY = F(-np.inf)


def r16(x):
  """float32 to the nearest bfloat16, ties to even; finite values."""
  bits = np.ascontiguousarray(x, F).view(np.uint32)
  bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
  return (bits & np.uint32(0xFFFF0000)).view(F).reshape(np.shape(x))


def _function(name):
  def value(x):
    if np.isneginf(x):
      return 0.0  # Only exp is asked for it.
    with mpmath.workprec(120):
      return float(_EXACT[name](mpmath.mpf(float(x))))

  return np.vectorize(lambda x: F(value(x)), otypes=[F])


_EXACT = {
    "exp": mpmath.exp,
    "cos": mpmath.cos,
    "sin": mpmath.sin,
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "softplus": lambda x: mpmath.log1p(mpmath.exp(x)),
}
exp, cos, sin, rsqrt, sigmoid, silu, softplus = map(_function, _EXACT)


def plus(x, constant):
  """x + constant, where the constant is no float32."""
  return F(np.float64(x) + np.float64(constant))


def times(x, constant):
  return F(np.float64(x) * np.float64(constant))


def chain(terms):
  """Adds along the last axis."""
  total = np.zeros(terms.shape[:-1], F)
  for k in range(terms.shape[-1]):
    total = total + terms[..., k]
  return total


def gemm(x, weight):
  """[..., k] by [n, k]: the products of 16-bit values are exact in float32."""
  return chain(x[..., None, :] * weight)


def wide_gemm(x, weight):
  """[t, k] by [n, k] of float32: one rounding a product and addition."""
  out = np.zeros((len(x), len(weight)), F)
  for k in range(x.shape[1]):
    product = np.multiply.outer(np.float64(x[:, k]), np.float64(weight[:, k]))
    total = product + np.float64(out)
    # A float64 in the middle of two float32 may itself have been rounded.
    middle = total.view(np.uint64) & np.uint64((1 << 29) - 1)
    rounded = total.astype(F)
    for at in zip(*np.where(middle == np.uint64(1 << 28))):
      exact = fractions.Fraction(product[at]) + fractions.Fraction(
          float(out[at])
      )
      nearby = [
          rounded[at],
          np.nextafter(rounded[at], F(np.inf)),
          np.nextafter(rounded[at], MINUS_INFINITY),
      ]
      rounded[at] = min(
          nearby,
          key=lambda v: (
              abs(fractions.Fraction(float(v)) - exact),
              int(v.view(np.uint32)) & 1,
          ),
      )
    out = rounded
  return out


def softmax(x):
  weights = exp(x - x.max(-1, keepdims=True))
  return weights / chain(weights)[..., None]


# Quantised and made wide again: section 2.


def _quantize(x, block, largest, floor, codes):
  parts = x.reshape(*x.shape[:-1], -1, block)
  out = np.empty_like(parts)
  for at in np.ndindex(parts.shape[:-1]):
    values = parts[at]
    amax = max(float(np.abs(values).max()), floor)
    scale = 2.0 ** np.ceil(np.log2(amax / largest))
    while scale / 2 * largest >= amax:  # Whatever log2 may have rounded.
      scale /= 2
    while scale * largest < amax:
      scale *= 2
    for i, value in enumerate(values):
      wanted = min(abs(float(value)) / scale, largest)
      index = min(
          range(len(codes)), key=lambda c: (abs(codes[c] - wanted), c & 1)
      )
      out[at][i] = F(np.copysign(codes[index] * scale, value))
  return r16(out.reshape(x.shape))


def _fp8_codes():
  tiny = [m / 8 * 2.0**-6 for m in range(8)]
  rest = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
  return (tiny + rest)[:-1]  # The last one is NaN.


_FP8 = _fp8_codes()
_FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def fp8(x, block):
  return _quantize(x, block, 448.0, 1e-4, _FP8)


def fp4_after_hadamard(x, block):
  dim = x.shape[-1]
  signs = np.array(
      [[(-1) ** bin(i & j).count("1") for j in range(dim)] for i in range(dim)],
      F,
  )
  return _quantize(
      r16(times(gemm(x, signs), dim**-0.5)), block, 6.0, 6 * 2.0**-126, _FP4
  )


class Reference:
  """One sequence through the whole decoder; `seen` holds what it showed."""

  def __init__(self, params, config, block, frequencies, quantization=None):
    """Takes float32 parameters by path.

    Args:
      params: {path: float32 array, or int table}.
      config: Sizes; no method of it is called.
      block: Slots of one block of attention.
      frequencies: {"main" or "compress": radians a position}.
      quantization: (activation, entry, index block) or None.
    """
    self.p, self.c = params, config
    self.block = block
    self.frequencies = frequencies
    self.blocks = quantization
    self.seen = {}

  def show(self, name, value):
    self.seen[name] = value
    return value

  def activation(self, x):
    return fp8(x, self.blocks[0]) if self.blocks else x

  def entry(self, x):
    if not self.blocks:
      return x
    still = fp8(x[..., : -self.c.rotary_dim], self.blocks[1])
    return np.concatenate([still, x[..., -self.c.rotary_dim :]], -1)

  def indexed(self, x):
    return fp4_after_hadamard(x, self.blocks[2]) if self.blocks else x

  def norm(self, x, path):
    mean = chain(x * x) / F(x.shape[-1])
    root = rsqrt(plus(mean, self.c.norm_epsilon))[..., None]
    return r16(self.p[path] * (x * root))

  def __call__(self, tokens):
    p, c = self.p, self.c
    x = np.repeat(p["embedding"][tokens][:, None], c.streams, 1)
    for layer in range(len(c.attentions)):
      at = f"layers.{layer}"
      post, comb, u = self.hyper(x, f"{at}.attention_hc")
      y = self.attention(self.norm(u, f"{at}.input_norm"), layer)
      x = self.show(
          f"{at}.streams_after_attention", self.spread(y, x, post, comb)
      )
      post, comb, u = self.hyper(x, f"{at}.moe_hc")
      y = self.moe(self.norm(u, f"{at}.mlp_norm"), tokens, layer)
      x = self.show(f"{at}.streams", self.spread(y, x, post, comb))
    mixes = self.mixes(x, "head_hc")
    pre = sigmoid(mixes * p["head_hc.scale"] + p["head_hc.base"])
    x = self.norm(self.collapse(plus(pre, c.hyper_epsilon), x), "final_norm")
    return self.show("logits", gemm(x, p["lm_head"]))

  # Section 4.

  def mixes(self, x, path):
    flat = x.reshape(len(x), -1)
    mean = chain(flat * flat) / F(flat.shape[1])
    root = rsqrt(plus(mean, self.c.norm_epsilon))[:, None]
    return self.show(
        f"{path}.mixes", wide_gemm(flat, self.p[f"{path}.fn"]) * root
    )

  def collapse(self, pre, x):
    return r16(chain(np.moveaxis(pre[..., None] * x, 1, -1)))

  def hyper(self, x, path):
    n, e = self.c.streams, self.c.hyper_epsilon
    base, scale = self.p[f"{path}.base"], self.p[f"{path}.scale"]
    m = self.mixes(x, path)
    pre = plus(sigmoid(m[:, :n] * scale[0] + base[:n]), e)
    post = F(2) * sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (m[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
    comb = plus(softmax(comb), e)
    for turn in range(2 * self.c.sinkhorn_iterations - 1):
      if turn % 2:  # Rows.
        comb = comb / plus(chain(comb), e)[:, :, None]
      else:  # Columns.
        comb = comb / plus(chain(np.swapaxes(comb, 1, 2)), e)[:, None]
    return post, comb, self.collapse(pre, x)

  def spread(self, y, x, post, comb):
    mixed = np.zeros_like(x)
    for i in range(self.c.streams):
      mixed = mixed + comb[:, i, :, None] * x[:, i, None]
    return r16(post[..., None] * y[:, None] + mixed)

  # Section 5.

  def turn(self, x, positions, kind, back=False):
    """Turns [token, ..., dim] by its positions; tables in float32."""
    d = self.c.rotary_dim
    angle = F(positions)[:, None] * self.frequencies[kind]
    c, s = cos(angle), sin(angle)
    shape = (len(x), *(1,) * (x.ndim - 2), d // 2)
    c, s = c.reshape(shape), s.reshape(shape)
    if back:
      s = -s
    even, odd = x[..., -d::2], x[..., -d + 1 :: 2]
    out = x.copy()
    out[..., -d::2] = r16(even * c + -odd * s)
    out[..., -d + 1 :: 2] = r16(odd * c + even * s)
    return out

  # Sections 7 and 8.

  def compressed(self, x, path, rate, overlaps):
    """Entries before they are turned: [entry, dim]."""
    p = self.p
    kv, gate = gemm(x, p[f"{path}.kv_proj"]), gemm(x, p[f"{path}.gate_proj"])
    self.show(f"{path}.kv_proj", kv)
    dim = len(p[f"{path}.norm"])
    out = []
    for w in range(len(x) // rate):
      own = slice(w * rate, (w + 1) * rate)
      scores = gate[own] + p[f"{path}.position_bias"]
      values = kv[own]
      if overlaps:
        if w:
          earlier = slice((w - 1) * rate, w * rate)
          old = gate[earlier] + p[f"{path}.position_bias"]
          old_values = kv[earlier]
        else:
          old = np.full_like(scores, MINUS_INFINITY)
          old_values = np.zeros_like(values)
        scores = np.concatenate([old[:, :dim], scores[:, dim:]])
        values = np.concatenate([old_values[:, :dim], values[:, dim:]])
      out.append(r16(chain(values.T * softmax(scores.T))))
    out = np.array(out, F).reshape(-1, dim)
    out = self.norm(out, f"{path}.norm") if len(out) else out
    return self.turn(out, np.arange(len(out)) * rate, "compress")

  def chosen(self, x, rank, path):
    """For each token the entries it sees, best first."""
    p, c = self.p, self.c
    heads, dim = c.index_heads, c.index_dim
    keys = self.indexed(
        self.compressed(x, f"{path}.compressor", c.csa_rate, True)
    )
    self.show(f"{path}.keys", keys)
    q = r16(gemm(rank, p[f"{path}.q_b_proj"])).reshape(len(x), heads, dim)
    q = self.indexed(self.turn(q, np.arange(len(x)), "compress"))
    weights = r16(gemm(x, p[f"{path}.weights_proj"]))
    weights = r16(times(weights, dim**-0.5 * heads**-0.5))
    out = []
    # Entries that are not complete have no score here.
    shown = np.full((len(x), len(keys)), np.nan, F)
    self.show(f"{path}.index_scores", shown)
    for t in range(len(x)):
      number = (t + 1) // c.csa_rate
      scores = np.maximum(r16(gemm(q[t], keys[:number])), F(0))
      scores = r16(chain(r16(scores * weights[t, :, None]).T))
      shown[t, :number] = scores
      best = sorted(range(number), key=lambda w: (-scores[w], w))
      out.append(best[: c.index_top_k])
    return out

  # Section 6.

  def attention(self, x, layer):
    p, c, tokens = self.p, self.c, len(x)
    at = f"layers.{layer}.attention"
    kind = c.attentions[layer]
    table = "main" if kind == "swa" else "compress"
    here = np.arange(tokens)
    given = self.activation(x)
    rank = self.norm(r16(gemm(given, p[f"{at}.q_a_proj"])), f"{at}.q_a_norm")
    rank = self.activation(rank)
    q = r16(gemm(rank, p[f"{at}.q_b_proj"]))
    q = q.reshape(tokens, c.num_heads, c.head_dim)
    # The chain's own mean rounds its sum and its quotient.
    mean = r16(r16(chain(r16(q * q))) / F(c.head_dim))
    root = r16(rsqrt(r16(plus(mean, c.norm_epsilon))))
    q = self.turn(r16(q * root[..., None]), here, table)
    kv = self.norm(r16(gemm(given, p[f"{at}.kv_proj"])), f"{at}.kv_norm")
    kv = self.show(f"{at}.state_kv", self.entry(self.turn(kv, here, table)))
    entries = np.zeros((0, c.head_dim), F)
    seen = [[] for _ in here]
    if kind == "csa":
      entries = self.compressed(x, f"{at}.compressor", c.csa_rate, True)
      seen = self.chosen(x, rank, f"{at}.indexer")
    elif kind == "hca":
      entries = self.compressed(x, f"{at}.compressor", c.hca_rate, False)
      seen = [list(range((t + 1) // c.hca_rate)) for t in here]
    entries = self.entry(entries) if len(entries) else entries
    self.show(f"{at}.entries", entries)
    out = np.empty_like(q)
    most = c.window + max(map(len, seen))
    shown = np.zeros((tokens, c.num_heads, most), F)
    self.show(f"{at}.online.exponentials", shown)
    for t in here:
      window = [kv[s] for s in range(max(0, t - c.window + 1), t + 1)]
      slots = window + [None] * (c.window - len(window))
      slots += [entries[w] for w in seen[t]]
      for h in range(c.num_heads):
        sink = p[f"{at}.sinks"][h]
        out[t, h] = self.online(q[t, h], slots, sink, shown[t, h])
    out = r16(self.show(f"{at}.online.divided", out))
    out = self.turn(self.show(f"{at}.values", out), here, table, back=True)
    groups = out.reshape(tokens, c.output_groups, -1)
    weight = p[f"{at}.o_a_proj"].reshape(c.output_groups, -1, groups.shape[-1])
    out = [gemm(groups[:, g], weight[g]) for g in range(c.output_groups)]
    out = self.activation(r16(np.concatenate(out, -1)))
    return self.show(f"{at}.o_b_proj", r16(gemm(out, p[f"{at}.o_b_proj"])))

  def online(self, q, slots, sink, shown):
    m = total = value = None
    for start in range(0, len(slots), self.block):
      places = range(start, min(start + self.block, len(slots)))
      places = [s for s in places if slots[s] is not None]
      block = [slots[s] for s in places]
      if not block:
        continue
      keys = np.stack(block)
      scores = times(gemm(q, keys), self.c.head_dim**-0.5)
      peak = scores.max() if m is None else max(m, scores.max())
      weights = exp(scores - peak)
      shown[places] = weights
      sum_ = chain(weights)
      product = gemm(r16(weights), keys.T)
      if m is None:
        total, value = sum_, product
      else:
        keep = exp(m - peak)
        total, value = total * keep + sum_, value * keep + product
      m = peak
    return value / (total + exp(sink - m))

  # Section 9.

  def moe(self, x, tokens, layer):
    p, c = self.p, self.c
    at = f"layers.{layer}.moe"
    sigma = np.sqrt(softplus(gemm(x, p[f"{at}.router"])))
    self.show(f"{at}.router.scores", sigma)
    given = self.activation(x)
    shared = self.expert(
        r16(gemm(given, p[f"{at}.shared.gate_proj"])),
        r16(gemm(given, p[f"{at}.shared.up_proj"])),
        F(1),
        p[f"{at}.shared.down_proj"],
    )
    out = np.empty_like(x)
    combined = self.show(f"{at}.experts.combine", np.empty_like(x))
    for t, token in enumerate(tokens):
      if layer in c.hash_layers:
        ids = [int(i) for i in p[f"{at}.table"][token]]
      else:
        biased = sigma[t] + p[f"{at}.bias"]
        ids = sorted(range(c.num_experts), key=lambda e: (-biased[e], e))
        ids = ids[: c.top_k]
      gates = sigma[t, ids]
      gates = times(gates / chain(gates), c.gate_scale)
      routed = np.zeros(x.shape[1], F)
      for expert, gate in sorted(zip(ids, gates)):
        both = r16(gemm(given[t], p[f"{at}.gate_up"][expert]))
        a, b = np.split(both, 2)
        routed = routed + self.expert(a, b, gate, p[f"{at}.down"][expert])
      combined[t] = routed
      out[t] = r16(routed + shared[t])
    return self.show(f"{at}.sum", out)

  def expert(self, a, b, gate, down):
    c = F(self.c.swiglu_limit)
    inner = silu(np.minimum(a, c)) * np.clip(b, -c, c)
    return r16(gemm(self.activation(r16(inner * gate)), down))
