"""The legend of axis names; the only place where they are defined.

Shapes in docstrings and in the table of taps are written with these names, so
that "[token, slot, embed]" means the same thing everywhere.

Layer: contracts. Imports nothing from this project.
"""

AXES = {
    "batch": "independent sequences",
    "token": "positions fed in this step",
    "key": "positions that attention reads, earlier ones included",
    "embed": "width of the residual stream",
    "vocab": "tokens of the vocabulary",
    "head": "query heads",
    "kv_head": "key and value heads",
    "head_dim": "width of one head",
    "half_dim": "rotary pairs: head_dim / 2",
    "expert": "experts of one layer",
    "slot": "places of a route: 0 .. top_k - 1",
    "hidden": "width inside an expert or a dense MLP",
    "two_hidden": "gate half, then up half, of a fused projection",
    "route": "token * top_k + slot",
    "gemm": "W13, then W2, of a packed expert layer",
    "one": "a kept axis of length one",
    # DeepSeek-V4.
    "stream": "residual streams of the hyper-connections",
    "stream_out": "the stream that a mixing matrix writes",
    "stream_embed": "all streams of a token, one after another",
    "mix": "weights of a hyper-connection: pre, post, then the mixing matrix",
    "round": "normalisations of a mixing matrix: columns, rows, columns, ...",
    "rotary_dim": "the trailing channels of a head that turn",
    "window": "compression windows that this step completes",
    "row": "tokens of one compression window",
    "series_row": "tokens pooled into one entry: earlier window's, then own",
    "entry": "compressed entries, earlier steps included",
    "attended": "keys of online attention, and room: window, then entries",
    "attended_block": "blocks of attended",
    "key_and_sink": "key, then the sink of the head",
    "group": "groups of heads with their own output projection",
    "rank": "width of one group after it",
}
