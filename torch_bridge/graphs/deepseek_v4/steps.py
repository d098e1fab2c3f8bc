"""Steps that several modules of transformers' DeepSeek-V4 share.

A step is (operation, tap, whether it may be absent), as `graph_match` has it. A
cast is absent where the value has the dtype already.

Layer: torch_bridge.
"""

from torch_bridge.graphs import graph_match

Steps = tuple[graph_match.Step, ...]

_PRODUCT = ("mm", "addmm")


def named(prefix: str, *steps: tuple[str, str]) -> Steps:
  """Steps from (operation, tap); a cast may be absent."""
  return tuple(
      (operation, f"{prefix}.{tap}", operation == "cast")
      for operation, tap in steps
  )


def projection(name: str) -> Steps:
  """A product with a weight."""
  return ((_PRODUCT, name, False),)


def _variance(prefix: str) -> Steps:
  """The reciprocal root of a mean square."""
  return named(
      prefix,
      ("pow", "square"),
      ("mean", "mean"),
      ("add", "plus_epsilon"),
      ("rsqrt", "rsqrt"),
  )


def norm(prefix: str) -> Steps:
  """A norm with a float32 weight; one rounding at the end."""
  return (
      *_variance(prefix),
      *named(
          prefix, ("mul", "normalized"), ("mul", "weighted"), ("cast", "output")
      ),
  )


def bare_norm(prefix: str) -> Steps:
  """A norm without a weight; its factor is rounded before it multiplies."""
  return (
      *_variance(prefix),
      *named(prefix, ("cast", "rounded"), ("mul", "output")),
  )


def turn(prefix: str) -> Steps:
  """The rotation of the trailing channels."""
  return named(
      prefix,
      ("mul", "times_cos"),
      ("mul", "times_sin"),
      ("add", "sum"),
      ("cast", "rounded"),
  )


def tables(prefix: str) -> Steps:
  """The cosines and sines of a rotation."""
  return (
      # Up to 5.17 a product over a contracting axis of length one.
      (("mul", "bmm"), f"{prefix}.angle", False),
      *named(
          prefix,
          ("cos", "cosine"),
          ("mul", "cosine_scaled"),
          ("sin", "sine"),
          ("mul", "sine_scaled"),
          ("cast", "cos"),
          ("cast", "sin"),
      ),
  )
