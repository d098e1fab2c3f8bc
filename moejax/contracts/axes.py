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
    "one": "a kept axis of length one",
}
