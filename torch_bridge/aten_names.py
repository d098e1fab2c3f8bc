"""Which aten operations move values, and the name of an operation.

A reference is only as good as our knowledge of what it runs. Every aten
operation is in one of three classes: it moves or selects values without
rounding (here), it computes and `portable_mode.py` knows how to do that in
float64, or it is refused.

Layer: torch_bridge.
"""

# Views, copies, casts, gathers, comparisons, fills and integer work. A cast
# rounds once by definition and is the same in every arithmetic.
EXACT = frozenset("""
_assert_tensor_metadata _local_scalar_dense _reshape_alias _to_copy
_unsafe_view abs alias all amax amin aminmax any arange argmax argmin argsort
as_strided bincount bitwise_and bitwise_not bitwise_or broadcast_tensors cat
ceil chunk clamp clamp_max clamp_min clone constant_pad_nd contiguous copy
copy_ detach diagonal embedding empty empty_like empty_strided eq equal expand
fill fill_ flip floor full full_like gather ge gt histc index index_copy
index_copy_ index_put index_put_ index_select isfinite isin isinf isnan
is_same_size le lift_fresh logical_and logical_not logical_or lt masked_fill
masked_fill_ masked_select max maximum min minimum movedim narrow ne neg
new_empty new_empty_strided new_full new_ones new_zeros nonzero one_hot ones
ones_like permute relu repeat repeat_interleave reshape resize_ resolve_conj
resolve_neg roll round scalar_tensor scatter scatter_ select select_backward
set_ sign slice slice_backward slice_scatter sort split split_with_sizes
squeeze stack stride sym_size t tensor_split tile to topk transpose tril triu
unbind unfold unsqueeze view where zero_ zeros zeros_like
""".split())

# Selections whose order among equal values PyTorch leaves open.
SELECTIONS = ("topk", "sort")


def base_name(func) -> str:
  """Returns the name without namespace and overload: "mul", "div_"."""
  return func._schema.name.split("::")[-1]  # pylint: disable=protected-access


def is_in_place(func) -> bool:
  """Whether the operation writes into its first argument."""
  name = base_name(func)
  return name.endswith("_") and not name.endswith("__")
