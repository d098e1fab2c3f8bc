"""How far a computed reduction or function may lie from the exact value.

Each function returns B, in units of the arithmetic's unit roundoff u: a value
computed with any order of additions lies within B * u of the exact one. With
u = 2**-53 these bounds make the certificate of portable arithmetic; with
u = 2**-24 they are the rule for native operations, which compute in float32.

Sources: sums, dot products and means: Higham, Accuracy and Stability of
Numerical Algorithms (2nd ed.), section 3.1 and equation 3.5, with
sum|a_i b_i| <= |a|_2 |b|_2. Functions: stated bounds of this project, far above
what was measured (`tests/numerics/error_bounds_test.py` measures NumPy's and
XLA's float64 functions against 160-bit values).

Layer: numerics. `xp` is numpy or jax.numpy; arrays are float64.
"""

# In units of u relative to the result, for arguments that are exact.
RELATIVE = {
    "rsqrt": 4.0,
    "sqrt": 2.0,
    "reciprocal": 2.0,
    "exp": 8.0,
    "log": 8.0,
    "cos": 8.0,
    "sin": 8.0,
    "tanh": 16.0,
    "sigmoid": 16.0,
    "silu": 16.0,
    "softplus": 16.0,
    "power": 32.0,
    "divide": 2.0,
}
_SLACK = 1.001  # Covers the roundings of the bound itself.


def dot(a_norm, b_norm, length: int):
  """B of a dot product from the 2-norms of its operands."""
  return _SLACK * (length + 1) * a_norm * b_norm


def norm(x, xp, axis: int = -1):
  """The 2-norm along an axis, which is kept."""
  return xp.sqrt(xp.sum(x * x, axis=axis, keepdims=True))


def total(x, xp, axis: int = -1):
  """B of a sum along an axis, which is kept."""
  size = x.shape[axis]
  return _SLACK * size * xp.sum(xp.abs(x), axis=axis, keepdims=True)


def mean(x, xp):
  """B of a mean along the last axis, which is kept."""
  size = x.shape[-1]
  return _SLACK * (size + 2) * xp.mean(xp.abs(x), axis=-1, keepdims=True)


def softmax(shifted, y, xp):
  """B of a softmax, from the arguments less their maximum and the result.

  The shift costs |d| u relative in exp(d), the function 8 u, the sum of n
  terms n u, the shifts inside the sum at most n / e, the division u.
  """
  size = shifted.shape[-1]
  reach = xp.minimum(xp.abs(shifted), 750.0)  # Beyond it exp is zero.
  return _SLACK * xp.abs(y) * (reach + 1.4 * size + 20.0)


def relative(name: str, y, xp):
  """B of a function of one exact argument, from its result."""
  return _SLACK * RELATIVE[name] * xp.abs(y)


def silu_backward(g, x, s, xp):
  """B of g s (1 + x (1 - s)), where s and 1 - s are computed by `sigmoid`.

  Both are within 16 u; the product costs one more, the sum two of its terms.
  """
  rise = xp.abs(x) * (1 - s)
  return _SLACK * xp.abs(g) * s * (40.0 * xp.abs(1 + x * (1 - s)) + 20.0 * rise)


def softmax_backward(g, y, xp):
  """B of y (g - sum(g y)) along the last axis."""
  size = y.shape[-1]
  terms = xp.sum(xp.abs(g * y), axis=-1, keepdims=True)
  return _SLACK * xp.abs(y) * ((size + 4) * terms + 3 * xp.abs(g))


def log_softmax_backward(g, y, xp):
  """B of g - exp(y) sum(g) along the last axis."""
  size = y.shape[-1]
  terms = xp.sum(xp.abs(g), axis=-1, keepdims=True)
  return _SLACK * ((size + 12) * xp.exp(y) * terms + xp.abs(g))


def fused(x, change, xp):
  """B of x + change, where change is a product or quotient of three values."""
  return _SLACK * (xp.abs(x) + 6 * xp.abs(change))


def lerp(x, y, weight: float, xp):
  """B of x + weight (y - x)."""
  return _SLACK * (xp.abs(x) + 6 * abs(weight) * (xp.abs(x) + xp.abs(y)))
